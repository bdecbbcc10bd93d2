"""Waits of a session without running work: for a client, a person, the end of a grace. All of them share one timer.

A task for each wait would be a coroutine, a context and a timer. With hundreds of sessions whose clients run tools, the
garbage collector would spend most of its time on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import assert_never

from midstream.environment import Cancellable, World
from midstream.session.turn.commands import CallExpired, CancelExpired, Command, QuestionExpired, TurnExpired
from midstream.session.turn.pending import (
    AnswerAgent,
    AwaitCancelled,
    AwaitClient,
    AwaitEnd,
    AwaitPerson,
    CallModel,
    PendingWork,
    ProbeCall,
    RunCall,
    RunChild,
)

Wait = AwaitClient | AwaitPerson | AwaitCancelled | AwaitEnd
"""Pending work that needs no action before its deadline."""
Work = CallModel | RunCall | RunChild | ProbeCall | AnswerAgent
"""Pending work that needs an executor."""
_WAITS = (AwaitClient, AwaitPerson, AwaitCancelled, AwaitEnd)


class Waits:
    """Reports each expired deadline once.

    Args:
        world: The clock.
        expire: Called with the command that an expired wait causes.
    """

    def __init__(self, world: World, expire: Callable[[Command], None]) -> None:
        self._world = world
        self._expire = expire
        self._waits: Sequence[Wait] = ()
        self._expired: set[Wait] = set()
        """Waits that have expired and are still pending."""
        self._timer: Cancellable | None = None
        self._rings_at = 0.0

    def set(self, waits: Sequence[Wait]) -> None:
        """Replace all waits by these."""
        self._waits = waits
        if self._expired:
            self._expired.intersection_update(waits)
            waits = [each for each in waits if each not in self._expired]
        first_at = min([each.deadline_at for each in waits], default=None)
        if first_at is None:
            self._stop()
        elif self._timer is None or first_at < self._rings_at:
            self._ring_at(first_at)
        # A timer of an ended wait may be left: it fires too early, and is then set again.

    def clear(self) -> None:
        """Remove all waits."""
        self.set(())

    def close(self) -> None:
        """Drop all deadlines, and the reference to the session."""
        self.clear()
        self._expire = _ignore

    def _ring_at(self, at: float) -> None:
        self._stop()
        self._rings_at = at
        self._timer = self._world.later(max(0.0, at - self._world.now()), self._ring)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self) -> None:
        self._timer = None
        now = self._world.now()  # the wall clock may have been set back, or the machine may have slept
        for each in self._waits:
            if each.deadline_at <= now and each not in self._expired:
                self._expired.add(each)
                self._expire(_end_of(each))
        self.set(self._waits)


def split_work_and_waits(pending_work: Iterable[PendingWork]) -> tuple[list[Work], list[Wait]]:
    """Return the work for executors, and the waits."""
    work: list[Work] = []
    waits: list[Wait] = []
    for each in pending_work:
        if isinstance(each, _WAITS):
            waits.append(each)
        else:
            work.append(each)
    return work, waits


def _ignore(_command: Command) -> None:
    pass


def _end_of(wait: Wait) -> Command:
    match wait:
        case AwaitClient():
            return CallExpired(wait.ref)
        case AwaitPerson():
            return QuestionExpired(wait.ref)
        case AwaitCancelled():
            return CancelExpired(wait.turn)
        case AwaitEnd():
            return TurnExpired(wait.turn)
        case _:
            assert_never(wait)
