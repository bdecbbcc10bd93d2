"""The mailbox of one session: commands on their way to its journal, in order, and their callers."""

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
from midstream.session.call_references import AttemptRef
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
"""Model tokens that may wait for their append; at this number, the executor stops reading the model."""
OUTPUT_EVERY_S = 0.005
"""Seconds between writing the output of one append to its readers and the next append of output. A token that comes
later is appended at once. Tokens that come sooner share the next append: one record, one commit and one frame for each
reader. The time begins after the writes, because writes to 500 readers take longer than this."""

RESULT_RECORDS = 2
"""The records of a client's tool result: the accepted command and the outcome. Others are consequences."""


class Effect:
    """A call that runs in the transaction of its outcome: the store's thread calls `run`."""

    def __init__(self, pending_work: RunCall, run: Callable[[Attempt], CallFinished]) -> None:
        self.pending_work = pending_work
        self.run = run


class Envelope:
    """A command in the mailbox, and its caller."""

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
        """The task whose pending work this command ends: it needs no cancellation."""

    @property
    def is_internal(self) -> bool:
        """Whether the command reports a result of a model or a tool, which cannot be repeated."""
        return not isinstance(self.command, Received | SendMessage | Withdraw | Answer | Cancel | Resume)

    def answer(self, answer: int | MidstreamError) -> None:
        """Answer the caller with the journal's end or the refusal. A second answer has no effect."""
        if self.done is None or self.done.done():
            return
        if isinstance(answer, MidstreamError):
            self.done.set_exception(answer)
        else:
            self.done.set_result(answer)


class _TakenBatch(Enum):
    """The kind of the batch that was taken and is not durable yet."""

    NOTHING = "nothing"
    OUTPUT = "output"
    """A batch that ends with output of a model."""
    OTHERS = "others"


class Mailbox:
    """A queue with many senders and one receiver, which takes batches and calls `settle` for each durable one.

    Args:
        world: The clock.
        append_at_once: Appends output without the receiver, if possible, and returns whether it did. It is called only
            while no batch is taken. Otherwise the receiver takes the output.
    """

    def __init__(self, world: World, append_at_once: Callable[[list[Envelope]], bool]) -> None:
        self._world = world
        self._append_at_once = append_at_once
        self._waiting: deque[Envelope] = deque()
        self._is_due = False
        """Whether the receiver should take the commands now: they are not only output that must wait."""
        self._taken = _TakenBatch.NOTHING
        self.failure: MidstreamError | None = None
        """The error for all later commands."""
        self._expects_more_output = True
        """Whether the next output probably comes together with more, as the last output did."""
        self._next_output_at = -math.inf
        self._held: Cancellable | None = None
        """The timer that holds output back: for simultaneous output, for writes to readers, or for the pause."""
        self._arrival: asyncio.Future[None] | None = None
        """The future on which the receiver waits for a batch."""
        self._idle_waiters: list[asyncio.Future[None]] = []
        """Callers of `wait_until_idle`."""
        self._room = asyncio.Event()

    @property
    def is_full(self) -> bool:
        """Whether senders that can wait should wait."""
        return len(self._waiting) >= MAILBOX_MAX

    @property
    def is_idle(self) -> bool:
        """Whether no command waits or is being appended."""
        return not self._waiting and self._taken is _TakenBatch.NOTHING

    def put(self, envelope: Envelope) -> bool:
        """Add a command at the end; return whether it was appended in this call, as isolated output is."""
        self._waiting.append(envelope)
        if self._is_due:
            return False
        if not isinstance(envelope.command, ModelStreamed) or self.is_full:
            self._wake_receiver()
        elif self._held is None:
            early_s = self._next_output_at - self._world.monotonic()
            if early_s > 0:
                self._held = self._world.later(early_s, self._release_output)
            elif self._expects_more_output:
                self._held = _call_soon(self._release_output)
            else:
                self._release_output()
        return not self._waiting

    def post(
        self, command: Command | Received | Effect | None, reporter: asyncio.Task[None] | None = None
    ) -> asyncio.Future[int]:
        """Add a command at the end. The future has the journal's end once all its records are durable.

        Raises:
            MidstreamError: The session accepts no more commands.
        """
        if self.failure is not None:
            raise self.failure.again()
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.put(Envelope(command, done, reporter))
        return done

    def has_report_of(self, task: asyncio.Task[Any] | None) -> bool:
        """Whether a waiting command ends the pending work of a task."""
        return any(each.reporter is task for each in reversed(self._waiting))

    async def arrival(self) -> None:
        """Wait until there is a batch to take. Only one task may wait."""
        while not self._is_due:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival

    def take(self) -> list[Envelope]:
        """Take the waiting commands up to an effect, or one effect: it has a transaction of its own."""
        batch: list[Envelope] = []
        while self._waiting:
            is_effect = isinstance(self._waiting[0].command, Effect)
            if not (is_effect and batch):
                batch.append(self._waiting.popleft())
            if is_effect:
                break
        self._is_due = bool(self._waiting)
        if batch:
            is_output = isinstance(batch[-1].command, ModelStreamed)
            self._taken = _TakenBatch.OUTPUT if is_output else _TakenBatch.OTHERS
        self._room.set()
        return batch

    def settle(self) -> None:
        """Mark the taken batch as done."""
        taken, self._taken = self._taken, _TakenBatch.NOTHING
        if taken is _TakenBatch.OUTPUT:
            self._hold_output()
        self._wake_if_idle()

    async def room(self) -> None:
        """Wait until the receiver has taken a batch."""
        self._room.clear()
        await self._room.wait()

    async def wait_until_idle(self) -> None:
        """Wait until no command waits or is being appended; output is not held back meanwhile."""
        if self._waiting:
            self._wake_receiver()
        while not self.is_idle:
            self._idle_waiters.append(asyncio.get_running_loop().create_future())
            await self._idle_waiters[-1]

    def refuse_clients(self, error: MidstreamError) -> None:
        """Refuse the waiting commands of clients, which can send them again. The others wait for the store."""
        waiting, self._waiting = self._waiting, deque()
        for envelope in waiting:
            if envelope.is_internal:
                self._waiting.append(envelope)
            else:
                envelope.answer(error)
        self._is_due = bool(self._waiting)

    def refuse_all(self, error: MidstreamError) -> None:
        """Refuse all present and later commands; later callers get the first error."""
        self.failure = self.failure or error.again()
        waiting, self._waiting = self._waiting, deque()
        for envelope in waiting:
            envelope.answer(error)
        self._is_due = False
        if self._held is not None:
            self._held.cancel()
        self._room.set()
        self._taken = _TakenBatch.NOTHING
        self._wake_if_idle()

    def close(self) -> None:
        """Append no more output."""
        self._append_at_once = _append_nothing

    def _release_output(self) -> None:
        """Append the held-back output in this call, or let the receiver take it."""
        self._held = None
        self._expects_more_output = len(self._waiting) > 1
        if self._taken is not _TakenBatch.NOTHING or not self._append_at_once([*self._waiting]):
            self._wake_receiver()
            return
        self._waiting.clear()
        self._room.set()
        if self._idle_waiters:
            self._wake_if_idle()
        self._hold_output()

    def _hold_output(self) -> None:
        """Hold back output until the last output was written to its readers, and for a pause after it.

        The readers are woken before this call, and uvloop writes to sockets after all woken tasks.
        """
        if self._held is not None:  # the writes of the new output must also be awaited
            self._held.cancel()
        self._held = _call_soon(self._wait_for_writes)

    def _wait_for_writes(self) -> None:
        self._expects_more_output = self._expects_more_output or bool(self._waiting)
        self._held = _call_soon(self._pause)

    def _pause(self) -> None:
        """Begin the pause between two appends of output."""
        self._held = None
        self._next_output_at = self._world.monotonic() + OUTPUT_EVERY_S
        if self._waiting:
            self._held = self._world.later(OUTPUT_EVERY_S, self._release_output)

    def _wake_if_idle(self) -> None:
        while self._idle_waiters and self.is_idle:
            waiting = self._idle_waiters.pop()
            if not waiting.done():
                waiting.set_result(None)

    def _wake_receiver(self) -> None:
        self._is_due = True
        if self._held is not None:
            self._held.cancel()
            self._held = None
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)


def _append_nothing(_words: list[Envelope]) -> bool:
    return False


def _call_soon(do: Callable[[], None]) -> Cancellable:
    return asyncio.get_running_loop().call_soon(do)


def is_model_output(batch: list[Envelope]) -> bool:
    """Whether a batch is only output of a model, which does not change the pending work."""
    for each in batch:  # noqa: SIM110 - called for each token: a generator takes three times as long
        if not isinstance(each.command, ModelStreamed):
            return False
    return True


def is_mere_result(batch: list[Envelope], written: int) -> bool:
    """Whether a batch is one result of a client's tool, and all `written` records belong to it.

    Then there is no new pending work. The work that ended was the wait for the client, whose timer finds this itself.
    """
    command = batch[0].command
    is_result = isinstance(command, Received) and isinstance(command.command, CallFinished)
    return is_result and len(batch) == 1 and written <= RESULT_RECORDS


def merge(batch: list[Envelope]) -> list[Envelope]:
    """Join neighbouring output of one attempt, so that a fast model costs one record and not hundreds."""
    if len(batch) == 1:
        return batch
    joined: list[Envelope] = []
    for attempt, group in itertools.groupby(batch, key=_attempt_of):
        if attempt is None:
            joined.extend(group)
            continue
        streamed = (each.command for each in group if isinstance(each.command, ModelStreamed))
        deltas = merge_deltas([delta for command in streamed for delta in command.deltas])
        joined.append(Envelope(ModelStreamed(attempt, deltas)))
    return joined


def _attempt_of(envelope: Envelope) -> AttemptRef | None:
    command = envelope.command
    return command.ref if isinstance(command, ModelStreamed) else None
