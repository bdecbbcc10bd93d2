"""Executors: one function for each kind of pending work, which reports the outcome as a command."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import partial
from typing import Protocol, assert_never, cast

from msgspec.structs import replace

from midstream.engine.agent import Agent, SubAgent
from midstream.engine.permission_prompts import AgentQuestions, QuestionJournal
from midstream.engine.sub_agents import ChildSessions, run_child, stop_child
from midstream.engine.timers import Work
from midstream.engine.toolset import Toolset, read_toolset
from midstream.engine.watchdog import Watch
from midstream.environment import Fault, World
from midstream.errors import (
    ContextOverflowError,
    MidstreamError,
    ModelCutError,
    ModelEmptyError,
    ModelError,
    ModelStalledError,
    ModelUnavailableError,
)
from midstream.history.compaction import next_cut
from midstream.history.messages import (
    Finish,
    History,
    Outcome,
    Response,
    ToolCall,
    ToolResult,
    ToolSpec,
    UserMessage,
    storable,
)
from midstream.models.call_filter import CallFilter
from midstream.models.model import ResumableModel
from midstream.models.prompt_prefix import head_of
from midstream.models.responses import (
    KeepAlive,
    ModelEvent,
    ModelRequest,
    ResponseBuilder,
    Resumable,
    ReuseReported,
    is_progress,
)
from midstream.session.application_request import ApplicationRequest
from midstream.session.blobs import digests_in, whole
from midstream.session.calls import (
    NOT_STARTED_CONTENT,
    STOPPED_CONTENT,
    UNKNOWN_CONTENT,
    CallPlan,
    CallState,
    OnDoubt,
    Site,
    digest_of,
)
from midstream.session.records import PromptHead
from midstream.session.session import Session, ToolsFound
from midstream.session.turn.commands import (
    CallFinished,
    CallProbed,
    CallProgress,
    ChildStreamed,
    Command,
    ModelFailed,
    ModelResponded,
    ModelResumable,
    ModelReuseDecided,
    ModelStreamed,
    PermissionRequested,
    Stalled,
    StallFinished,
)
from midstream.session.turn.deciding import text_so_far
from midstream.session.turn.pending import AnswerAgent, CallModel, ProbeCall, RunCall, RunChild
from midstream.session.turn.states import AwaitingModel, RunningCalls
from midstream.store.contract import Attempt
from midstream.timing import StalledOn
from midstream.tools.function_tools import (
    CallContext,
    Tool,
    call_within,
    is_plain,
    of_client,
    plan_call,
    probe_call,
    run_call,
)

HAND_IN = "[A limit was reached. Give your final answer now, from what you have; no tools are available.]"
"""The message of the last request of a turn that reached a limit."""
STOP_S = 5.0
"""Seconds for the request to a provider to cancel a response."""
CUT_CONTENT = (
    "The response reached its length limit in the middle of this call, so the call was not run. "
    "Ask for less in one call, or split it."
)
"""The result of a call that the length limit cut off."""

_NEVER = threading.Event()
"""An event that is never set, for coroutines: they are cancelled instead."""

_log = logging.getLogger(__name__)


class Reports(QuestionJournal, Protocol):
    """Receiver of the executors' reports: the session's runner."""

    session_id: str

    async def journal_output(
        self, command: ModelStreamed | ModelResumable | ModelReuseDecided | ToolsFound
    ) -> None:
        """Journal a model's output, the provider's token for it, or its tools, soon."""

    def journal_progress(self, progress: CallProgress | Stalled | StallFinished) -> None:
        """Journal the progress of a tool, or a silence."""

    async def show(self, command: ChildStreamed | PermissionRequested) -> None:
        """Journal a record of a child session, or a request of an agent, and wait for the append."""

    def report(self, command: Command) -> None:
        """Journal an outcome, soon. It must be the executor's last act: all further work becomes pending work."""

    async def report_within(self, pending_work: RunCall, run: Callable[[Attempt], CallFinished]) -> None:
        """Run a call in the transaction that records its outcome, and wait for it."""

    async def blob(self, digest: str) -> bytes | None:
        """Return a large result that a record of this session names."""

    @property
    def is_transactional(self) -> bool:
        """Whether `report_within` may be called: the store has transactions for tools."""

    @property
    def is_closing(self) -> bool:
        """Whether the process releases the session."""


class Executor:
    """Executes the pending work of one session."""

    def __init__(self, agent: Agent, world: World, reports: Reports, children: ChildSessions) -> None:
        self._agent = agent
        self._world = world
        self._reports = reports
        self._children = children
        self._toolset = Toolset(agent.tools)
        """The tools of this process's last model call."""
        self._questions = AgentQuestions(world, reports)
        self._prompt: tuple[tuple[str, tuple[ToolSpec, ...]], PromptHead] | None = None
        """The beginning of that call's request, with its digests."""

    async def execute(self, work_item: Work, session: Session) -> None:
        """Execute one piece of pending work of `session` to its end."""
        match work_item:
            case CallModel():
                await self._request_response(work_item, session)
            case RunCall():
                await self._run_call(work_item, session)
            case RunChild():
                await self._run_child(work_item, session)
            case ProbeCall():
                await self._probe_call(work_item, session)
            case AnswerAgent():
                await self._questions.deliver_decision(work_item, session)
            case _:
                assert_never(work_item)

    @staticmethod
    def is_repeatable(work_item: Work) -> bool:
        """Whether cutting the work loses nothing that matters: true for all work except a running tool."""
        return not isinstance(work_item, RunCall)

    async def _until(self, at: float) -> None:
        while (left_s := at - self._world.now()) > 0:
            await self._world.sleep(left_s)

    # --- the model --------------------------------------------------------------------------------------------

    async def _request_response(self, pending_work: CallModel, session: Session) -> None:
        assert isinstance(session.turn, AwaitingModel)
        kept = _ResponseToken(session.turn.token if pending_work.continued else "")
        try:
            await self._until(pending_work.not_before)
            await self._attempt(pending_work, session, session.turn, kept)
        except asyncio.CancelledError:
            # When the process releases the session, the response continues at the provider for the next node.
            if kept.token and not self._reports.is_closing:
                # The session may fail meanwhile, which cancels this task once more.
                await self._world.finish(self._stop(kept.token), name="stop of a response")
            raise
        finally:
            self._questions.end(pending_work)

    async def _attempt(
        self, pending_work: CallModel, session: Session, turn: AwaitingModel, kept: _ResponseToken
    ) -> None:
        application_request = turn.terms.request
        own = await self._read_tools(pending_work)
        theirs = {each.spec.name: of_client(each) for each in turn.terms.tools if each.spec.name not in own}
        tools = {**own, **theirs} if theirs else own
        try:
            history = await self._whole(session.model_history) if session.has_blobs else session.model_history
        except MidstreamError as error:
            unread = ModelUnavailableError(f"the input of the model cannot be read: {error.message}")
            self._reports.report(self._failure(pending_work, unread, session))
            return
        watch = self._watch(pending_work)
        request = ModelRequest(
            self._agent.instructions,
            history.then(UserMessage.of(HAND_IN)) if turn.is_last else history,
            () if turn.is_last else tuple(each.spec for each in tools.values()),
            pending_work.ref.attempt,
            f"{self._reports.session_id}/{pending_work.ref.turn}/{pending_work.ref.response_no}",
            kept.token,
            session=self._reports.session_id,
            person=self._questions.person(pending_work, watch) if application_request is None else None,
            stalls=self._agent.stalls,
        )
        if application_request is not None:
            request = _of_application(request, session, application_request)
        shown = text_so_far(turn) if kept.token else {}
        builder = ResponseBuilder(pending_work.ref, shown, is_announcing=application_request is not None)
        try:
            response = await self._listen(pending_work, request, builder, kept, watch)
        except ModelError as error:
            self._reports.report(self._failure(pending_work, error, session))
        else:
            if application_request is not None:  # the application checks its own calls
                plans = tuple(_plan_forwarded_call(call) for call in response.calls)
            else:
                plans = tuple(plan_call(call, tools, self._agent.approval) for call in response.calls)
            if application_request is None and response.finish is Finish.LENGTH:
                plans = _without_cut_calls(response, plans)
            responded = ModelResponded(
                pending_work.ref,
                response,
                plans,
                self._head_of(request),
            )
            self._reports.report(responded)

    def _head_of(self, request: ModelRequest) -> PromptHead:
        """Return the digests of the beginning of a request; most requests begin like the previous one."""
        key = (request.instructions, request.tools)
        if self._prompt is None or self._prompt[0] != key:
            self._prompt = (key, head_of(*key))
        return self._prompt[1]

    async def _stop(self, token: str) -> None:
        """Cancel the response at the provider; if that fails, it ends without help."""
        model = self._agent.model
        if not isinstance(model, ResumableModel):
            return
        try:
            async with asyncio.timeout(STOP_S):
                await model.stop(token)
        except Exception as error:  # noqa: BLE001 - foreign code, and nothing depends on it
            kind = type(error).__name__
            _log.debug("a response was not stopped: %s", kind, extra={"session": self._reports.session_id})

    async def _whole(self, shown: History) -> History:
        """Return a history with its large results, read for each model call: memory has only their beginnings."""
        read = {digest: await self._reports.blob(digest) for digest in digests_in(shown)}
        return whole(shown, {digest: body for digest, body in read.items() if body is not None})

    async def _read_tools(self, pending_work: CallModel) -> Mapping[str, Tool]:
        """Return the current tools, and journal a change for readers."""
        if self._agent.sources:
            self._toolset = await read_toolset(self._agent)
            found, unreachable = self._toolset.found, self._toolset.unreachable
            ref = pending_work.ref
            await self._reports.journal_output(
                ToolsFound(ref.turn, ref.response_no, ref.attempt, found, unreachable)
            )
        return self._toolset.tools

    async def _listen(
        self,
        pending_work: CallModel,
        request: ModelRequest,
        builder: ResponseBuilder,
        kept: _ResponseToken,
        watch: Watch,
    ) -> Response:
        """Journal the model's output as it comes, and return the whole response."""
        ref = pending_work.ref
        name = request.model or self._agent.model.name
        events = cast("AsyncGenerator[ModelEvent]", self._agent.model.stream(request))
        passed = CallFilter(has_tools=bool(request.tools)).apply if builder.is_announcing else _same
        try:
            async with watch, contextlib.aclosing(events):
                async for each in events:
                    event = passed(each)
                    if not is_progress(event):
                        if isinstance(event, Resumable):
                            kept.token = event.token
                            await self._reports.journal_output(ModelResumable(ref, event.token))
                        elif isinstance(event, ReuseReported):
                            await self._reports.journal_output(ModelReuseDecided(ref, event.judgement))
                        elif isinstance(event, KeepAlive):
                            watch.note_ping()
                        continue
                    if deltas := builder.add(event):
                        watch.hold()  # waiting for the journal is no silence of the model
                        await self._reports.journal_output(ModelStreamed(ref, tuple(deltas)))
                    watch.note_progress(
                        type(event).__name__, StalledOn.TOOL if builder.is_running_upstream else None
                    )
        except ModelError:
            raise
        except TimeoutError as error:
            if not watch.silent_s:
                raise ModelUnavailableError(f"{name} gave up waiting for its answer") from error
            raise ModelStalledError(f"{name} sent nothing for {watch.silent_s:.0f} s") from error
        except (Exception, SystemExit) as error:  # the latter would end the server
            _log.exception("the model raised an untyped error", extra={"session": self._reports.session_id})
            raise ModelError(f"{name} failed with {type(error).__name__}: {error}") from error
        if not builder.is_finished:
            raise ModelUnavailableError(f"{name} stopped in the middle of its response")
        response = builder.response()
        if response is None:
            raise ModelEmptyError(f"{name} ended its response without text and calls")
        return response

    def _watch(self, pending_work: CallModel | RunCall) -> Watch:
        call_id = pending_work.ref.call_id if isinstance(pending_work, RunCall) else ""
        place = (self._reports.session_id, pending_work.ref.turn, pending_work.ref.response_no, call_id)
        return Watch(
            self._world, self._agent.stalls, place, self._reports.journal_progress, self._agent.on_stall
        )

    def _failure(self, pending_work: CallModel, error: ModelError, session: Session) -> ModelFailed:
        is_too_long = isinstance(error, ContextOverflowError)
        return ModelFailed(
            pending_work.ref,
            error.code,
            storable(error.message),
            is_retriable=error.retry in ("later", "now"),
            retry_after_s=error.retry_after_s,
            chance=self._world.chance(),
            cut=next_cut(session.history, session.cut) if is_too_long else None,
            is_cut=isinstance(error, ModelCutError | ModelStalledError),
        )

    # --- tools ------------------------------------------------------------------------------------------------

    async def _run_call(self, pending_work: RunCall, session: Session) -> None:
        state = _state_of(pending_work, session)
        try:
            found = await self._find(state.call.name)
            self._world.reach(Fault.BEFORE_TOOL)
            await self._reports.confirm()  # TURN-53: everything that may take time precedes this check
        except asyncio.CancelledError:
            self._report_stopped(pending_work, _unstarted_result(pending_work))
            raise
        if found is not None and found.on_doubt is OnDoubt.IN_TRANSACTION:
            await self._run_within(pending_work, state, found)
            return
        watch = self._watch(pending_work)
        try:
            async with watch:
                result = await self._result_of(pending_work, state, found, watch)
        except asyncio.CancelledError:
            self._report_stopped(
                pending_work, ToolResult(pending_work.ref.call_id, STOPPED_CONTENT, Outcome.UNKNOWN)
            )
            raise
        self._world.reach(Fault.AFTER_TOOL)
        self._finish(pending_work, result)

    def _finish(self, pending_work: RunCall | RunChild, result: ToolResult) -> None:
        self._reports.report(CallFinished(pending_work.ref.turn, pending_work.ref.response_no, result))

    def _report_stopped(self, pending_work: RunCall, result: ToolResult) -> None:
        """End a call that a user cancelled. If the process releases the session, the call stays open."""
        if not self._reports.is_closing:
            self._finish(pending_work, result)

    async def _run_within(self, pending_work: RunCall, state: CallState, found: Tool) -> None:
        """Run a call in the transaction of its outcome: either both happen or neither."""
        context = self._context(pending_work, pending_work.run)
        surroundings = contextvars.copy_context()

        def run(attempt: Attempt) -> CallFinished:
            within = partial(attempt, within_s=found.timeout_s)
            result = surroundings.run(call_within, found, state.call, context, within)
            self._world.reach(Fault.AFTER_TOOL)
            return CallFinished(pending_work.ref.turn, pending_work.ref.response_no, result)

        try:
            if (why := self._refusal_of(state, found)) is not None:
                self._finish(pending_work, ToolResult(pending_work.ref.call_id, why, Outcome.ERROR))
            else:
                await self._reports.report_within(pending_work, run)
        except asyncio.CancelledError:
            # The transaction was not committed, and will not be.
            self._report_stopped(
                pending_work, ToolResult(pending_work.ref.call_id, NOT_STARTED_CONTENT, Outcome.CANCELLED)
            )
            raise

    def _refusal_of(self, state: CallState, found: Tool) -> str | None:
        """Return the reason why a call is not run although its tool exists, or None."""
        if state.plan.digest != digest_of(state.call.name, state.call.arguments):
            return "The arguments do not match their digest."
        is_within = found.on_doubt is OnDoubt.IN_TRANSACTION
        if is_within and not self._reports.is_transactional:
            return f"{found.name!r} needs a store with transactions for tools; the call was not run."
        if state.plan.on_doubt is OnDoubt.IN_TRANSACTION and not is_within:
            # Planned by another version of the agent. Without the transaction, a crash could run the tool twice.
            return f"{found.name!r} is now another tool; the call was not run."
        return None

    async def _run_child(self, pending_work: RunChild, session: Session) -> None:
        state = _state_of(pending_work, session)
        found = self._agent.tools.get(state.call.name)
        if not isinstance(found, SubAgent):  # the agent has changed since the call was planned
            content, outcome = f"The tool {state.call.name!r} no longer exists.", Outcome.ERROR
            if (
                state.epoch < session.epoch
            ):  # it may have used tools in the process that began the call (TURN-43)
                content, outcome = f"{content} {UNKNOWN_CONTENT}", Outcome.UNKNOWN
            self._finish(pending_work, ToolResult(pending_work.ref.call_id, content, outcome))
            return
        try:
            finished = await run_child(
                self._children, self._world, self._reports, pending_work, session, state, found
            )
        except asyncio.CancelledError:
            if self._reports.is_closing:
                raise
            try:
                finished = await stop_child(
                    self._children, self._world, self._reports, pending_work, session, state, found
                )
            except MidstreamError as error:  # the cancellation proceeds without it at its deadline
                _log.warning(
                    "a sub-agent was not stopped: %s", error.code, extra={"call": pending_work.ref.call_id}
                )
                return
        self._reports.report(finished)

    async def _result_of(
        self, pending_work: RunCall, state: CallState, found: Tool | None, watch: Watch
    ) -> ToolResult:
        if found is None:  # the agent has changed since the call was planned
            return _missing_tool_result(pending_work, state)
        if (why := self._refusal_of(state, found)) is not None:
            return ToolResult(pending_work.ref.call_id, why, Outcome.ERROR)
        context = self._context(pending_work, pending_work.run, watch)
        if is_plain(found):
            return await self._result_of_plain(found, state.call, context)
        return await run_call(found, state.call, context)

    async def _find(self, name: str) -> Tool | None:
        found = self._toolset.tools.get(name)
        # Planned by another node: this node has not listed the tools yet.
        if found is None and self._agent.sources:
            self._toolset = await read_toolset(self._agent)
            found = self._toolset.tools.get(name)
        return found

    async def _result_of_plain(self, found: Tool, call: ToolCall, context: CallContext) -> ToolResult:
        """Run a plain function. A cancellation sets its stop event; its result is the outcome even after that."""
        stopped = threading.Event()
        known = replace(context, stopped=stopped)
        work = self._world.spawn(run_call(found, call, known), name=f"tool {call.name}")
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            if self._reports.is_closing or work.cancelled():
                work.cancel()
                raise
        stopped.set()
        try:
            return await work
        except asyncio.CancelledError:
            work.cancel()
            raise

    async def _probe_call(self, pending_work: ProbeCall, session: Session) -> None:
        state = _state_of(pending_work, session)
        found = await self._find(state.call.name)
        if found is None:  # the agent has changed since the call was planned
            result, may_run = None, False
        else:
            result, may_run = await probe_call(found, state.call, self._context(pending_work, state.runs))
        self._reports.report(CallProbed(pending_work.ref, result, may_run))

    def _context(
        self, pending_work: RunCall | ProbeCall, run: int, watch: Watch | None = None
    ) -> CallContext:
        loop, here = asyncio.get_running_loop(), threading.get_ident()
        # A timer keeps the context in which it was set, also after it was stopped.
        reports = weakref.ref(self._reports)

        def progressed(text: str) -> None:
            if watch is not None:
                watch.note_progress("progress")
            if (session := reports()) is not None:
                session.journal_progress(CallProgress(pending_work.ref, run, text))

        def report_progress(text: str) -> None:
            if (
                threading.get_ident() == here
            ):  # in this thread, so that the last progress precedes the outcome
                progressed(text)
                return
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(progressed, text)

        ref = pending_work.ref
        session_id = self._reports.session_id
        # A tool that supports stopping has an event of its own.
        return CallContext(session_id, ref.turn, ref.response_no, ref.call_id, run, report_progress, _NEVER)


class _ResponseToken:
    """The provider's token for the current response; "" if the provider does not store it."""

    __slots__ = ("token",)

    def __init__(self, token: str) -> None:
        self.token = token


def _same(event: ModelEvent) -> ModelEvent:
    return event


def _of_application(
    request: ModelRequest, session: Session, application_request: ApplicationRequest
) -> ModelRequest:
    """Return a request with the instructions, tools and settings of the client application."""
    return replace(
        request,
        instructions=session.application.instructions,
        tools=session.application.tools,
        session=application_request.conversation,
        is_ephemeral=application_request.is_ephemeral,
        settings=application_request.settings,
        stalls=None,
        is_resent=True,
        model=application_request.model,
        is_private=application_request.is_private,
    )


def _plan_forwarded_call(call: ToolCall) -> CallPlan:
    """Return the plan of a call that a client application runs."""
    return CallPlan(call.id, digest_of(call.name, call.arguments), Site.CLIENT, has_effects=False)


def _without_cut_calls(response: Response, plans: tuple[CallPlan, ...]) -> tuple[CallPlan, ...]:
    """Plan calls that the length limit cut off as not run, also those cut before their arguments."""
    last = response.parts[-1] if response.parts else None
    if not isinstance(last, ToolCall) or (last.arguments.strip() and plans[-1].problem is None):
        return plans
    return (*plans[:-1], replace(plans[-1], problem=CUT_CONTENT))


def _missing_tool_result(pending_work: RunCall, state: CallState) -> ToolResult:
    """Return the result of a call whose tool is missing. An earlier run may have taken effect."""
    message = f"The tool {state.call.name!r} no longer exists, so the call was not run."
    if pending_work.run == 1 or not state.plan.has_effects:
        return ToolResult(pending_work.ref.call_id, message, Outcome.ERROR)
    again = f"{message} An earlier run of this call may or may not have taken effect."
    return ToolResult(pending_work.ref.call_id, again, Outcome.UNKNOWN)


def _unstarted_result(pending_work: RunCall) -> ToolResult:
    """Return the result of a run that was stopped before its tool was called."""
    if pending_work.run == 1:
        return ToolResult(pending_work.ref.call_id, NOT_STARTED_CONTENT, Outcome.CANCELLED)
    # The effects of an earlier run are unknown.
    return ToolResult(pending_work.ref.call_id, UNKNOWN_CONTENT, Outcome.UNKNOWN)


def _state_of(pending_work: RunCall | RunChild | ProbeCall, session: Session) -> CallState:
    assert isinstance(session.turn, RunningCalls)
    return next(each for each in session.turn.calls if each.call.id == pending_work.ref.call_id)
