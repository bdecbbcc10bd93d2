"""Request to a model that remembers, from a host that sends its whole conversation again each turn."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from midstream.core.messages import History, ToolSpec
from midstream.core.permissions import Person
from midstream.core.replies import ModelRequest
from midstream.core.reuse.fingerprint import Heard
from midstream.core.timing import StallBudgets
from midstream.core.wishes import NO_WISHES, Wishes


class ResentRequest(Struct, frozen=True):
    """A `ModelRequest` of whose history only the end was read: what stands before it was read in an earlier turn.

    Args:
        instructions, tools, key, session, is_ephemeral, wishes, person, stalls: See `ModelRequest`.
        heard: What matters of the whole history.
        tail: Its last entries, at least those that are new; perhaps all of it.
        whole: Returns all of it. It may cost what reading it for the first time did.
    """

    instructions: str
    heard: Heard
    tail: History
    whole: Callable[[], History]
    tools: tuple[ToolSpec, ...] = ()
    key: str = ""
    session: str = ""
    is_ephemeral: bool = False
    wishes: Wishes = NO_WISHES
    person: Person | None = None
    stalls: StallBudgets | None = None

    def request(self) -> ModelRequest:
        """Return the same with its whole history, for a model that keeps nothing."""
        return ModelRequest(
            self.instructions,
            self.whole(),
            self.tools,
            key=self.key,
            session=self.session,
            is_ephemeral=self.is_ephemeral,
            wishes=self.wishes,
            person=self.person,
            stalls=self.stalls,
        )
