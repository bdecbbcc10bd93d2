"""LangGraph's API for runs: a run is a turn of a session, or the part of it from one answer of people to the next.

A run's events can be read from any event on, by any client, at any server, as long as its journal is kept.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct
from starlette.requests import Request
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from midstream.dialects.langgraph_messages import interrupts_of
from midstream.dialects.langgraph_requests import (
    Multitask,
    RunBody,
    RunInput,
    answers_of,
    ignored_of,
    input_of,
    modes_of,
)
from midstream.dialects.langgraph_runs import BEGINNING, MODES, RunEvents, place_of
from midstream.dialects.langgraph_thread import STREAM_PREFIX, Run, ThreadFold, stream_name
from midstream.dialects.resting_turns import is_resting
from midstream.engine.conversation import follow_pages
from midstream.engine.journal import require_session_id
from midstream.engine.runner import Runner
from midstream.errors import (
    JournalMovedError,
    NotFoundError,
    NothingToResumeError,
    SessionBusyError,
    UnavailableError,
    UsageError,
)
from midstream.protocol.frames import secret_digest_of
from midstream.server.api.event_body import EventBody
from midstream.server.api.langgraph_endpoint import metadata_of, moment, require_assistant
from midstream.server.api.langgraph_threads import GraphThreads, OpenThread, no_thread
from midstream.server.api.request_bodies import decode_body, decode_query
from midstream.server.api.turn_stopping import stop_turn
from midstream.server.auth.caller import Caller, visitor_of
from midstream.server.auth.principals import Action
from midstream.server.auth.unlocking import secrets_in, stream_digest_of, unlock
from midstream.server.transports.connection import Connections
from midstream.session.journal_reading import JournalReader
from midstream.session.session import Received
from midstream.session.turn.commands import Cancel, Resume, SendMessage, WhenBusy, Withdraw
from midstream.session.turn.states import Idle

Json = dict[str, Any]

IGNORED_HEADER = "x-midstream-ignored"
SUBMITS_MAX = 8
"""Attempts to begin a run while others of the thread end."""


class GraphEvent(Struct, frozen=True):
    """One server-sent event of a run, in the forms of LangGraph; its id is its place in the journal."""

    id: str
    event: str
    data: str


GraphRunStatus = Literal["pending", "running", "success", "error", "interrupted"]
_STATUSES: dict[str, GraphRunStatus] = {
    "running": "running",
    "success": "success",
    "error": "error",
    "interrupted": "interrupted",
    "paused": "success",  # as LangGraph has it: the thread is interrupted
}


def _status_of(run: Run | None) -> GraphRunStatus:
    return _STATUSES[run.status] if run else "pending"


class GraphRun(Struct, frozen=True):
    """A run."""

    run_id: str
    thread_id: str
    assistant_id: str
    created_at: str
    updated_at: str
    status: GraphRunStatus
    metadata: Json
    kwargs: Json
    multitask_strategy: Multitask = Multitask.ENQUEUE


class RunsQuery(Struct, frozen=True):
    """The runs that are wanted, the newest first."""

    limit: Annotated[int, Meta(ge=1, le=1000)] = 10
    offset: Annotated[int, Meta(ge=0)] = 0
    status: str = ""


class CancelQuery(Struct, frozen=True):
    """How a run is cancelled."""

    wait: Literal["0", "1", "true", "false", "True", "False"] = "0"
    action: Literal["interrupt"] = "interrupt"


class JoinQuery(Struct, frozen=True):
    """The events of a run that are wanted; `stream_mode` may be repeated, or a JSON list."""

    stream_mode: str = ""
    cancel_on_disconnect: Literal["0", "1", "true", "false", "True", "False"] = "0"


class StartedRun(Struct, frozen=True):
    """A run of a thread, begun or waiting.

    Args:
        id: Its id.
        thread: The thread's id for its clients.
        runner: Its session.
        seq: The number of the last event of the thread before it; 0 where that is not known.
    """

    id: str
    thread: str
    runner: Runner
    seq: int = 0


class RunStarter:
    """Begins runs: with a message, with answers for what the thread waits for, or by resuming a failed turn."""

    def __init__(self, threads: GraphThreads) -> None:
        self._threads = threads
        self._host = threads.host

    @asynccontextmanager
    async def start(self, request: Request, body: RunBody) -> AsyncIterator[StartedRun]:
        """Begin a run; its session is open meanwhile.

        Raises:
            MidstreamError: It is refused.
        """
        thread, visitor = request.path_params["thread"], visitor_of(request.scope)
        require_session_id(thread)
        require_assistant(self._host, body.assistant_id)
        given = self._input_of(thread, body)
        session = visitor.stored_name(thread)
        visitor.visit(session)
        if body.if_not_exists == "reject":
            is_there = await self._host.store.find(session) is not None
            if not is_there and await self._threads.notes.find(session) is None:
                raise no_thread(session)
        await visitor.begin()
        with await unlock(self._host, session, secrets_in(request), Action.SPEAK, begins=True) as held:
            runner = await self._host.session(session, create=True)
            runner.attach()
            try:
                if body.resume is not UNSET:
                    run = await self._answer(runner, thread, body, visitor)
                elif given is None:
                    run = await self._resume(runner, thread, visitor)
                else:
                    secret_digest = stream_digest_of(held) or secret_digest_of(given.digest)
                    strategy = body.multitask_strategy
                    run = await self._say(runner, thread, given, strategy, visitor, secret_digest)
            finally:
                runner.detach()
            yield run

    def _input_of(self, thread: str, body: RunBody) -> RunInput | None:
        if body.input is None:
            return None
        if body.resume is not UNSET:
            raise UsageError("a run has an input or `command.resume`, not both")
        return input_of(thread, body.input, fresh=self._host.world.new_id("run"))

    async def _say(
        self,
        runner: Runner,
        thread: str,
        given: RunInput,
        strategy: Multitask,
        visitor: Caller,
        secret_digest: str,
    ) -> StartedRun:
        name = stream_name(given.run_id, given.message_id)
        for _ in range(SUBMITS_MAX):
            if name in runner.state.streams:  # the same request again
                return StartedRun(given.run_id, thread, runner)
            seq = await self._make_room(runner, thread, strategy)
            command = _message_of(given, runner)
            visitor.count_command(command)
            try:
                end = await runner.submit(Received(name, secret_digest, 0, given.digest, command))
            except JournalMovedError:
                continue
            except SessionBusyError:
                if strategy is Multitask.INTERRUPT:
                    continue
                raise
            await runner.wait(end - 1)
            return StartedRun(given.run_id, thread, runner, seq)
        raise UnavailableError("other requests of this thread are too many: retry", retry_after_s=1.0)

    async def _make_room(self, runner: Runner, thread: str, strategy: Multitask) -> int:
        """Do what is wanted about the run that goes on; return the number of the last event, at rest."""
        state = runner.state
        if state.is_live:
            # A new message takes the place of answers that nobody gives any more.
            if strategy is Multitask.INTERRUPT or is_resting(state.turn, on_clients=False):
                await stop_turn(runner)
            elif strategy is Multitask.REJECT:
                raise SessionBusyError(
                    "Thread is already running a task. Wait for it to finish or choose another "
                    "multitask strategy."
                )
            else:
                return 0
        return (await self._threads.folds.now(runner, thread)).seq if runner.state.turns else 0

    async def _answer(self, runner: Runner, thread: str, body: RunBody, visitor: Caller) -> StartedRun:
        given = (await self._threads.folds.now(runner, thread)).fold.answers
        for answer in answers_of(runner.state, body.resume, given):
            end = await runner.submit(await visitor.attribute(answer))
            await runner.wait(end - 1)
        return await self._newest(runner, thread)

    async def _resume(self, runner: Runner, thread: str, visitor: Caller) -> StartedRun:
        if not runner.state.turns:
            raise NothingToResumeError(
                'this thread has no message yet; a run begins with {"messages": [...]}'
            )
        command = Resume(runner.state.turns)
        visitor.count_command(command)
        end = await runner.submit(command)
        await runner.wait(end - 1)
        return await self._newest(runner, thread)

    async def _newest(self, runner: Runner, thread: str) -> StartedRun:
        fold = (await self._threads.folds.now(runner, thread)).fold
        if fold.run is None:
            raise NothingToResumeError("this thread has no run")
        return StartedRun(fold.run.id, thread, runner)


def _message_of(given: RunInput, runner: Runner) -> SendMessage:
    *earlier, last = given.messages
    if not earlier:
        return SendMessage(last, when_busy=WhenBusy.QUEUE)
    state = runner.state
    return SendMessage(last, keep=len(state.history.entries), before=tuple(earlier), turns=state.turns)


# --- readers --------------------------------------------------------------------------------------------------


class _RunBody(EventBody):
    """A run as it is read by one client."""

    def __init__(
        self,
        threads: GraphThreads,
        connections: Connections,
        run: StartedRun,
        visitor: Caller,
        events: RunEvents,
    ) -> None:
        super().__init__(threads.host, connections, run.runner.session_id, visitor)
        self.events = events
        self.position = 0
        """Where the events begin to be read."""
        self.run = run

    async def read(self) -> AsyncGenerator[list[bytes]]:
        """Read events to the end of the run, as they come; nothing before each wait."""
        reader = JournalReader()
        async with aclosing(follow_pages(self._host, self._session, self.position)) as pages:
            async for page in pages:
                events: list[bytes] = []
                for stored in page:
                    events += self.events.take(reader.read(stored.body), epoch=stored.epoch)
                yield events
                if self.events.ended is not None or (not page and self._is_lost()):
                    return

    def _is_lost(self) -> bool:
        """Whether the run will not come: it waited and was withdrawn."""
        fold, prefix = self.events.fold, f"{STREAM_PREFIX}{self.run.id}."
        is_known = any(run.id == self.run.id for run in fold.runs)
        waiting = any(each.stream.startswith(prefix) for each in fold.session.queue)
        return not is_known and not waiting


class RunStream(_RunBody):
    """Sends a run's events to one client."""

    @override
    async def pump(self, send: Send) -> None:
        async with aclosing(self.read()) as pieces:
            async for events in pieces:
                await self.write(send, events)


class RunResult(_RunBody):
    """Sends the state in which a run ends, once it has."""

    headers = ((b"content-type", b"application/json"), (b"cache-control", b"no-store"))
    comment = b"\n"

    @override
    async def pump(self, send: Send) -> None:
        async with aclosing(self.read()) as pieces:
            async for _ in pieces:
                pass
        await self.write(send, [msgspec.json.encode(self._result())])

    def _result(self) -> Json:
        fold, run = self.events.fold, self.events.ended
        if run is not None and run.error:
            return {"__error__": {"error": run.error, "message": run.message}}
        asked = interrupts_of(fold.session)
        return {**fold.state.values(), **({"__interrupt__": asked} if asked else {})}


class RunReaders:
    """Makes the readers of runs."""

    def __init__(self, threads: GraphThreads, connections: Connections) -> None:
        self.threads = threads
        self.connections = connections

    async def stream(
        self, run: StartedRun, visitor: Caller, modes: tuple[str, ...], after: tuple[int, int]
    ) -> RunStream:
        """Return a reader of a run's events behind a place."""
        found = await self.threads.folds.before(run.runner, run.thread, run_id=run.id)
        events = RunEvents(found.fold, run.id, modes, after, metadata_of(self.threads.host))
        made = RunStream(self.threads, self.connections, run, visitor, events)
        made.position = found.position
        return made

    async def result(self, run: StartedRun, visitor: Caller) -> RunResult:
        """Return a reader of a run's result."""
        found = await self.threads.folds.before(run.runner, run.thread, run_id=run.id)
        events = RunEvents(found.fold, run.id, (), BEGINNING, {})
        made = RunResult(self.threads, self.connections, run, visitor, events)
        made.position = found.position
        return made


def _headers_of(
    run: StartedRun, modes: tuple[str, ...] = (), ignored: tuple[str, ...] = ()
) -> list[tuple[str, str]]:
    """Return where a run is read again, and what had no effect."""
    place = f"/threads/{run.thread}/runs/{run.id}"
    wanted = "&".join(f"stream_mode={mode}" for mode in modes)
    headers = [("content-location", place)]
    if wanted:
        headers.append(("location", f"{place}/stream?{wanted}"))
    if ignored:
        headers.append((IGNORED_HEADER, ", ".join(ignored)))
    return headers


def _modes_in(request: Request) -> tuple[str, ...]:
    wanted: list[str] = []
    for each in request.query_params.getlist("stream_mode"):
        try:
            listed = json.loads(each) if each.startswith("[") else each.split(",")
        except ValueError:
            listed = [each]
        wanted += [str(mode) for mode in listed if mode]
    return modes_of(wanted) if wanted else MODES


async def find_run(threads: GraphThreads, opened: OpenThread, run_id: str) -> tuple[StartedRun, Run | None]:
    """Return a run of a thread, and what is known of it; None where it waits for others.

    Raises:
        NotFoundError: The thread has none of this id.
    """
    runner = opened.runner
    if runner is not None:
        fold = (await threads.folds.now(runner, opened.id)).fold
        run = next((each for each in fold.runs if each.id == run_id), None)
        if run is not None or _queued_number(fold, run_id):
            return StartedRun(run_id, opened.id, runner), run
    raise NotFoundError(f"thread {opened.id!r} has no run {run_id[:80]!r}")


def _queued_number(fold: ThreadFold, run_id: str) -> int:
    """Return the number of a run's message in the queue; 0 where it does not wait."""
    prefix = f"{STREAM_PREFIX}{run_id}."
    return next((each.number for each in fold.session.queue if each.stream.startswith(prefix)), 0)


class LangGraphRunStream:
    """Begin a run and stream it."""

    def __init__(self, threads: GraphThreads, connections: Connections) -> None:
        self._threads = threads
        self._starter = RunStarter(threads)
        self._readers = RunReaders(threads, connections)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Begin a run of a thread and stream its events (LangGraph's runs API).

        Raises:
            MidstreamError: It is refused; an ordinary HTTP error.
        """
        request = Request(scope, receive)
        body = await decode_body(request, RunBody)
        modes = modes_of(body.stream_mode)
        visitor = visitor_of(scope)
        async with self._starter.start(request, body) as run:
            stream = await self._readers.stream(run, visitor, modes, BEGINNING)
            is_whole = await stream.send_to(receive, send, _headers_of(run, modes, ignored_of(body)))
            if not is_whole and body.on_disconnect == "cancel":
                await cancel_run(self._threads, run)


async def cancel_run(threads: GraphThreads, run: StartedRun) -> None:
    """Stop a run, and no later one; withdraw it where it waits."""
    fold = (await threads.folds.now(run.runner, run.thread)).fold
    begun = next((each for each in fold.runs if each.id == run.id), None)
    if begun is not None:
        await run.runner.submit(Cancel(begun.turn))
    elif number := _queued_number(fold, run.id):
        await run.runner.submit(Withdraw(number))


class LangGraphRunWait:
    """Begin a run and wait for its end."""

    def __init__(self, threads: GraphThreads, connections: Connections) -> None:
        self._threads = threads
        self._starter = RunStarter(threads)
        self._readers = RunReaders(threads, connections)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Begin a run of a thread, wait for its end, and return the state of the thread.

        Raises:
            MidstreamError: It is refused; an ordinary HTTP error.
        """
        request = Request(scope, receive)
        body = await decode_body(request, RunBody)
        visitor = visitor_of(scope)
        async with self._starter.start(request, body) as run:
            result = await self._readers.result(run, visitor)
            is_whole = await result.send_to(receive, send, _headers_of(run, ignored=ignored_of(body)))
            if not is_whole and body.on_disconnect == "cancel":
                await cancel_run(self._threads, run)


class LangGraphRunReader:
    """Read a run again."""

    def __init__(self, threads: GraphThreads, connections: Connections) -> None:
        self._threads = threads
        self._readers = RunReaders(threads, connections)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream a run's events behind `Last-Event-ID`, or from its beginning.

        Raises:
            MidstreamError: It is refused; an ordinary HTTP error.
        """
        request = Request(scope, receive)
        query = decode_query(request, JoinQuery)
        modes = _modes_in(request)
        after = place_of(request.headers.get("last-event-id", ""))
        if after is None:
            raise UsageError("`Last-Event-ID` is the id of an event of this run, or -1 for its beginning")
        async with self._threads.opened(request) as opened:
            run, _ = await find_run(self._threads, opened, request.path_params["run_id"])
            stream = await self._readers.stream(run, opened.visitor, modes, after)
            is_whole = await stream.send_to(receive, send, _headers_of(run, modes))
        if not is_whole and query.cancel_on_disconnect.lower() in ("1", "true"):
            async with self._threads.opened(request, Action.SPEAK):
                await cancel_run(self._threads, run)


class LangGraphRunJoin:
    """Wait for a run."""

    def __init__(self, threads: GraphThreads, connections: Connections) -> None:
        self._threads = threads
        self._readers = RunReaders(threads, connections)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Wait for the end of a run, and return the state of the thread there.

        Raises:
            MidstreamError: It is refused; an ordinary HTTP error.
        """
        request = Request(scope, receive)
        async with self._threads.opened(request) as opened:
            run, _ = await find_run(self._threads, opened, request.path_params["run_id"])
            result = await self._readers.result(run, opened.visitor)
            await result.send_to(receive, send, _headers_of(run))


class LangGraphRuns:
    """The requests about runs that have one answer."""

    def __init__(self, threads: GraphThreads) -> None:
        self._threads = threads
        self._starter = RunStarter(threads)
        self._about = metadata_of(threads.host)

    async def create_run(self, request: Request, body: RunBody) -> GraphRun:
        """Begin a run of a thread in the background."""
        async with self._starter.start(request, body) as begun:
            fold = (await self._threads.folds.now(begun.runner, begun.thread)).fold
            run = next((each for each in fold.runs if each.id == begun.id), None)
            return self._show(begun, run, fold.at)

    async def runs(self, request: Request, query: RunsQuery) -> list[GraphRun]:
        """List the runs of a thread, the newest first."""
        async with self._threads.opened(request) as opened:
            if opened.runner is None:
                return []
            fold = (await self._threads.folds.now(opened.runner, opened.id)).fold
            listed = [
                self._show(StartedRun(run.id, opened.id, opened.runner), run, fold.at)
                for run in reversed(fold.runs)
                if query.status in ("", _status_of(run))
            ]
            return listed[query.offset : query.offset + query.limit]

    async def run(self, request: Request) -> GraphRun:
        """Return a run."""
        async with self._threads.opened(request) as opened:
            begun, run = await find_run(self._threads, opened, request.path_params["run_id"])
            return self._show(begun, run, begun.runner.state.started_at)

    async def cancel_graph_run(self, request: Request, query: CancelQuery) -> Json:
        """Cancel a run; `wait=1` waits until it has ended."""
        async with self._threads.opened(request, Action.SPEAK) as opened:
            begun, run = await find_run(self._threads, opened, request.path_params["run_id"])
            runner = begun.runner
            is_newest = run is None or run.turn == runner.state.turns
            if is_newest and (run is None or not isinstance(runner.state.turn, Idle)):
                await cancel_run(self._threads, begun)
                if query.wait.lower() in ("1", "true") and run is not None:
                    await stop_turn(runner)
            return {}

    def _show(self, begun: StartedRun, run: Run | None, at: float) -> GraphRun:
        return GraphRun(
            begun.id,
            begun.thread,
            self._about["assistant_id"],
            moment(run.created_at if run else at),
            moment(run.updated_at if run else at),
            _status_of(run),
            self._about,
            {},
        )
