"""AG-UI over HTTP: a run of an agent as events, for `HttpAgent` of `@ag-ui/client` and clients like it.

A thread is a session. A run is a turn of it, or the part of a turn from one answer of its client to the next. The id of
a run makes it one: the same request again reads the same run. A run can be read from any event on, at any server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import cast

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from midstream.dialects.ag_ui_messages import (
    CONTINUES,
    AgUiRequest,
    FoundResults,
    chat_of,
    read_input,
    results_in,
    resumed_answers,
)
from midstream.dialects.ag_ui_stream import (
    AgUiEvents,
    AgUiFold,
    find_run,
    nothing,
    refusal,
    stream_name,
)
from midstream.dialects.langgraph_messages import interrupt_id_of
from midstream.dialects.langgraph_runs import BEGINNING, place_of
from midstream.dialects.langgraph_thread import Run
from midstream.dialects.ui_messages import find_change
from midstream.engine.conversation import follow_pages
from midstream.engine.host import Host
from midstream.engine.runner import Runner
from midstream.errors import (
    AnswerMismatchError,
    FrameTooLargeError,
    JournalMovedError,
    MidstreamError,
    NotFoundError,
    QuestionClosedError,
    SessionBusyError,
    UnavailableError,
    UsageError,
)
from midstream.protocol.frames import FRAME_BYTES_MAX, secret_digest_of
from midstream.server.api.chat_endpoint import bytes_max_of, opened
from midstream.server.api.event_body import EventBody
from midstream.server.api.langgraph_threads import ThreadFolds
from midstream.server.api.request_bodies import BODY_BYTES_MAX, body_of
from midstream.server.api.turn_stopping import stop_turn
from midstream.server.auth.caller import Caller, visitor_of
from midstream.server.auth.principals import Action
from midstream.server.auth.unlocking import secrets_in, stream_digest_of, unlock
from midstream.server.transports.connection import Connections
from midstream.session.journal_reading import JournalReader
from midstream.session.questions import questions_of
from midstream.session.session import Received
from midstream.session.turn.commands import Answer, Command, SendMessage

STARTING_S = 10.0
"""Seconds for a call to start whose result is there already."""
SUBMITS_MAX = 8
"""Attempts to begin a run while others change the thread."""


class AgUiEvent(Struct, frozen=True):
    """One server-sent event; `data` is an event of AG-UI, `id` its place in the journal; a repetition has none."""

    data: str
    id: str = ""


class _Refused(Exception):  # noqa: N818 - it is sent as the run's error
    """The input does not fit what the thread waits for, which AG-UI has as the end of a run."""

    def __init__(self, error: MidstreamError) -> None:
        super().__init__(str(error))
        self.error = error


class _RunBody(EventBody):
    """Sends a run to one client."""

    def __init__(
        self,
        threads: AgUiThreads,
        session: str,
        visitor: Caller,
        events: AgUiEvents,
        position: int,
    ) -> None:
        super().__init__(threads.host, threads.connections, session, visitor)
        self._events = events
        self._position = position

    @override
    async def pump(self, send: Send) -> None:
        reader, events = JournalReader(), self._events
        await self.write(send, events.begin())
        async with aclosing(follow_pages(self._host, self._session, self._position)) as pages:
            async for page in pages:
                found: list[bytes] = []
                for stored in page:
                    found += events.take(reader.read(stored.body), epoch=stored.epoch)
                await self.write(send, found)
                if events.is_over:
                    return


class _WholeBody(EventBody):
    """Sends events that are there already."""

    def __init__(self, threads: AgUiThreads, session: str, visitor: Caller, events: Sequence[bytes]) -> None:
        super().__init__(threads.host, threads.connections, session, visitor)
        self._events = events

    @override
    async def pump(self, send: Send) -> None:
        await self.write(send, self._events)


class AgUiThreads:
    """Sessions as threads of AG-UI, and the readers of their runs."""

    def __init__(self, host: Host, connections: Connections) -> None:
        self.host = host
        self.connections = connections
        self._folds = ThreadFolds(host, AgUiFold)

    async def now(self, runner: Runner, thread: str) -> AgUiFold:
        """Return a thread as it is now. It is not to be changed."""
        return cast("AgUiFold", (await self._folds.now(runner, thread)).fold)

    async def reader(
        self, runner: Runner, thread: str, run: Run, visitor: Caller, after: tuple[int, int]
    ) -> EventBody:
        """Return a reader of a run, behind a place."""
        found = await self._folds.before(runner, thread, run_id=run.id)
        events = AgUiEvents(cast("AgUiFold", found.fold), run, after)
        return _RunBody(self, runner.session_id, visitor, events, found.position)


class AgUiRun:
    """Begin a run, or read the run of this id again."""

    def __init__(self, threads: AgUiThreads) -> None:
        self._threads = threads
        self._host = threads.host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Begin a run (AG-UI); a request with the id of a known run reads that run, behind `Last-Event-ID` or whole.

        Raises:
            MidstreamError: It is refused; an ordinary HTTP error.
        """
        request = Request({**scope, BODY_BYTES_MAX: bytes_max_of(scope)}, receive)
        asked = read_input(await body_of(request))
        after = _after_of(request)
        visitor = visitor_of(scope)
        session = visitor.stored_name(asked.thread)
        visitor.visit(session)
        await visitor.begin()
        with await unlock(self._host, session, secrets_in(request), Action.SPEAK, begins=True) as held:
            runner = await self._host.session(session, create=True)
            runner.attach()
            try:
                secret_digest = stream_digest_of(held) or secret_digest_of(asked.digest)
                run = await self._run(runner, asked, visitor, secret_digest)
                body = await self._threads.reader(runner, asked.thread, run, visitor, after)
            except _Refused as refused:
                error, at = refused.error, self._host.world.now()
                events = refusal(asked.thread, asked.run_id, error.code, str(error), at=at)
                body = _WholeBody(self._threads, session, visitor, events)
            finally:
                runner.detach()
            await body.send_to(receive, send)

    async def _run(self, runner: Runner, asked: AgUiRequest, visitor: Caller, secret_digest: str) -> Run:
        for _ in range(SUBMITS_MAX):
            run = await self._find(runner, asked)
            if run is None:
                try:
                    await self._begin(runner, asked, visitor, secret_digest)
                except (SessionBusyError, JournalMovedError):
                    continue
                run = await self._find(runner, asked)
            if run is not None:
                return run
        raise UnavailableError("other requests of this thread are too many: retry", retry_after_s=1.0)

    async def _find(self, runner: Runner, asked: AgUiRequest) -> Run | None:
        """Return the run of a request; None where it has not begun, or a server died between its answers."""
        if not runner.state.turns:
            return None
        fold = await self._threads.now(runner, asked.thread)
        is_continuing = stream_name(asked.run_id, CONTINUES) in runner.state.streams
        if is_continuing and self._has_answers_left(runner, asked, fold):
            return None
        run = find_run(fold, asked.run_id)
        return fold.run if run is None and is_continuing else run  # others answered in its place

    def _has_answers_left(self, runner: Runner, asked: AgUiRequest, fold: AgUiFold) -> bool:
        if asked.resume:
            open_ones = {interrupt_id_of(each) for each in questions_of("", runner.state)}
            return any(each.interruptId in open_ones for each in asked.resume)
        return not _results_of(fold, asked).is_empty

    async def _begin(self, runner: Runner, asked: AgUiRequest, visitor: Caller, secret_digest: str) -> None:
        if not runner.state.turns:
            await self._say(runner, asked, visitor, secret_digest)
            return
        fold = await self._threads.now(runner, asked.thread)
        if asked.resume:
            answers = self._answers(runner, asked, fold)
            if answers:
                await self._name_run(runner, asked, secret_digest)
            for answer in answers:
                await self._submit(runner, await visitor.attribute(answer))
            return
        if questions_of("", runner.state):
            words = "this thread waits for people: address its interrupts by `resume`"
            raise _Refused(AnswerMismatchError(words))
        if asked.messages and asked.messages[-1].role == "user":
            await self._say(runner, asked, visitor, secret_digest)
            return
        if _results_of(fold, asked).is_empty:
            words = "this request has neither a new message nor a result that is waited for"
            raise _Refused(UsageError(words))
        await self._name_run(runner, asked, secret_digest)
        await self._give_results(runner, asked)

    def _answers(self, runner: Runner, asked: AgUiRequest, fold: AgUiFold) -> Sequence[Answer]:
        try:
            return resumed_answers(runner.state, asked.resume, fold.answers)
        except (AnswerMismatchError, QuestionClosedError) as error:
            raise _Refused(error) from error

    async def _name_run(self, runner: Runner, asked: AgUiRequest, secret_digest: str) -> None:
        """Record which run the answers begin that come next: they may begin it as soon as they are there."""
        name = stream_name(asked.run_id, CONTINUES)
        if name not in runner.state.streams:
            await self._submit(runner, Received(name, secret_digest, 0, asked.digest, None))

    async def _give_results(self, runner: Runner, asked: AgUiRequest) -> None:
        """Give the results to their calls; one that runs after another is waited for."""
        try:
            async with asyncio.timeout(STARTING_S):
                while True:
                    position = runner.newest.position
                    found = _results_of(await self._threads.now(runner, asked.thread), asked)
                    if found.is_empty:
                        return
                    for result in found.ready:
                        await self._submit(runner, result)
                    if not found.ready:
                        await runner.wait(position)
        except TimeoutError:
            raise UnavailableError("a call has not started yet: retry", retry_after_s=1.0) from None

    async def _say(self, runner: Runner, asked: AgUiRequest, visitor: Caller, secret_digest: str) -> None:
        if not asked.messages or asked.messages[-1].role != "user":
            raise _Refused(UsageError("the last message of this thread is to be a user's"))
        if self._has_begun(runner, asked):
            return
        if runner.state.is_live:
            await stop_turn(runner)
        if self._has_begun(runner, asked):
            return
        state = runner.state
        change = find_change(state.history.entries, chat_of(asked.messages))
        if len(msgspec.json.encode((change.message, change.before))) > FRAME_BYTES_MAX:
            raise FrameTooLargeError(f"what is new of this thread has {FRAME_BYTES_MAX} bytes at most")
        command = SendMessage(
            change.message, asked.tools, keep=change.keep, before=change.before, turns=state.turns
        )
        visitor.count_command(command)
        name = stream_name(asked.run_id, asked.message_id)
        await self._submit(runner, Received(name, secret_digest, 0, asked.digest, command))

    def _has_begun(self, runner: Runner, asked: AgUiRequest) -> bool:
        """Whether the same request, at the same time, has begun the run."""
        prefix = stream_name(asked.run_id, "")
        return any(name.partition(" ")[0] == prefix for name in runner.state.streams)

    async def _submit(self, runner: Runner, command: Command | Received) -> None:
        end = await runner.submit(command)
        await runner.wait(end - 1)


class AgUiConnect:
    """Follow a thread."""

    def __init__(self, threads: AgUiThreads) -> None:
        self._threads = threads
        self._host = threads.host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the newest run of a thread, or the one that `Last-Event-ID` is of, to its end; no run is begun (AG-UI).

        Raises:
            MidstreamError: It is refused; an ordinary HTTP error.
        """
        request = Request({**scope, BODY_BYTES_MAX: bytes_max_of(scope)}, receive)
        asked = read_input(await body_of(request))
        after, visitor = _after_of(request), visitor_of(scope)
        async with opened(self._host, visitor, request, asked.thread) as runner:
            run = None
            if runner is not None and runner.state.turns:
                fold = await self._threads.now(runner, asked.thread)
                later = (each for each in fold.runs if each.after >= after[0] > 0)
                of_place = [each for each in fold.runs if each.after < after[0]]
                run = of_place[-1] if of_place and next(later, None) is not None else fold.run
            if runner is None or run is None:
                session = visitor.stored_name(asked.thread)
                events = nothing(asked.thread, asked.run_id, at=self._host.world.now())
                body: EventBody = _WholeBody(self._threads, session, visitor, events)
            else:
                body = await self._threads.reader(runner, asked.thread, run, visitor, after)
            await body.send_to(receive, send)


class AgUiReader:
    """Read a run again."""

    def __init__(self, threads: AgUiThreads) -> None:
        self._threads = threads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read a run of a thread behind `Last-Event-ID`, or whole (AG-UI).

        Raises:
            MidstreamError: It is refused; an ordinary HTTP error.
        """
        request = Request(scope, receive)
        thread, run_id = request.path_params["thread"], request.path_params["run_id"]
        after, visitor = _after_of(request), visitor_of(scope)
        async with opened(self._threads.host, visitor, request, thread) as runner:
            run = None
            if runner is not None and runner.state.turns:
                run = find_run(await self._threads.now(runner, thread), run_id)
            if runner is None or run is None:
                raise NotFoundError(f"there is no run {run_id[:80]!r}")
            body = await self._threads.reader(runner, thread, run, visitor, after)
            await body.send_to(receive, send)


def _results_of(fold: AgUiFold, asked: AgUiRequest) -> FoundResults:
    """Return the results of a request, by a state and the id of its response that belong together."""
    open_id, _ = fold.open_words
    return results_in(fold.session, open_id, asked.messages)


def _after_of(request: Request) -> tuple[int, int]:
    after = place_of(request.headers.get("last-event-id", ""))
    if after is None:
        raise UsageError("`Last-Event-ID` is the id of an event of this thread, or -1 for the beginning")
    return max(after, BEGINNING)
