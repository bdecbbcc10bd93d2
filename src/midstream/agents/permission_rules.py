"""Permissions of upstream agents: decided by rules, or by a person.

A coding agent asks before it does certain things (which, is its own decision), and waits for the answer in the middle
of its run. Rules decide without a person. Where they return `Ask`, and the agent works for a session, the question
is put to the people of that session like any approval (docs/spec/turn.md, TURN-77 to TURN-82); elsewhere it is refused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from fnmatch import fnmatchcase
from typing import Literal, assert_never

from msgspec import Struct

from midstream.agents.agent_values import DEEP_VALUE
from midstream.json_depth import TOO_DEEP
from midstream.session.permissions import Allowed, Ask, Decision, Kind, Permission, Person

__all__ = [
    "ASK_FIRST",
    "CAUTIOUS",
    "EVERYTHING",
    "HARMLESS",
    "Allowed",
    "Ask",
    "Asking",
    "Decision",
    "Kind",
    "Permission",
    "Person",
    "Rules",
    "Verdict",
    "decide_permission",
]

HARMLESS: frozenset[Kind] = frozenset({"read", "search", "think"})
"""What changes nothing, here or elsewhere. Fetching is not among them: an address can carry words away."""

Verdict = Literal[True] | str | Ask
"""True; or why not, which the agent reads; or that a person shall decide."""


class Rules(Struct, frozen=True):
    """Allow what is of a kind or has a name; refuse the rest, or ask a person about it.

    Args:
        kinds: Kinds that are allowed. An agent that lies about them gets away with it: name tools to be strict.
        tools: Names that are allowed, whatever their kind.
        refused: Names that are refused, whatever their kind, without a person.
        others: What becomes of all else. It is refused, too, where no person can be asked.
        asked: Patterns of names (`mcp__bank__*`), and the terms on which people are asked about those, whatever their
            kind; the first that fits counts. `Ask(approvers=2)` requires two different people.
    """

    kinds: frozenset[Kind] = HARMLESS
    tools: frozenset[str] = frozenset()
    refused: frozenset[str] = frozenset()
    others: Literal["refuse"] | Ask = "refuse"
    asked: Mapping[str, Ask] = {}

    def verdict(self, permission: Permission) -> Verdict:
        """Decide."""
        is_refused = permission.tool in self.refused
        for pattern, terms in self.asked.items():
            if not is_refused and fnmatchcase(permission.tool, pattern):
                return terms
        if not is_refused and (permission.kind in self.kinds or permission.tool in self.tools):
            return True
        if isinstance(self.others, Ask) and not is_refused:
            return self.others
        return _refusal(permission, "the rules allow only other things")


CAUTIOUS = Rules()
"""The default: what only reads is allowed, whatever has effects is refused."""
ASK_FIRST = Rules(others=Ask())
"""What only reads is allowed, a person is asked about the rest, for as long as they take."""
EVERYTHING = Rules(
    frozenset({"read", "search", "think", "fetch", "edit", "delete", "move", "execute", "other"})
)
"""For agents in a place where nothing can be lost."""

Asking = Callable[[Permission], Awaitable[Verdict]]
"""Decides in code of your own. The agent waits, and its silence counts: to let people take their time, return `Ask`."""


async def decide_permission(
    permissions: Rules | Asking, permission: Permission, person: Person | None = None
) -> Decision:
    """Decide by rules or by code, and ask the person where those return `Ask`.

    An act whose arguments are too deep to be shown is refused: no rule has seen them.
    """
    if permission.arguments == DEEP_VALUE:
        return f"{permission.tool!r} is not allowed: its arguments are {TOO_DEEP}."
    verdict = (
        permissions.verdict(permission) if isinstance(permissions, Rules) else await permissions(permission)
    )
    match verdict:
        case True:
            return Allowed()
        case str():
            return verdict
        case Ask():
            if person is None:
                return _refusal(permission, "this needs a person's permission")
            return await person(permission, verdict)
        case _:
            assert_never(verdict)


def _refusal(permission: Permission, why: str) -> str:
    return (
        f"{permission.tool!r} ({permission.kind}) is not allowed here: no person can be asked, and {why}. "
        "Do without it, or report what would have to be done."
    )
