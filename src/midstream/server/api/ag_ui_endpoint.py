"""Serves runs of the agent as AG-UI events over HTTP, for `HttpAgent` of `@ag-ui/client` and similar clients.

A thread is a session. A run is a turn of it, or the part of a turn between two answers of its client. A repetition of a
request reads the same run, by its id. A run can be read after any event, at any server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

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
    empty_thread_events,
    refusal,
    stream_name,
)
from midstream.dialects.langgraph_messages import interrupt_id_of
from midstream.dialects.langgraph_runs import BEGINNING, place_of
from midstream.dialects.run_fold import Run
from midstream.engine.host import Host
from midstream.engine.runner import Runner
from midstream.errors import (
    AnswerMismatchError,
    MidstreamError,
    NotFoundError,
    QuestionClosedError,
    UnavailableError,
    UsageError,
)
from midstream.protocol.frames import secret_digest_of
from midstream.server.api.event_body import RecordBody
from midstream.server.api.http_endpoints import SSE_HEADERS
from midstream.server.api.opened_sessions import opened_existing_session, opened_session
from midstream.server.api.request_bodies import MESSAGES_BYTES_MAX, body_of
from midstream.server.api.run_folds import RunFolds
from midstream.server.api.turn_requests import find_or_begin, stop_turn, submit, submit_resent
from midstream.server.auth.caller import Caller, caller_of
from midstream.server.auth.principals import Action
from midstream.server.transports.connection import Connections
from midstream.session.questions import Question
from midstream.session.session import Received
from midstream.session.turn.commands import Answer

STARTING_S = 10.0
"""Seconds for a call to start if its result has already arrived."""


class AgUiEvent(Struct, frozen=True):
    """One server-sent event; `data` is an AG-UI event, `id` its place in the journal. A repetition has no id."""

    data: str
    id: str = ""


class _Refused(Exception):  # noqa: N818 - it is sent as the run's error
    """The input does not fit the state of the thread; AG-UI reports this as the end of a run."""

    def __init__(self, error: MidstreamError) -> None:
        super().__init__(str(error))
        self.error = error


class AgUiEndpoint:
    """Serves sessions as threads of AG-UI."""

    def __init__(self, host: Host, connections: Connections) -> None:
        self._host = host
        self._connections = connections
        self._folds = RunFolds(host, AgUiFold)

    async def ag_ui_run(self, request: Request, send: Send) -> None:
        """Begin a run, or read an existing run of this id."""
        run_input = read_input(await body_of(request, MESSAGES_BYTES_MAX))
        after = _after_of(request)
        async with opened_session(self._host, request, run_input.thread, Action.SEND, begins=True) as (
            runner,
            secret,
        ):
            try:
                secret = secret or secret_digest_of(run_input.digest)
                run = await self._run(runner, run_input, caller_of(request.scope), secret)
            except _Refused as refused:
                error, at = refused.error, self._host.world.now()
                events = refusal(run_input.thread, run_input.run_id, error.code, str(error), at=at)
                await self._send_whole(request, send, events)
            else:
                await self._send_run(request, send, runner, run_input.thread, run, after)

    async def ag_ui_connect(self, request: Request, send: Send) -> None:
        """Follow a thread."""
        run_input = read_input(await body_of(request, MESSAGES_BYTES_MAX))
        after = _after_of(request)
        async with opened_existing_session(self._host, request, run_input.thread) as runner:
            run = None
            if runner is not None and runner.state.turns:
                fold = await self._folds.now(runner, run_input.thread)
                later = (each for each in fold.runs if each.after >= after[0] > 0)
                of_place = [each for each in fold.runs if each.after < after[0]]
                run = of_place[-1] if of_place and next(later, None) is not None else fold.run
            if runner is None or run is None:
                events = empty_thread_events(run_input.thread, run_input.run_id, at=self._host.world.now())
                await self._send_whole(request, send, events)
            else:
                await self._send_run(request, send, runner, run_input.thread, run, after)

    async def ag_ui_read(self, request: Request, send: Send) -> None:
        """Read a run again."""
        thread, run_id = request.path_params["thread"], request.path_params["run_id"]
        after = _after_of(request)
        async with opened_existing_session(self._host, request, thread) as runner:
            run = None
            if runner is not None and runner.state.turns:
                run = (await self._folds.now(runner, thread)).find(run_id)
            if runner is None or run is None:
                raise NotFoundError(f"there is no run {run_id[:80]!r}")
            await self._send_run(request, send, runner, thread, run, after)

    async def _send_whole(self, request: Request, send: Send, events: Sequence[bytes]) -> None:
        response = Response(b"".join(events))
        response.raw_headers = [*SSE_HEADERS]
        await response(request.scope, request.receive, send)

    async def _send_run(
        self, request: Request, send: Send, runner: Runner, thread: str, run: Run, after: tuple[int, int]
    ) -> None:
        found = await self._folds.before(runner, thread, run_id=run.id)
        events, session = AgUiEvents(found.fold, run, after), runner.session_id
        caller = caller_of(request.scope)
        body = RecordBody(self._host, self._connections, session, caller, events, found.position)
        await body.send_to(request.receive, send)

    # --- the beginning of a run -------------------------------------------------------------------------------

    async def _run(self, runner: Runner, run_input: AgUiRequest, caller: Caller, secret_digest: str) -> Run:
        async def find() -> Run | None:
            return await self._find(runner, run_input)

        async def begin() -> None:
            await self._begin(runner, run_input, caller, secret_digest)

        return await find_or_begin(find, begin)

    async def _find(self, runner: Runner, run_input: AgUiRequest) -> Run | None:
        """Return the run of a request; None if it has not begun, or a server failed between its answers."""
        if not runner.state.turns:
            return None
        fold = await self._folds.now(runner, run_input.thread)
        is_continuing = stream_name(run_input.run_id, CONTINUES) in runner.state.streams
        if is_continuing and self._has_answers_left(run_input, fold):
            return None
        run = fold.find(run_input.run_id)
        return fold.run if run is None and is_continuing else run  # other clients gave the answers

    def _has_answers_left(self, run_input: AgUiRequest, fold: AgUiFold) -> bool:
        if run_input.resume:
            open_ones = {interrupt_id_of(each) for each in fold.questions}
            return any(each.interruptId in open_ones for each in run_input.resume)
        return not _results_of(fold, run_input).is_empty

    async def _begin(
        self, runner: Runner, run_input: AgUiRequest, caller: Caller, secret_digest: str
    ) -> None:
        if not runner.state.turns:
            await self._submit_message(runner, run_input, caller, secret_digest)
            return
        fold = await self._folds.now(runner, run_input.thread)
        if run_input.resume:
            answers = self._answers(run_input, fold)
            if answers:
                await self._name_run(runner, run_input, secret_digest)
            for question, answer in answers:
                await self._folds.answer(runner, run_input.thread, question, await caller.attribute(answer))
            return
        if fold.questions:
            words = "this thread waits for people: answer its interrupts by `resume`"
            raise _Refused(AnswerMismatchError(words))
        if run_input.messages and run_input.messages[-1].role == "user":
            await self._submit_message(runner, run_input, caller, secret_digest)
            return
        if _results_of(fold, run_input).is_empty:
            words = "this request has neither a new message nor a result that is waited for"
            raise _Refused(UsageError(words))
        await self._name_run(runner, run_input, secret_digest)
        await self._give_results(runner, run_input)

    def _answers(self, run_input: AgUiRequest, fold: AgUiFold) -> Sequence[tuple[Question, Answer]]:
        try:
            return resumed_answers(fold.questions, run_input.resume, fold.answers)
        except (AnswerMismatchError, QuestionClosedError) as error:
            raise _Refused(error) from error

    async def _name_run(self, runner: Runner, run_input: AgUiRequest, secret_digest: str) -> None:
        """Record the id of the run before its answers, since the first answer may begin the run."""
        name = stream_name(run_input.run_id, CONTINUES)
        if name not in runner.state.streams:
            await submit(runner, Received(name, secret_digest, 0, run_input.digest, None))

    async def _give_results(self, runner: Runner, run_input: AgUiRequest) -> None:
        """Submit the results of calls; waits for a call that starts after another one."""
        try:
            async with asyncio.timeout(STARTING_S):
                while True:
                    position = runner.newest.position
                    found = _results_of(await self._folds.now(runner, run_input.thread), run_input)
                    if found.is_empty:
                        return
                    for result in found.ready:
                        await submit(runner, result)
                    if not found.ready:
                        await runner.wait(position)
        except TimeoutError:
            raise UnavailableError("a call has not started yet: retry", retry_after_s=1.0) from None

    async def _submit_message(
        self, runner: Runner, run_input: AgUiRequest, caller: Caller, secret_digest: str
    ) -> None:
        if not run_input.messages or run_input.messages[-1].role != "user":
            raise _Refused(UsageError("the last message of this thread must be a user message"))
        if self._has_begun(runner, run_input):
            return
        if runner.state.is_live:
            await stop_turn(runner)
        if self._has_begun(runner, run_input):
            return
        name = stream_name(run_input.run_id, run_input.message_id)
        received = Received(name, secret_digest, 0, run_input.digest, None)
        await submit_resent(runner, caller, received, chat_of(run_input.messages), run_input.tools)

    def _has_begun(self, runner: Runner, run_input: AgUiRequest) -> bool:
        """Return whether a concurrent repetition of the request has begun the run."""
        prefix = stream_name(run_input.run_id, "")
        return any(name.partition(" ")[0] == prefix for name in runner.state.streams)


def _results_of(fold: AgUiFold, run_input: AgUiRequest) -> FoundResults:
    """Return the results of a request, by a consistent pair of state and response id."""
    open_id, _ = fold.open_words
    return results_in(fold.session, open_id, run_input.messages)


def _after_of(request: Request) -> tuple[int, int]:
    after = place_of(request.headers.get("last-event-id", ""))
    if after is None:
        raise UsageError("`Last-Event-ID` must be the id of an event of this thread, or -1 for the beginning")
    return max(after, BEGINNING)
