"""The threads of LangGraph clients: sessions as threads, and stored values of threads without a message."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct
from starlette.requests import Request

from midstream.dialects.langgraph_messages import interrupt_id_of
from midstream.dialects.langgraph_protocol import ProtocolEvents, first_seq
from midstream.dialects.langgraph_thread import ThreadFold
from midstream.engine.conversation import kept_records
from midstream.engine.host import Host
from midstream.engine.journal import require_session_id
from midstream.engine.runner import Runner
from midstream.errors import (
    EntryMovedError,
    EventGoneError,
    QuestionClosedError,
    SessionNotFoundError,
    UnavailableError,
)
from midstream.server.api.turn_requests import submit
from midstream.server.auth.caller import Caller, visitor_of
from midstream.server.auth.principals import Action
from midstream.server.auth.unlocking import secrets_in, unlock
from midstream.server.transports.connection import Connections
from midstream.session.journal_reading import JournalReader
from midstream.session.questions import Question
from midstream.session.records import MessageAccepted, TranscriptAccepted
from midstream.session.turn.commands import Answer

Json = dict[str, Any]
_Fold = TypeVar("_Fold", bound=ThreadFold)

NOTES = "langgraph-threads"
"""Namespace of values stored outside sessions: the creation time of a thread, and its metadata."""
EMPTY_S = 24 * 3600.0
"""Seconds for which a thread without a message is kept, and metadata of a deleted session."""
SWEEP_S = 600.0
"""Seconds between two searches for such threads."""
SWEPT_MAX = 500
"""Maximum number of old threads that are examined each time."""
WRITES_MAX = 8
"""Attempts to change metadata of a thread in case of concurrent changes."""
SHOWN_S = 30.0
"""Seconds for a session to show an answer that its sub-agent received."""
FOLDS_MAX = 32
"""Maximum number of cached threads, whose newest turn is found without reading the turns before it."""


class ThreadNote(Struct, frozen=True):
    """Values of a thread that are stored outside its session."""

    at: float
    metadata: Json = {}


class OpenThread(Struct, frozen=True):
    """The thread of a request.

    Args:
        id: Id of the thread for clients.
        session: Name of the session in the store.
        visitor: Client of the request.
        runner: Runner of the session; None if it has no message yet.
        note: Values stored outside the session; None for none.
    """

    id: str
    session: str
    visitor: Caller
    runner: Runner | None
    note: ThreadNote | None


class ThreadNotes:
    """Stores values of threads outside their sessions."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._swept_at = 0.0
        self._swept_to = 0

    async def find(self, session: str) -> ThreadNote | None:
        """Return the stored values of a thread, or None."""
        kept = await self._host.store.kv_get(NOTES, session)
        return None if kept is None else msgspec.json.decode(kept.body, type=ThreadNote)

    async def change(self, session: str, metadata: Json) -> ThreadNote:
        """Add metadata to a thread. Creates the thread if it does not exist."""
        store = self._host.store
        for _ in range(WRITES_MAX):
            kept = await store.kv_get(NOTES, session)
            old = ThreadNote(self._host.world.now()) if kept is None else None
            old = old or msgspec.json.decode(kept.body if kept else b"", type=ThreadNote)
            note = ThreadNote(old.at, {**old.metadata, **metadata})
            body, version = msgspec.json.encode(note), kept.version if kept else 0
            try:
                await store.kv_put(NOTES, session, body, expected=version, at=self._host.world.now())
            except EntryMovedError:
                continue
            return note
        raise UnavailableError("other clients are changing this thread: retry", retry_after_s=1.0)

    async def delete(self, session: str) -> None:
        """Remove the stored values of a thread."""
        store = self._host.store
        while (kept := await store.kv_get(NOTES, session)) is not None:
            await store.kv_delete(NOTES, session, expected=kept.version)

    async def sweep(self) -> None:
        """Remove stored values of some old threads without a session."""
        now, store = self._host.world.now(), self._host.store
        if now - self._swept_at < SWEEP_S:
            return
        self._swept_at = now
        old = [kept for kept in await store.kv_list(NOTES) if kept.at < now - EMPTY_S]
        place = self._swept_to if self._swept_to < len(old) else 0
        self._swept_to = place + SWEPT_MAX
        for kept in old[place : self._swept_to]:
            if await store.find(kept.key) is None:
                await store.kv_delete(NOTES, kept.key, expected=kept.version)


class FoldedThread(Struct, Generic[_Fold], frozen=True):
    """A thread at a position of its journal, with the number of its last event there."""

    position: int
    fold: _Fold
    seq: int


class _KnownThread(Generic[_Fold]):
    """A thread up to the position that was read.

    Args:
        started_at: Time when the session began, which distinguishes it from a later one of this name.
        now: Thread at the beginning of its journal.
        graph: Name of the agent.
    """

    def __init__(self, started_at: float, now: FoldedThread[_Fold], graph: str) -> None:
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
                self.turn = FoldedThread(stored.position - 1, self.fold.copy(), self.seq)
            self._events.take(record, epoch=stored.epoch)
            self.position, self.epoch = stored.position, stored.epoch


class ThreadFolds(Generic[_Fold]):
    """The runs and messages of threads, derived from their journals and cached for the next request.

    Args:
        kind: Type of fold of a dialect.
    """

    def __init__(self, host: Host, kind: type[_Fold]) -> None:
        self._host = host
        self._kind = kind
        self._known: OrderedDict[str, _KnownThread[_Fold]] = OrderedDict()

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

    async def before(self, runner: Runner, thread: str, *, run_id: str) -> FoldedThread[_Fold]:
        """Return a thread before one of its runs, or before one that has not begun."""
        known = await self._read(runner, thread)
        run = known.fold.find(run_id)
        is_newest = run is None or run.after >= known.turn.position
        return await self._place(runner, thread, known, is_newest=is_newest)

    async def after(self, runner: Runner, thread: str, *, since: int) -> FoldedThread[_Fold]:
        """Return a thread before its newest turn if that has all events after `since`, otherwise at its beginning."""
        known = await self._read(runner, thread)
        return await self._place(runner, thread, known, is_newest=known.turn.seq <= since)

    async def _place(
        self, runner: Runner, thread: str, known: _KnownThread[_Fold], *, is_newest: bool
    ) -> FoldedThread[_Fold]:
        if is_newest and known.turn.position >= runner.events.pruned_to.position:
            return msgspec.structs.replace(known.turn, fold=known.turn.fold.copy())
        return await self._beginning(runner, thread)

    async def _beginning(self, runner: Runner, thread: str) -> FoldedThread[_Fold]:
        event_id, session = await runner.events.beginning()
        fold = self._kind(thread, session)
        return FoldedThread(event_id.position, fold, first_seq(event_id.position))

    async def _read(self, runner: Runner, thread: str) -> _KnownThread[_Fold]:
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

    async def _of(self, runner: Runner, thread: str) -> _KnownThread[_Fold]:
        name = runner.session_id
        known = self._known.get(name)
        if known is not None and known.position and not await self._is_same(runner, known):
            known = None
        if known is None or known.fold.thread != thread:
            beginning = await self._beginning(runner, thread)
            known = _KnownThread(runner.state.started_at, beginning, self._host.agent.name)
            self._known[name] = known
            if len(self._known) > FOLDS_MAX:
                self._known.popitem(last=False)
        self._known.move_to_end(name)
        return known

    async def _is_same(self, runner: Runner, known: _KnownThread[_Fold]) -> bool:
        """Return whether the journal still has the records that were read: a power failure may have removed them."""
        if known.started_at != runner.state.started_at or runner.newest.position < known.position:
            return False
        return known.epoch in (0, await runner.events.epoch_at(known.position))


class GraphThreads:
    """Opens sessions as threads, with the permissions of the client."""

    def __init__(self, host: Host, connections: Connections) -> None:
        self.host = host
        self.connections = connections
        self.notes = ThreadNotes(host)
        self.folds = ThreadFolds(host, ThreadFold)

    @asynccontextmanager
    async def opened(self, request: Request, action: Action = Action.READ) -> AsyncIterator[OpenThread]:
        """Open the thread that the path of a request names.

        Raises:
            SessionNotFoundError: The session does not exist, or belongs to another caller.
            MidstreamError: The caller may not perform the action.
        """
        thread = request.path_params["thread"]
        require_session_id(thread)
        visitor = visitor_of(request.scope)
        session = visitor.stored_name(thread)
        visitor.visit(session)
        note = await self.notes.find(session)
        has_messages = await self.host.store.find(session) is not None
        if note is None or has_messages:
            await visitor.require_existing(action)
        elif visitor.is_known:
            await visitor.require(action)
        if note is None and not has_messages:
            raise SessionNotFoundError(
                f"no session {session!r}"
            )  # the same error as for a session of another caller
        with await unlock(self.host, session, secrets_in(request), action):
            runner = await self.host.session(session) if has_messages else None
            yield OpenThread(thread, session, visitor, runner, note)

    async def exists(self, session: str) -> bool:
        """Return whether a thread was created, or its session has a message."""
        return await self.host.store.find(session) is not None or await self.notes.find(session) is not None
