"""Permissions of upstream agents, decided by rules or by a person.

A coding agent requests permission for certain acts, which it selects itself, and waits for the answer in its run. Rules
decide without a person. If they return `Ask`, and the agent works for a session, the people of that session are asked,
as for any approval (docs/spec/turn.md, TURN-77 to TURN-82). Otherwise the request is refused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from fnmatch import fnmatchcase
from typing import Literal, assert_never

from msgspec import Struct

from midstream.agents.tool_value_json import DEEP_VALUE
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
"""Kinds of acts that change nothing. Fetching is not among them: an address can contain secrets."""

Verdict = Literal[True] | str | Ask
"""True; or a reason for a refusal, which the agent gets; or a question for a person."""


class Rules(Struct, frozen=True):
    """Rules by kind or name of a tool: allow, refuse, or ask a person.

    Args:
        kinds: Allowed kinds. The agent itself declares the kind: use `tools` to be strict.
        tools: Allowed names, of any kind.
        refused: Refused names, of any kind, without a person.
        others: The decision about all other acts. `Ask` means refused if no person can be asked.
        asked: Patterns of names (`mcp__bank__*`) with the terms of questions to people, for any kind; the first match
            applies. `Ask(approvers=2)` requires two different people.
    """

    kinds: frozenset[Kind] = HARMLESS
    tools: frozenset[str] = frozenset()
    refused: frozenset[str] = frozenset()
    others: Literal["refuse"] | Ask = "refuse"
    asked: Mapping[str, Ask] = {}

    def verdict(self, permission: Permission) -> Verdict:
        """Return the decision of the rules about a permission."""
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
"""The default: reading is allowed, effects are refused."""
ASK_FIRST = Rules(others=Ask())
"""Reading is allowed, people are asked about the rest, without a time limit."""
EVERYTHING = Rules(
    frozenset({"read", "search", "think", "fetch", "edit", "delete", "move", "execute", "other"})
)
"""All acts are allowed, for agents in an environment without valuable data."""

Asking = Callable[[Permission], Awaitable[Verdict]]
"""A function of yours that decides. The agent's silence is measured meanwhile: return `Ask` to give people time."""


async def decide_permission(
    permissions: Rules | Asking, permission: Permission, person: Person | None = None
) -> Decision:
    """Decide by rules or by a function, and ask a person if they return `Ask`.

    An act whose arguments are too deep to be shown is refused.
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
