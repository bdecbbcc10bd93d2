"""Permission requests of an upstream's agent during its answer, and the decisions, as values."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal

from msgspec import Struct

from midstream.number_checks import require_count, require_seconds
from midstream.session.calls import APPROVERS_MAX

Kind = Literal["read", "search", "think", "fetch", "edit", "delete", "move", "execute", "other"]


class Permission(Struct, frozen=True):
    """Permission that an agent requests.

    Args:
        agent: The id of its conversation; "" if it has none yet.
        tool: The agent's name of the tool, or its title of the act.
        kind: The kind of act that the agent states; "other" if it states none.
        arguments: JSON text; "{}" if it shows none.
        is_fixed: Whether it cannot continue with other arguments.
        is_vague: Whether the request does not describe the whole act.
    """

    agent: str
    tool: str
    kind: Kind
    arguments: str
    is_fixed: bool = False
    is_vague: bool = False


class Ask(Struct, frozen=True):
    """A question to a person, if one can be asked: see `Person`.

    Args:
        text: The text beside the act.
        answer_s: Seconds for the answer, 366 days at most; 0 for no limit. After that, the act is refused.
        approvers: Number of different people who must allow it, 10 at most. The server must authenticate them.

    Raises:
        UsageError: `answer_s` or `approvers` is out of bounds.
    """

    text: str = ""
    answer_s: float = 0.0
    approvers: int = 1

    def __post_init__(self) -> None:
        require_seconds("answer_s", self.answer_s)
        require_count("approvers", self.approvers, least=1, most=APPROVERS_MAX)


class Allowed(Struct, frozen=True):
    """The act is allowed; with `arguments` (JSON text) instead of the agent's own, if a person changed them."""

    arguments: str | None = None


Decision = Allowed | str
"""Permission, or the reason for a refusal, which the agent gets."""

Person = Callable[[Permission, Ask], Awaitable[Decision]]
"""Asks the people of a session, without a time limit of its own. The waiting task may be cancelled."""
