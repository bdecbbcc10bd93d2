"""Waits of a session that is not worked on: for a client, a person, the end of a grace. One timer for all of it.

A task for each would be a coroutine, a context and a timer: with hundreds of sessions whose clients run tools, most of
what the garbage collector walks.
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
"""a piece of pending work for which nothing is to be done before its deadline."""
Work = CallModel | RunCall | RunChild | ProbeCall | AnswerAgent
"""a piece of pending work for which something is to be done."""
_WAITS = (AwaitClient, AwaitPerson, AwaitCancelled, AwaitEnd)


class Waits:
    """Reports each deadline once, when it has come.

    Args:
        world: The clock.
        expire: Called with what the end of a wait means.
    """

    def __init__(self, world: World, expire: Callable[[Command], None]) -> None:
        self._world = world
        self._expire = expire
        self._waits: Sequence[Wait] = ()
        self._expired: set[Wait] = set()
        """Those of `_waits` that have expired, and are not yet over."""
        self._timer: Cancellable | None = None
        self._rings_at = 0.0

    def set(self, waits: Sequence[Wait]) -> None:
        """Wait for these, and for no others any more."""
        self._waits = waits
        if self._expired:
            self._expired.intersection_update(waits)
            waits = [each for each in waits if each not in self._expired]
        first_at = min([each.deadline_at for each in waits], default=None)
        if first_at is None:
            self._stop()
        elif self._timer is None or first_at < self._rings_at:
            self._ring_at(first_at)
        # Otherwise it rings too early, for one that is over by now, and is set anew then.

    def clear(self) -> None:
        """Wait for nothing."""
        self.set(())

    def close(self) -> None:
        """Drop all deadlines."""
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
        now = self._world.now()  # it may have been set back, or gone on while the machine slept
        for each in self._waits:
            if each.deadline_at <= now and each not in self._expired:
                self._expired.add(each)
                self._expire(_end_of(each))
        self.set(self._waits)


def split_work_and_waits(pending_work: Iterable[PendingWork]) -> tuple[list[Work], list[Wait]]:
    """Return what is to be done, and what is to be waited for."""
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
