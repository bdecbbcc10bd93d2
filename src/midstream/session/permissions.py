"""Permissions that an upstream's agent requests in the middle of its answer, and their answers, as values."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal

from msgspec import Struct

from midstream.errors import UsageError
from midstream.session.calls import APPROVERS_MAX
from midstream.timing import WAIT_S_MAX

Kind = Literal["read", "search", "think", "fetch", "edit", "delete", "move", "execute", "other"]


class Permission(Struct, frozen=True):
    """Permission that an agent requests.

    Args:
        agent: Its conversation, or "" where it has no name yet.
        tool: What it calls the tool, or the title it gives to what it is about to do.
        kind: The kind of act that the agent states; "other" where it states none.
        arguments: JSON text, "{}" where it shows none.
        is_fixed: It cannot continue with other arguments.
        is_vague: It does not show all that it is about to do.
    """

    agent: str
    tool: str
    kind: Kind
    arguments: str
    is_fixed: bool = False
    is_vague: bool = False


class Ask(Struct, frozen=True):
    """Let a person decide, where there is one: see `Person`.

    Args:
        text: Text that is shown beside the act.
        answer_s: Seconds they have, 366 days at most; 0 for no limit. After that the agent is refused.
        approvers: How many different people must allow it, 10 at most. The server must authenticate them.

    Raises:
        UsageError: `answer_s` or `approvers` is out of its bounds.
    """

    text: str = ""
    answer_s: float = 0.0
    approvers: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.answer_s <= WAIT_S_MAX:
            raise UsageError(f"`answer_s` is {self.answer_s:g}; expected 0 to {WAIT_S_MAX:g} seconds")
        if not 1 <= self.approvers <= APPROVERS_MAX:
            raise UsageError(f"`approvers` is {self.approvers}; expected 1 to {APPROVERS_MAX}")


class Allowed(Struct, frozen=True):
    """The agent may go on; with `arguments` (JSON text) in the place of its own, where a person changed them."""

    arguments: str | None = None


Decision = Allowed | str
"""Leave, or why not: the agent reads it."""

Person = Callable[[Permission, Ask], Awaitable[Decision]]
"""Puts it to the people of a session, and waits for as long as they take. The waiting task may be cancelled."""
