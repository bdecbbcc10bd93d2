"""Serves LangGraph's API for runs: a run is a turn of a session, or the part of it between two answers of people.

Any client can read a run after any event, at any server, as long as the journal is kept.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct
from starlette.requests import Request
from starlette.types import Send

from midstream.dialects.langgraph_requests import (
    Multitask,
    RunBody,
    RunInput,
    answers_of,
    ignored_of,
    input_of,
    modes_of,
)
from midstream.dialects.langgraph_runs import (
    BEGINNING,
    MODES,
    RunEvents,
    RunOutcome,
    place_of,
    queued_number,
)
from midstream.dialects.run_fold import Run, stream_name
from midstream.engine.journal import require_session_id
from midstream.engine.runner import Runner
from midstream.errors import (
    JournalMovedError,
    NotFoundError,
    NothingToResumeError,
    SessionBusyError,
    UsageError,
)
from midstream.protocol.frames import secret_digest_of
from midstream.server.api.event_body import PieceBody, RecordBody
from midstream.server.api.langgraph_endpoint import metadata_of, require_assistant, timestamp
from midstream.server.api.langgraph_threads import GraphThreads, OpenThread
from midstream.server.api.opened_sessions import opened_session
from midstream.server.api.turn_requests import find_or_begin, stop_turn, submit
from midstream.server.auth.caller import Caller, caller_of
from midstream.server.auth.principals import Action
from midstream.session.session import Received
from midstream.session.turn.commands import Cancel, Resume, SendMessage, WhenBusy, Withdraw
from midstream.session.turn.states import Idle

Json = dict[str, Any]

IGNORED_HEADER = "x-midstream-ignored"


class GraphEvent(Struct, frozen=True):
    """One server-sent event of a run in LangGraph's format; its id is its place in the journal."""

    id: str
    event: str
    data: str


GraphRunStatus = Literal["pending", "running", "success", "error", "interrupted"]
_STATUSES: dict[str, GraphRunStatus] = {
    "running": "running",
    "success": "success",
    "error": "error",
    "interrupted": "interrupted",
    "paused": "success",  # as in LangGraph, where the thread is interrupted
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
    """Paging and filter of a list of runs, newest first."""

    limit: Annotated[int, Meta(ge=1, le=1000)] = 10
    offset: Annotated[int, Meta(ge=0)] = 0
    status: str = ""


class CancelQuery(Struct, frozen=True):
    """Options for cancelling a run."""

    wait: Literal["0", "1", "true", "false", "True", "False"] = "0"
    action: Literal["interrupt"] = "interrupt"


class JoinQuery(Struct, frozen=True):
    """The requested events of a run; `stream_mode` may be repeated, or a JSON list."""

    stream_mode: str = ""
    cancel_on_disconnect: Literal["0", "1", "true", "false", "True", "False"] = "0"


class StartedRun(Struct, frozen=True):
    """A run of a thread, begun or queued.

    Args:
        id: Id of the run.
        thread: Id of the thread for clients.
        runner: Runner of the session.
        seq: Number of the last event of the thread before the run; 0 if unknown.
    """

    id: str
    thread: str
    runner: Runner
    seq: int = 0


class RunStarter:
    """Begins runs: with a message, with answers to open interrupts, or by resuming a failed turn."""

    def __init__(self, threads: GraphThreads) -> None:
        self._threads = threads
        self._host = threads.host

    @asynccontextmanager
    async def start(self, request: Request, body: RunBody) -> AsyncIterator[StartedRun]:
        """Begin a run; keeps its session open in the context.

        Raises:
            MidstreamError: The run is refused.
        """
        thread, caller = request.path_params["thread"], caller_of(request.scope)
        require_session_id(thread)
        require_assistant(self._host, body.assistant_id)
        given = self._input_of(thread, body)
        begins = body.if_not_exists == "create" or await self._threads.exists(caller.stored_name(thread))
        async with opened_session(self._host, request, thread, Action.SEND, begins=begins) as (
            runner,
            secret,
        ):
            if body.resume is not UNSET:
                run = await self._answer(runner, thread, body, caller)
            elif given is None:
                run = await self._resume(runner, thread, caller)
            else:
                secret = secret or secret_digest_of(given.digest)
                run = await self._submit_message(
                    runner, thread, given, body.multitask_strategy, caller, secret
                )
            yield run

    def _input_of(self, thread: str, body: RunBody) -> RunInput | None:
        if body.input is None:
            return None
        if body.resume is not UNSET:
            raise UsageError("a run has an input or `command.resume`, not both")
        return input_of(thread, body.input, fresh=self._host.world.new_id("run"))

    async def _submit_message(
        self,
        runner: Runner,
        thread: str,
        given: RunInput,
        strategy: Multitask,
        caller: Caller,
        secret_digest: str,
    ) -> StartedRun:
        name, seq = stream_name(given.run_id, given.message_id), 0

        async def find() -> StartedRun | None:
            return StartedRun(given.run_id, thread, runner, seq) if name in runner.state.streams else None

        async def begin() -> None:
            nonlocal seq
            seq = await self._make_room(runner, thread, strategy)
            command = _message_of(given, runner)
            caller.count_command(command)
            await submit(runner, Received(name, secret_digest, 0, given.digest, command))

        is_patient = strategy is Multitask.INTERRUPT
        return await find_or_begin(
            find, begin, (JournalMovedError, *((SessionBusyError,) if is_patient else ()))
        )

    async def _make_room(self, runner: Runner, thread: str, strategy: Multitask) -> int:
        """Treat the current run by `strategy`; return the number of the last event if the session is at rest."""
        state = runner.state
        if state.is_live:
            # A new message replaces the missing answers to open questions.
            fold = await self._threads.folds.now(runner, thread)
            if strategy is Multitask.INTERRUPT or fold.is_waiting:
                await stop_turn(runner)
            elif strategy is Multitask.REJECT:
                raise SessionBusyError(
                    "Thread is already running a task. Wait for it to finish or choose another "
                    "multitask strategy."
                )
            else:
                return 0
        return await self._threads.folds.newest_seq(runner, thread) if runner.state.turns else 0

    async def _answer(self, runner: Runner, thread: str, body: RunBody, caller: Caller) -> StartedRun:
        folds = self._threads.folds
        fold = await folds.now(runner, thread)
        for question, answer in answers_of(fold.questions, body.resume, fold.answers):
            await folds.answer(runner, thread, question, await caller.attribute(answer))
        return await self._newest(runner, thread)

    async def _resume(self, runner: Runner, thread: str, caller: Caller) -> StartedRun:
        if not runner.state.turns:
            raise NothingToResumeError(
                'this thread has no message yet; a run begins with {"messages": [...]}'
            )
        command = Resume(runner.state.turns)
        caller.count_command(command)
        await submit(runner, command)
        return await self._newest(runner, thread)

    async def _newest(self, runner: Runner, thread: str) -> StartedRun:
        fold = await self._threads.folds.now(runner, thread)
        if fold.run is None:
            raise NothingToResumeError("this thread has no run")
        return StartedRun(fold.run.id, thread, runner)


def _message_of(given: RunInput, runner: Runner) -> SendMessage:
    *earlier, last = given.messages
    if not earlier:
        return SendMessage(last, when_busy=WhenBusy.QUEUE)
    state = runner.state
    return SendMessage(last, keep=len(state.history.entries), before=tuple(earlier), turns=state.turns)


def _headers_of(
    run: StartedRun, modes: tuple[str, ...] = (), ignored: tuple[str, ...] = ()
) -> list[tuple[str, str]]:
    """Return the headers with the URL of a run, and with ignored fields."""
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


class LangGraphRuns:
    """Handles requests about runs."""

    def __init__(self, threads: GraphThreads) -> None:
        self._threads = threads
        self._starter = RunStarter(threads)
        self._about = metadata_of(threads.host)

    async def stream_run(self, request: Request, body: RunBody, send: Send) -> None:
        """Begin a run and stream it."""
        await self._begin(request, body, send, modes_of(body.stream_mode))

    async def wait_run(self, request: Request, body: RunBody, send: Send) -> None:
        """Begin a run and wait for its end."""
        await self._begin(request, body, send, None)

    async def read_run(self, request: Request, query: JoinQuery, send: Send) -> None:
        """Read a run again."""
        modes = _modes_in(request)
        after = place_of(request.headers.get("last-event-id", ""))
        if after is None:
            raise UsageError(
                "`Last-Event-ID` must be the id of an event of this run, or -1 for its beginning"
            )
        async with self._threads.opened(request) as opened:
            run, _ = await self._find(opened, request)
            is_whole = await self._send(request, send, run, _headers_of(run, modes), modes, after)
        if not is_whole and query.cancel_on_disconnect.lower() in ("1", "true"):
            async with self._threads.opened(request, Action.SEND):
                await self._cancel(run)

    async def join_run(self, request: Request, send: Send) -> None:
        """Wait for a run."""
        async with self._threads.opened(request) as opened:
            run, _ = await self._find(opened, request)
            await self._send(request, send, run, _headers_of(run), None)

    async def create_run(self, request: Request, body: RunBody) -> GraphRun:
        """Begin a run of a thread in the background."""
        async with self._starter.start(request, body) as begun:
            fold = await self._threads.folds.now(begun.runner, begun.thread)
            return self._show(begun, fold.find(begun.id), fold.at)

    async def runs(self, request: Request, query: RunsQuery) -> list[GraphRun]:
        """List the runs of a thread, newest first."""
        async with self._threads.opened(request) as opened:
            if opened.runner is None:
                return []
            fold = await self._threads.folds.now(opened.runner, opened.id)
            listed = [
                self._show(StartedRun(run.id, opened.id, opened.runner), run, fold.at)
                for run in reversed(fold.runs)
                if query.status in ("", _status_of(run))
            ]
            return listed[query.offset : query.offset + query.limit]

    async def run(self, request: Request) -> GraphRun:
        """Return a run."""
        async with self._threads.opened(request) as opened:
            begun, run = await self._find(opened, request)
            return self._show(begun, run, begun.runner.state.started_at)

    async def cancel_graph_run(self, request: Request, query: CancelQuery) -> Json:
        """Cancel a run; `wait=1` waits for its end."""
        async with self._threads.opened(request, Action.SEND) as opened:
            begun, run = await self._find(opened, request)
            runner = begun.runner
            is_newest = run is None or run.turn == runner.state.turns
            if is_newest and (run is None or not isinstance(runner.state.turn, Idle)):
                await self._cancel(begun)
                if query.wait.lower() in ("1", "true") and run is not None:
                    await stop_turn(runner)
            return {}

    async def _find(self, opened: OpenThread, request: Request) -> tuple[StartedRun, Run | None]:
        """Return the run that a request names, and its state; a state of None if it is queued.

        Raises:
            NotFoundError: The thread has no run of this id.
        """
        run_id, runner = request.path_params["run_id"], opened.runner
        if runner is not None:
            fold = await self._threads.folds.now(runner, opened.id)
            run = fold.find(run_id)
            if run is not None or queued_number(fold, run_id):
                return StartedRun(run_id, opened.id, runner), run
        raise NotFoundError(f"thread {opened.id!r} has no run {run_id[:80]!r}")

    async def _begin(
        self, request: Request, body: RunBody, send: Send, modes: tuple[str, ...] | None
    ) -> None:
        """Begin a run, and send its events; if `modes` is None, its outcome."""
        async with self._starter.start(request, body) as run:
            headers = _headers_of(run, modes or (), ignored_of(body))
            is_whole = await self._send(request, send, run, headers, modes)
            if not is_whole and body.on_disconnect == "cancel":
                await self._cancel(run)

    async def _send(
        self,
        request: Request,
        send: Send,
        run: StartedRun,
        headers: Sequence[tuple[str, str]],
        modes: tuple[str, ...] | None,
        after: tuple[int, int] = BEGINNING,
    ) -> bool:
        """Send a run's events after a place, or its outcome if `modes` is None; return whether the body is complete."""
        threads, caller = self._threads, caller_of(request.scope)
        found = await threads.folds.before(run.runner, run.thread, run_id=run.id)
        place = (threads.host, threads.connections, run.runner.session_id, caller)
        if modes is None:
            body: RecordBody = PieceBody(*place, RunOutcome(found.fold, run.id), found.position)
        else:
            events = RunEvents(found.fold, run.id, modes, after, self._about)
            body = RecordBody(*place, events, found.position)
        return await body.send_to(request.receive, send, headers)

    async def _cancel(self, run: StartedRun) -> None:
        """Stop a run if it is in progress, or withdraw it if it is queued. Later runs are unaffected."""
        fold = await self._threads.folds.now(run.runner, run.thread)
        begun = fold.find(run.id)
        if begun is not None:
            await run.runner.submit(Cancel(begun.turn))
        elif number := queued_number(fold, run.id):
            await run.runner.submit(Withdraw(number))

    def _show(self, begun: StartedRun, run: Run | None, at: float) -> GraphRun:
        return GraphRun(
            begun.id,
            begun.thread,
            self._about["assistant_id"],
            timestamp(run.created_at if run else at),
            timestamp(run.updated_at if run else at),
            _status_of(run),
            self._about,
            {},
        )
