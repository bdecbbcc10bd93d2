"""How each obligation is performed: one function each, and each reports what came of it as a command."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import partial
from typing import Protocol, assert_never, cast

from midstream.core.blobs import named, whole
from midstream.core.calls import (
    NOT_STARTED_CONTENT,
    STOPPED_CONTENT,
    CallPlan,
    CallState,
    OnDoubt,
    Site,
    digest_of,
)
from midstream.core.compaction import next_cut
from midstream.core.messages import Call, History, Outcome, Reply, Result, UserMessage, storable
from midstream.core.records import ClientTool
from midstream.core.replies import ModelEvent, ModelRequest, ReplyBuilder
from midstream.core.session import Session, ToolsFound
from midstream.core.turn import (
    AskModel,
    AwaitCancelled,
    AwaitClient,
    AwaitEnd,
    AwaitingModel,
    AwaitPerson,
    CallExpired,
    CallFinished,
    CallProbed,
    CallProgress,
    CancelExpired,
    ChildSpoke,
    Command,
    ModelFailed,
    ModelReplied,
    ModelSaid,
    Obligation,
    ProbeCall,
    QuestionExpired,
    RunCall,
    RunChild,
    RunningCalls,
    TurnExpired,
)
from midstream.errors import (
    ContextOverflowError,
    MidstreamError,
    ModelEmptyError,
    ModelError,
    ModelStalledError,
    ModelUnavailableError,
)
from midstream.runtime.agent import Agent, SubAgent
from midstream.runtime.children import Nursery, run_child, stop_child
from midstream.runtime.toolset import Toolset, read_toolset
from midstream.store.contract import Attempt
from midstream.tools import CallContext, Tool, call_within, is_plain, plan_call, probe_call, run_call
from midstream.world import Fault, World

HAND_IN = "[A limit was reached. Give your final answer now, from what you have; no tools are available.]"
"""What the model is told with the last request of a turn that reached a limit."""
STALL_S = 120.0
"""Seconds of silence of a model before the attempt is given up (seed 004's idle budget)."""
STALL_STEP_S = 1.0
"""By so much the silence may be cut short: the timer is moved at most once in this time."""

_log = logging.getLogger(__name__)


class Reports(Protocol):
    """Where performers say what they did: the session's runner."""

    session_id: str

    async def say(self, command: ModelSaid | ToolsFound) -> None:
        """Journal a model's words, or the tools it is offered, soon."""

    def tell(self, progress: CallProgress) -> None:
        """Journal how far a tool is."""

    async def show(self, command: ChildSpoke) -> None:
        """Journal what a child did."""

    async def report(self, command: Command) -> None:
        """Journal an outcome and wait for it."""

    async def report_within(self, owed: RunCall, run: Callable[[Attempt], CallFinished]) -> None:
        """Let a call run in the append of its outcome, and wait for it."""

    async def blob(self, digest: str) -> bytes | None:
        """Return a large result that a record of this session names."""

    @property
    def is_transactional(self) -> bool:
        """Whether `report_within` may be called: the store has transactions for tools."""

    @property
    def is_closing(self) -> bool:
        """Whether the process lets go of the session."""


class Performer:
    """Does what one session owes."""

    def __init__(self, agent: Agent, world: World, reports: Reports, nursery: Nursery) -> None:
        self._agent = agent
        self._world = world
        self._reports = reports
        self._nursery = nursery
        self._toolset = Toolset(agent.tools)
        """What the last model call of this process was offered."""

    async def perform(self, obligation: Obligation, session: Session) -> None:
        """Do one obligation of `session` to its end."""
        match obligation:
            case AskModel():
                await self._ask_model(obligation, session)
            case RunCall():
                await self._run_call(obligation, session)
            case AwaitClient():
                await self._until(obligation.deadline_at)
                expired = CallExpired(obligation.turn, obligation.reply_no, obligation.call_id)
                await self._reports.report(expired)
            case RunChild():
                await self._run_child(obligation, session)
            case ProbeCall():
                await self._probe_call(obligation, session)
            case AwaitPerson():
                await self._until(obligation.deadline_at)
                late = QuestionExpired(obligation.turn, obligation.reply_no, obligation.call_id)
                await self._reports.report(late)
            case AwaitCancelled():
                await self._until(obligation.deadline_at)
                await self._reports.report(CancelExpired(obligation.turn))
            case AwaitEnd():
                await self._until(obligation.deadline_at)
                await self._reports.report(TurnExpired(obligation.turn))
            case _:
                assert_never(obligation)

    def is_repeatable(self, obligation: Obligation) -> bool:
        """Whether cutting it loses nothing that matters: all but a tool that runs."""
        return not isinstance(obligation, RunCall)

    async def _until(self, at: float) -> None:
        while (left_s := at - self._world.now()) > 0:
            await self._world.sleep(left_s)

    # --- the model --------------------------------------------------------------------------------------------

    async def _ask_model(self, owed: AskModel, session: Session) -> None:
        await self._until(owed.not_before)
        assert isinstance(session.turn, AwaitingModel)
        own = await self._read_tools(owed)
        client_tools = {
            each.spec.name: each for each in session.turn.terms.tools if each.spec.name not in own
        }
        specs = (*(each.spec for each in own.values()), *(each.spec for each in client_tools.values()))
        is_last = session.turn.is_last
        try:
            shown = await self._whole(session.shown)
        except MidstreamError as error:
            unread = ModelUnavailableError(f"what the model is to read cannot be read: {error.message}")
            await self._reports.report(self._failure(owed, unread, session))
            return
        request = ModelRequest(
            self._agent.instructions,
            shown.then(UserMessage.of(HAND_IN)) if is_last else shown,
            () if is_last else specs,
            owed.attempt,
            f"{self._reports.session_id}/{owed.turn}/{owed.reply_no}",
        )
        try:
            reply = await self._listen(owed, request)
        except ModelError as error:
            await self._reports.report(self._failure(owed, error, session))
        else:
            plans = tuple(self._plan(call, own, client_tools) for call in reply.calls)
            replied = ModelReplied(owed.turn, owed.reply_no, owed.attempt, reply, plans)
            await self._reports.report(replied)

    async def _whole(self, shown: History) -> History:
        """Return a history with its large results, read anew for each model call: memory holds their beginnings."""
        read = {digest: await self._reports.blob(digest) for digest in named(shown)}
        return whole(shown, {digest: body for digest, body in read.items() if body is not None})

    async def _read_tools(self, owed: AskModel) -> Mapping[str, Tool]:
        """Return the tools there are now, and see to it that readers hear of a change."""
        if self._agent.sources:
            self._toolset = await read_toolset(self._agent)
            found, unreachable = self._toolset.found, self._toolset.unreachable
            await self._reports.say(ToolsFound(owed.turn, owed.reply_no, owed.attempt, found, unreachable))
        return self._toolset.tools

    async def _listen(self, owed: AskModel, request: ModelRequest) -> Reply:
        """Journal the model's words as they come and return the whole reply."""
        builder = ReplyBuilder(owed.turn, owed.reply_no, owed.attempt)
        name = self._agent.model.name
        clock = asyncio.get_running_loop().time
        events = cast("AsyncGenerator[ModelEvent]", self._agent.model.stream(request))
        try:
            async with asyncio.timeout(STALL_S) as stall, contextlib.aclosing(events):
                armed_at = clock()
                async for event in events:
                    if deltas := builder.add(event):
                        await self._reports.say(
                            ModelSaid(owed.turn, owed.reply_no, owed.attempt, tuple(deltas))
                        )
                    if clock() - armed_at > STALL_STEP_S:  # a timer per token would cost more than the token
                        armed_at = clock()
                        stall.reschedule(armed_at + STALL_S)
        except ModelError:
            raise
        except TimeoutError as error:
            if not stall.expired():
                raise ModelUnavailableError(f"{name} gave up waiting for its answer") from error
            raise ModelStalledError(f"{name} said nothing for {STALL_S:g} s") from error
        except Exception as error:
            _log.exception("the model raised an untyped error", extra={"session": self._reports.session_id})
            raise ModelError(f"{name} failed with {type(error).__name__}: {error}") from error
        if not builder.is_finished:
            raise ModelUnavailableError(f"{name} stopped in the middle of its reply")
        reply = builder.reply()
        if reply is None:
            raise ModelEmptyError(f"{name} ended its reply without a word or a call")
        return reply

    def _failure(self, owed: AskModel, error: ModelError, session: Session) -> ModelFailed:
        is_too_long = isinstance(error, ContextOverflowError)
        return ModelFailed(
            owed.turn,
            owed.reply_no,
            owed.attempt,
            error.code,
            storable(error.message),
            is_retriable=error.retry != "never",
            retry_after_s=error.retry_after_s,
            chance=self._world.chance(),
            cut=next_cut(session.history, session.cut) if is_too_long else None,
        )

    def _plan(self, call: Call, own: Mapping[str, Tool], client_tools: Mapping[str, ClientTool]) -> CallPlan:
        theirs = client_tools.get(call.name)
        if theirs is None:
            return plan_call(call, own, self._agent.approval)
        return CallPlan(
            call.id,
            digest_of(call.name, call.arguments),
            Site.CLIENT,
            theirs.has_effects,
            theirs.on_doubt,
            theirs.timeout_s,
            needs_approval=theirs.needs_approval,
        )

    # --- tools ------------------------------------------------------------------------------------------------

    async def _run_call(self, owed: RunCall, session: Session) -> None:
        state = _state_of(owed, session)
        self._world.reach(Fault.BEFORE_TOOL)
        found = await self._find(state.call.name)
        if found is not None and found.on_doubt is OnDoubt.IN_TRANSACTION:
            await self._run_within(owed, state, found)
            return
        try:
            result = await self._result_of(owed, state, found)
        except asyncio.CancelledError:
            # Cancelled by a user, the call ends here; let go by the process, it stays open for the next owner.
            if not self._reports.is_closing:
                stopped = Result(owed.call_id, STOPPED_CONTENT, Outcome.UNKNOWN)
                await self._reports.report(CallFinished(owed.turn, owed.reply_no, stopped))
            raise
        self._world.reach(Fault.AFTER_TOOL)
        await self._reports.report(CallFinished(owed.turn, owed.reply_no, result))

    async def _run_within(self, owed: RunCall, state: CallState, found: Tool) -> None:
        """Run a call in the append of its outcome: before and after that it did not happen, or it is on record."""
        context = self._context(owed, owed.run)
        surroundings = contextvars.copy_context()

        def run(attempt: Attempt) -> CallFinished:
            within = partial(attempt, within_s=found.timeout_s)
            result = surroundings.run(call_within, found, state.call, context, within)
            self._world.reach(Fault.AFTER_TOOL)
            return CallFinished(owed.turn, owed.reply_no, result)

        try:
            if (why := self._refused(state, found)) is not None:
                refused = Result(owed.call_id, why, Outcome.ERROR)
                await self._reports.report(CallFinished(owed.turn, owed.reply_no, refused))
            else:
                await self._reports.report_within(owed, run)
        except asyncio.CancelledError:
            if not self._reports.is_closing:  # it has not run, and now it will not
                stopped = Result(owed.call_id, NOT_STARTED_CONTENT, Outcome.CANCELLED)
                await self._reports.report(CallFinished(owed.turn, owed.reply_no, stopped))
            raise

    def _refused(self, state: CallState, found: Tool) -> str | None:
        """Say why a call is not run whose tool is there."""
        if state.plan.digest != digest_of(state.call.name, state.call.arguments):
            return "The arguments do not match their digest."
        is_within = found.on_doubt is OnDoubt.IN_TRANSACTION
        if is_within and not self._reports.is_transactional:
            return f"{found.name!r} needs a store in whose transactions tools can write; it was not run."
        if state.plan.on_doubt is OnDoubt.IN_TRANSACTION and not is_within:
            # Planned by another version of the agent: without the transaction a crash would run it twice.
            return f"{found.name!r} is another tool by now; it was not run."
        return None

    async def _run_child(self, owed: RunChild, session: Session) -> None:
        state = _state_of(owed, session)
        found = self._agent.tools.get(state.call.name)
        if not isinstance(found, SubAgent):  # the agent changed between two owners
            gone = Result(owed.call_id, f"The tool {state.call.name!r} no longer exists.", Outcome.ERROR)
            await self._reports.report(CallFinished(owed.turn, owed.reply_no, gone))
            return
        try:
            result = await run_child(self._nursery, self._world, self._reports, owed, session, state, found)
        except asyncio.CancelledError:
            if self._reports.is_closing:
                raise
            result = await stop_child(self._nursery, self._reports, owed, session, state, found)
        await self._reports.report(CallFinished(owed.turn, owed.reply_no, result))

    async def _result_of(self, owed: RunCall, state: CallState, found: Tool | None) -> Result:
        if found is None:  # the agent changed between two owners: never a stuck turn
            return _gone(owed, state)
        if (why := self._refused(state, found)) is not None:
            return Result(owed.call_id, why, Outcome.ERROR)
        context = self._context(owed, owed.run)
        if is_plain(found):
            return await self._result_of_plain(found, state.call, context)
        return await run_call(found, state.call, context)

    async def _find(self, name: str) -> Tool | None:
        found = self._toolset.tools.get(name)
        if found is None and self._agent.sources:  # planned by another owner: this one has not asked yet
            self._toolset = await read_toolset(self._agent)
            found = self._toolset.tools.get(name)
        return found

    async def _result_of_plain(self, found: Tool, call: Call, context: CallContext) -> Result:
        """Run a plain function. On a cancel it is asked to stop; what it then returns is its outcome, late or not."""
        work = self._world.spawn(run_call(found, call, context), name=f"tool {call.name}")
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            if self._reports.is_closing or work.cancelled():
                work.cancel()
                raise
        context.stopped.set()
        try:
            return await work
        except asyncio.CancelledError:
            work.cancel()
            raise

    async def _probe_call(self, owed: ProbeCall, session: Session) -> None:
        state = _state_of(owed, session)
        found = await self._find(state.call.name)
        if found is None:  # the agent changed between two owners
            result, may_run = None, False
        else:
            result, may_run = await probe_call(found, state.call, self._context(owed, state.runs))
        await self._reports.report(CallProbed(owed.turn, owed.reply_no, owed.call_id, result, may_run))

    def _context(self, owed: RunCall | ProbeCall, run: int) -> CallContext:
        loop, here = asyncio.get_running_loop(), threading.get_ident()

        def tell(text: str) -> None:
            progress = CallProgress(owed.turn, owed.reply_no, owed.call_id, run, text)
            if threading.get_ident() == here:  # at once, so that the last words come before the outcome
                self._reports.tell(progress)
                return
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody listens any more
                loop.call_soon_threadsafe(self._reports.tell, progress)

        return CallContext(self._reports.session_id, owed.turn, owed.reply_no, owed.call_id, run, tell)


def _gone(owed: RunCall, state: CallState) -> Result:
    """Return the result of a call whose tool is not there; an earlier run of it may have done its work."""
    message = f"The tool {state.call.name!r} is not there any more, so it was not run."
    if owed.run == 1 or not state.plan.has_effects:
        return Result(owed.call_id, message, Outcome.ERROR)
    again = f"{message} An earlier run of this call may or may not have taken effect."
    return Result(owed.call_id, again, Outcome.UNKNOWN)


def _state_of(owed: RunCall | RunChild | ProbeCall, session: Session) -> CallState:
    assert isinstance(session.turn, RunningCalls)
    return next(each for each in session.turn.calls if each.call.id == owed.call_id)
