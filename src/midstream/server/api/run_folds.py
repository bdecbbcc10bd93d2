"""The runs of sessions, folded from their journals and cached, for the dialects that show a session as runs."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct

from midstream.dialects.langgraph_messages import interrupt_id_of
from midstream.dialects.langgraph_protocol import ProtocolEvents, first_seq
from midstream.dialects.run_fold import RunFold
from midstream.engine.conversation import kept_records
from midstream.engine.host import Host
from midstream.engine.runner import Runner
from midstream.errors import (
    EventGoneError,
    QuestionClosedError,
    UnavailableError,
)
from midstream.server.api.turn_requests import submit
from midstream.session.journal_reading import JournalReader
from midstream.session.questions import Question
from midstream.session.records import MessageAccepted, TranscriptAccepted
from midstream.session.turn.commands import Answer

Json = dict[str, Any]
_Fold = TypeVar("_Fold", bound=RunFold)

SHOWN_S = 30.0
"""Seconds for a session to show an answer that its sub-agent received."""
FOLDS_MAX = 32
"""Maximum number of cached threads, whose newest turn is found without reading the turns before it."""


class FoldedRuns(Struct, Generic[_Fold], frozen=True):
    """A thread at a position of its journal, with the number of its last event there."""

    position: int
    fold: _Fold
    seq: int


class _KnownRuns(Generic[_Fold]):
    """A thread up to the position that was read.

    Args:
        started_at: Time when the session began, which distinguishes it from a later one of this name.
        now: Thread at the beginning of its journal.
        graph: Name of the agent.
    """

    def __init__(self, started_at: float, now: FoldedRuns[_Fold], graph: str) -> None:
        self.started_at = started_at
        self.turn = now
        """The thread before the newest turn."""
        self.position = now.position
        self.epoch = 0
        """Position of the last record."""
        self.lock = asyncio.Lock()
        self.fold = now.fold.copy()
        self._reader = JournalReader()
        self._events = ProtocolEvents(self.fold, now.seq, None, graph)

    @property
    def seq(self) -> int:
        """The number of the last event."""
        return self._events.seq

    async def read(self, runner: Runner) -> None:
        """Read to the end of the journal."""
        async for stored, record in kept_records(runner, self.position, self._reader):
            if isinstance(record, MessageAccepted | TranscriptAccepted):
                self.turn = FoldedRuns(stored.position - 1, self.fold.copy(), self.seq)
            self._events.take(record, epoch=stored.epoch)
            self.position, self.epoch = stored.position, stored.epoch


class RunFolds(Generic[_Fold]):
    """The runs and messages of threads, derived from their journals and cached for the next request.

    Args:
        kind: Type of fold of a dialect.
    """

    def __init__(self, host: Host, kind: type[_Fold]) -> None:
        self._host = host
        self._kind = kind
        self._known: OrderedDict[str, _KnownRuns[_Fold]] = OrderedDict()

    async def now(self, runner: Runner, thread: str) -> _Fold:
        """Return the current thread. Callers must not change it."""
        return (await self._read(runner, thread)).fold

    async def answer(self, runner: Runner, thread: str, question: Question, answer: Answer) -> None:
        """Answer an open question of a thread in its own session; wait until the thread shows the answer.

        Raises:
            QuestionClosedError: The question was closed by other means.
            UnavailableError: No server recorded the answer in the thread in time.
            MidstreamError: The answer was refused.
        """
        if not question.session:
            await submit(runner, answer)
            return
        refusal: QuestionClosedError | None = None
        child = await self._host.session(question.session)
        child.attach()
        try:
            await submit(child, answer)
        except QuestionClosedError as error:  # perhaps by this answer, before a server failed
            refusal = error
        finally:
            child.detach()
        try:
            async with asyncio.timeout(SHOWN_S):
                while question in (fold := await self.now(runner, thread)).questions:
                    await runner.wait(fold.session.position)
        except TimeoutError:
            raise UnavailableError("the answer is not shown yet: retry", retry_after_s=1.0) from None
        name = interrupt_id_of(question)
        if refusal and not any(each.interrupt == name and each.is_of(answer) for each in fold.answers):
            raise refusal

    async def newest_seq(self, runner: Runner, thread: str) -> int:
        """Return the number of the last event of a thread."""
        return (await self._read(runner, thread)).seq

    async def before(self, runner: Runner, thread: str, *, run_id: str) -> FoldedRuns[_Fold]:
        """Return a thread before one of its runs, or before one that has not begun."""
        known = await self._read(runner, thread)
        run = known.fold.find(run_id)
        is_newest = run is None or run.after >= known.turn.position
        return await self._place(runner, thread, known, is_newest=is_newest)

    async def after(self, runner: Runner, thread: str, *, since: int) -> FoldedRuns[_Fold]:
        """Return a thread before its newest turn if that has all events after `since`, otherwise at its beginning."""
        known = await self._read(runner, thread)
        return await self._place(runner, thread, known, is_newest=known.turn.seq <= since)

    async def _place(
        self, runner: Runner, thread: str, known: _KnownRuns[_Fold], *, is_newest: bool
    ) -> FoldedRuns[_Fold]:
        if is_newest and known.turn.position >= runner.events.pruned_to.position:
            return msgspec.structs.replace(known.turn, fold=known.turn.fold.copy())
        return await self._beginning(runner, thread)

    async def _beginning(self, runner: Runner, thread: str) -> FoldedRuns[_Fold]:
        event_id, session = await runner.events.beginning()
        fold = self._kind(thread, session)
        return FoldedRuns(event_id.position, fold, first_seq(event_id.position))

    async def _read(self, runner: Runner, thread: str) -> _KnownRuns[_Fold]:
        for _ in range(2):
            known = await self._of(runner, thread)
            async with known.lock:
                try:
                    await known.read(runner)
                except EventGoneError:  # records were pruned that were not read
                    self._known.pop(runner.session_id, None)
                    continue
                if self._host.locks is not None:  # do not cache the text of sessions with secrets
                    self._known.pop(runner.session_id, None)
                return known
        raise UnavailableError("this thread is being pruned: retry", retry_after_s=1.0)

    async def _of(self, runner: Runner, thread: str) -> _KnownRuns[_Fold]:
        name = runner.session_id
        known = self._known.get(name)
        if known is not None and known.position and not await self._is_same(runner, known):
            known = None
        if known is None or known.fold.thread != thread:
            beginning = await self._beginning(runner, thread)
            known = _KnownRuns(runner.state.started_at, beginning, self._host.agent.name)
            self._known[name] = known
            if len(self._known) > FOLDS_MAX:
                self._known.popitem(last=False)
        self._known.move_to_end(name)
        return known

    async def _is_same(self, runner: Runner, known: _KnownRuns[_Fold]) -> bool:
        """Return whether the journal still has the records that were read: a power failure may have removed them."""
        if known.started_at != runner.state.started_at or runner.newest.position < known.position:
            return False
        return known.epoch in (0, await runner.events.epoch_at(known.position))
