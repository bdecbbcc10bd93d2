"""May an upstream's agent do what it asks to do? Rules that decide without asking anybody, or somebody who is asked.

A coding agent asks before it does certain things (which, is its own decision). It waits for the answer in the middle
of its run, so whoever is asked must be there; nothing of it outlives the process.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal

from msgspec import Struct

Kind = Literal["read", "search", "think", "fetch", "edit", "delete", "move", "execute", "other"]
HARMLESS: frozenset[Kind] = frozenset({"read", "search", "think"})
"""What changes nothing, here or elsewhere. Fetching is not among them: an address can carry words away."""


class Permission(Struct, frozen=True):
    """What an agent asks leave for.

    Args:
        agent: Its conversation, or "" where it has no name yet.
        tool: What it calls the tool, or the title it gives to what it is about to do.
        kind: What sort of deed the agent says it is; "other" where it does not say.
        arguments: JSON text, "{}" where it shows none.
    """

    agent: str
    tool: str
    kind: Kind
    arguments: str


Verdict = Literal[True] | str
"""True, or why not: the agent reads it."""


class Rules(Struct, frozen=True):
    """Allow what is of a kind or has a name, refuse the rest.

    Args:
        kinds: Kinds that are allowed. An agent that lies about them gets away with it: name tools to be strict.
        tools: Names that are allowed, whatever their kind.
        refused: Names that are refused, whatever their kind.
    """

    kinds: frozenset[Kind] = HARMLESS
    tools: frozenset[str] = frozenset()
    refused: frozenset[str] = frozenset()

    def verdict(self, permission: Permission) -> Verdict:
        """Decide."""
        is_allowed = permission.kind in self.kinds or permission.tool in self.tools
        if is_allowed and permission.tool not in self.refused:
            return True
        return (
            f"{permission.tool!r} ({permission.kind}) is not allowed here: nobody is there to ask, and the rules "
            "allow only other things. Do without it, or say what would have to be done."
        )


CAUTIOUS = Rules()
"""The default: what only reads is allowed, whatever has effects is refused."""
EVERYTHING = Rules(
    frozenset({"read", "search", "think", "fetch", "edit", "delete", "move", "execute", "other"})
)
"""For agents in a place where nothing can be lost."""

Asking = Callable[[Permission], Awaitable[Verdict]]
"""Asks somebody. The agent waits, and so does its turn; its silence is not the model's."""


async def verdict(permissions: Rules | Asking, permission: Permission) -> Verdict:
    """Decide by rules, or ask."""
    if isinstance(permissions, Rules):
        return permissions.verdict(permission)
    return await permissions(permission)
