"""How each obligation is performed: one function each, and each reports what came of it as a command."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from typing import Protocol, cast

from midstream.core.calls import STOPPED_CONTENT, CallPlan, CallState, Site, digest_of
from midstream.core.compaction import next_cut
from midstream.core.messages import Call, Outcome, Reply, Result, storable
from midstream.core.records import ClientTool
from midstream.core.replies import ModelEvent, ModelRequest, ReplyBuilder
from midstream.core.session import Session
from midstream.core.turn import (
    AskModel,
    AwaitCancelled,
    AwaitClient,
    AwaitingModel,
    CallExpired,
    CallFinished,
    CancelExpired,
    Command,
    ModelFailed,
    ModelReplied,
    ModelSaid,
    Obligation,
    RunCall,
    RunningCalls,
)
from midstream.errors import (
    ContextOverflowError,
    ModelEmptyError,
    ModelError,
    ModelStalledError,
    ModelUnavailableError,
)
from midstream.runtime.agent import Agent
from midstream.tools import CallContext, plan_call, run_call
from midstream.world import Fault, World

STALL_S = 120.0
"""Seconds of silence of a model before the attempt is given up (seed 004's idle budget)."""
STALL_STEP_S = 1.0
"""By so much the silence may be cut short: the timer is moved at most once in this time."""

_log = logging.getLogger(__name__)


class Reports(Protocol):
    """Where performers say what they did: the session's runner."""

    session_id: str

    async def say(self, command: ModelSaid) -> None:
        """Journal a model's words soon."""

    async def report(self, command: Command) -> None:
        """Journal an outcome and wait for it."""

    async def confirm(self) -> None:
        """Make sure that the session was not taken while this process was frozen; where it was, be cancelled."""

    @property
    def is_closing(self) -> bool:
        """Whether the process lets go of the session."""


class Performer:
    """Does what one session owes."""

    def __init__(self, agent: Agent, world: World, reports: Reports) -> None:
        self._agent = agent
        self._world = world
        self._reports = reports

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
            case AwaitCancelled():
                await self._until(obligation.deadline_at)
                await self._reports.report(CancelExpired(obligation.turn))

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
        own = self._agent.tools
        client_tools = {each.spec.name: each for each in session.turn.tools if each.spec.name not in own}
        request = ModelRequest(
            self._agent.instructions,
            session.shown,
            (*(each.spec for each in own.values()), *(each.spec for each in client_tools.values())),
            owed.attempt,
            f"{self._reports.session_id}/{owed.turn}/{owed.reply_no}",
        )
        try:
            reply = await self._listen(owed, request)
        except ModelError as error:
            await self._reports.report(self._failure(owed, error, session))
        else:
            plans = tuple(self._plan(call, client_tools) for call in reply.calls)
            replied = ModelReplied(owed.turn, owed.reply_no, owed.attempt, reply, plans)
            await self._reports.report(replied)

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

    def _plan(self, call: Call, client_tools: dict[str, ClientTool]) -> CallPlan:
        theirs = client_tools.get(call.name)
        if theirs is None:
            return plan_call(call, self._agent.tools)
        return CallPlan(
            call.id,
            digest_of(call.name, call.arguments),
            Site.CLIENT,
            theirs.has_effects,
            theirs.on_doubt,
            theirs.timeout_s,
        )

    # --- tools ------------------------------------------------------------------------------------------------

    async def _run_call(self, owed: RunCall, session: Session) -> None:
        assert isinstance(session.turn, RunningCalls)
        state = next(each for each in session.turn.calls if each.call.id == owed.call_id)
        self._world.reach(Fault.BEFORE_TOOL)
        await self._reports.confirm()
        try:
            result = await self._result_of(owed, state)
        except asyncio.CancelledError:
            # Cancelled by a user, the call ends here; let go by the process, it stays open for the next owner.
            if not self._reports.is_closing:
                stopped = Result(owed.call_id, STOPPED_CONTENT, Outcome.UNKNOWN)
                await self._reports.report(CallFinished(owed.turn, owed.reply_no, stopped))
            raise
        self._world.reach(Fault.AFTER_TOOL)
        await self._reports.report(CallFinished(owed.turn, owed.reply_no, result))

    async def _result_of(self, owed: RunCall, state: CallState) -> Result:
        found = self._agent.tools.get(state.call.name)
        if found is None:  # the agent changed between two owners: never a stuck turn
            return Result(owed.call_id, f"The tool {state.call.name!r} no longer exists.", Outcome.ERROR)
        if state.plan.digest != digest_of(state.call.name, state.call.arguments):
            return Result(owed.call_id, "The arguments do not match their digest.", Outcome.ERROR)
        context = CallContext(self._reports.session_id, owed.turn, owed.reply_no, owed.call_id, owed.run)
        return await run_call(found, state.call, context)
