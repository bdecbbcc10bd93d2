"""One session: commands on their way to its journal, in the order in which they came, and who waits for them."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any

from midstream.environment import Cancellable, World
from midstream.errors import MidstreamError
from midstream.models.responses import merge_deltas
from midstream.session.references import AttemptRef
from midstream.session.session import Received, ToolsFound
from midstream.session.turn.commands import (
    Answer,
    CallFinished,
    Cancel,
    Command,
    ModelStreamed,
    Resume,
    SendMessage,
    Withdraw,
)
from midstream.session.turn.pending import RunCall
from midstream.store.contract import Attempt

MAILBOX_MAX = 64
"""Tokens of a model that may wait for their append; the model is not read further before there is room."""
WORDS_EVERY_S = 0.005
"""Seconds from when the words of one append were written to their readers to the next append of words. A token that
comes later goes at once; those that come sooner share the next append, and with it the record, its commit and what each
reader is sent. To write to 500 readers takes longer than this: a time that began before would be over by then, and what
follows would be a record for each token."""

RESULT_RECORDS = 2
"""That a client's command was taken, and what came of the call: one more is something that follows from it."""


class Effect:
    """A call that runs in the append of its outcome: `run` is called in the store's thread."""

    def __init__(self, pending_work: RunCall, run: Callable[[Attempt], CallFinished]) -> None:
        self.pending_work = pending_work
        self.run = run


class Envelope:
    """A command on its way, and who waits for it."""

    __slots__ = ("command", "done", "reporter")

    def __init__(
        self,
        command: Command | Received | ToolsFound | Effect | None,
        done: asyncio.Future[int] | None = None,
        reporter: asyncio.Task[Any] | None = None,
    ) -> None:
        self.command = command
        self.done = done
        self.reporter = reporter
        """The task whose piece of pending work this command ends: it needs no stopping."""

    @property
    def is_internal(self) -> bool:
        """Whether it reports what a model or a tool did, which would not be reported again."""
        return not isinstance(self.command, Received | SendMessage | Withdraw | Answer | Cancel | Resume)

    def answer(self, answer: int | MidstreamError) -> None:
        """Answer the sender with the journal's end, or with why the command was refused; calling it again changes
        nothing.
        """
        if self.done is None or self.done.done():
            return
        if isinstance(answer, MidstreamError):
            self.done.set_exception(answer)
        else:
            self.done.set_result(answer)


class _Taken(Enum):
    """Commands that were taken and are not durable yet."""

    NOTHING = "nothing"
    WORDS = "words"
    """A batch that ends with output of a model."""
    OTHERS = "others"


class Mailbox:
    """Many put into it, one takes: a batch at a time, and calls `settle` when all it caused is durable.

    Args:
        world: The clock.
        say_at_once: Journals words here and now, where it can, and returns whether it did: asked while nothing that was
            taken is on its way. Words that it does not take are taken like all else.
    """

    def __init__(self, world: World, say_at_once: Callable[[list[Envelope]], bool]) -> None:
        self._world = world
        self._say_at_once = say_at_once
        self._waiting: deque[Envelope] = deque()
        self._is_due = False
        """Whether what waits should be taken now: more than words that follow others closely."""
        self._taken = _Taken.NOTHING
        self.failure: MidstreamError | None = None
        """Why no command is accepted any more."""
        self._is_in_company = True
        """Whether the next words are likely to be followed by others of the same moment, as the last ones were."""
        self._next_words_at = -math.inf
        self._held: Cancellable | None = None
        """What words are held back for: others of the same moment, the writes to readers, or the time after them."""
        self._arrival: asyncio.Future[None] | None = None
        """What the one who takes waits for, where nothing is there."""
        self._resters: list[asyncio.Future[None]] = []
        """Who waits until nothing is on its way."""
        self._room = asyncio.Event()

    @property
    def is_full(self) -> bool:
        """Whether who can wait should not put anything."""
        return len(self._waiting) >= MAILBOX_MAX

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way to the journal."""
        return not self._waiting and self._taken is _Taken.NOTHING

    def put(self, envelope: Envelope) -> bool:
        """Put a command behind all others; return whether it was journaled here and now, as lonely words are."""
        self._waiting.append(envelope)
        if self._is_due:
            return False
        if not isinstance(envelope.command, ModelStreamed) or self.is_full:
            self._hurry()
        elif self._held is None:
            early_s = self._next_words_at - self._world.monotonic()
            if early_s > 0:
                self._held = self._world.later(early_s, self._release_output)
            elif self._is_in_company:
                self._held = _soon(self._release_output)
            else:
                self._release_output()
        return not self._waiting

    def post(
        self, command: Command | Received | Effect | None, reporter: asyncio.Task[None] | None = None
    ) -> asyncio.Future[int]:
        """Put a command behind all others; the future has the journal's end once all it caused is durable.

        Raises:
            MidstreamError: No command is accepted any more.
        """
        if self.failure is not None:
            raise self.failure.again()
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.put(Envelope(command, done, reporter))
        return done

    def has_report_of(self, task: asyncio.Task[Any] | None) -> bool:
        """Whether a command waits here that ends the piece of pending work of a task."""
        return any(each.reporter is task for each in reversed(self._waiting))

    async def arrival(self) -> None:
        """Wait until there is something to take. Only one may wait."""
        while not self._is_due:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival

    def take(self) -> list[Envelope]:
        """Take what waits, up to an effect; an effect alone, as it is decided in the store's own transaction."""
        batch: list[Envelope] = []
        while self._waiting:
            is_effect = isinstance(self._waiting[0].command, Effect)
            if not (is_effect and batch):
                batch.append(self._waiting.popleft())
            if is_effect:
                break
        self._is_due = bool(self._waiting)
        if batch:
            has_words = isinstance(batch[-1].command, ModelStreamed)
            self._taken = _Taken.WORDS if has_words else _Taken.OTHERS
        self._room.set()
        return batch

    def settle(self) -> None:
        """Mark the commands that were taken as done."""
        taken, self._taken = self._taken, _Taken.NOTHING
        if taken is _Taken.WORDS:
            self._hold_output()
        self._wake_if_idle()

    async def room(self) -> None:
        """Wait until something was taken."""
        self._room.clear()
        await self._room.wait()

    async def wait_until_idle(self) -> None:
        """Wait until nothing is on its way to the journal; nothing is held back meanwhile."""
        if self._waiting:
            self._hurry()
        while not self.is_idle:
            self._resters.append(asyncio.get_running_loop().create_future())
            await self._resters[-1]

    def refuse_clients(self, error: MidstreamError) -> None:
        """Refuse commands of clients, which can be sent again, while others wait for the store."""
        waiting, self._waiting = self._waiting, deque()
        for envelope in waiting:
            if envelope.is_internal:
                self._waiting.append(envelope)
            else:
                envelope.answer(error)
        self._is_due = bool(self._waiting)

    def refuse_all(self, error: MidstreamError) -> None:
        """Refuse everything from here on; the first error is the one that later callers get."""
        self.failure = self.failure or error.again()
        waiting, self._waiting = self._waiting, deque()
        for envelope in waiting:
            envelope.answer(error)
        self._is_due = False
        if self._held is not None:
            self._held.cancel()
        self._room.set()
        self._taken = _Taken.NOTHING
        self._wake_if_idle()

    def close(self) -> None:
        """Close: no command is taken any more."""
        self._say_at_once = _take_none

    def _release_output(self) -> None:
        """Let words that came in one moment, or while others were held back, go at once, or be taken."""
        self._held = None
        self._is_in_company = len(self._waiting) > 1
        if self._taken is not _Taken.NOTHING or not self._say_at_once([*self._waiting]):
            self._hurry()
            return
        self._waiting.clear()
        self._room.set()
        if self._resters:
            self._wake_if_idle()
        self._hold_output()

    def _hold_output(self) -> None:
        """Let words wait until those that were just appended were written to their readers, and longer.

        The readers are woken before this is called, and uvloop writes to sockets after all that was woken.
        """
        if self._held is not None:  # for words that came meanwhile: they wait for these ones' readers too
            self._held.cancel()
        self._held = _soon(self._wait_for_writes)

    def _wait_for_writes(self) -> None:
        self._is_in_company = self._is_in_company or bool(self._waiting)
        self._held = _soon(self._pause)

    def _pause(self) -> None:
        """Begin the time between two appends of words."""
        self._held = None
        self._next_words_at = self._world.monotonic() + WORDS_EVERY_S
        if self._waiting:
            self._held = self._world.later(WORDS_EVERY_S, self._release_output)

    def _wake_if_idle(self) -> None:
        while self._resters and self.is_idle:
            waiting = self._resters.pop()
            if not waiting.done():
                waiting.set_result(None)

    def _hurry(self) -> None:
        self._is_due = True
        if self._held is not None:
            self._held.cancel()
            self._held = None
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)


def _take_none(_words: list[Envelope]) -> bool:
    return False


def _soon(do: Callable[[], None]) -> Cancellable:
    return asyncio.get_running_loop().call_soon(do)


def is_model_output(batch: list[Envelope]) -> bool:
    """Whether a batch is nothing but words of a model: they change nothing that is owed."""
    for each in batch:  # noqa: SIM110 - called for each token: a generator takes three times as long
        if not isinstance(each.command, ModelStreamed):
            return False
    return True


def is_mere_result(batch: list[Envelope], written: int) -> bool:
    """Whether a batch is one result of a client's that led to no more than its own `written` records.

    Nothing new is owed then, and what is owed no more was the client's: a wait, which looks again when it is over.
    """
    said = batch[0].command
    is_result = isinstance(said, Received) and isinstance(said.command, CallFinished)
    return is_result and len(batch) == 1 and written <= RESULT_RECORDS


def merge(batch: list[Envelope]) -> list[Envelope]:
    """Join neighbouring words of one model attempt, so that a fast model costs one record and not hundreds."""
    if len(batch) == 1:
        return batch
    joined: list[Envelope] = []
    for attempt, group in itertools.groupby(batch, key=_attempt_of):
        if attempt is None:
            joined.extend(group)
            continue
        said = (each.command for each in group if isinstance(each.command, ModelStreamed))
        deltas = merge_deltas([delta for command in said for delta in command.deltas])
        joined.append(Envelope(ModelStreamed(attempt, deltas)))
    return joined


def _attempt_of(envelope: Envelope) -> AttemptRef | None:
    said = envelope.command
    return said.ref if isinstance(said, ModelStreamed) else None
