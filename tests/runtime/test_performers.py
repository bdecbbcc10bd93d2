from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from midstream.core.calls import CallPlan, CallState, OnDoubt, digest_of
from midstream.core.messages import Call, Exchange, History, Outcome, Reply, Result, Text, UserMessage
from midstream.core.replies import CallRequested, Finished, ModelEvent, ModelRequest, TextDelta
from midstream.core.session import Session, ToolsFound
from midstream.core.turn import (
    AskModel,
    AwaitCancelled,
    AwaitClient,
    AwaitingModel,
    CallExpired,
    CallFinished,
    CallProgress,
    CancelExpired,
    ChildSpoke,
    Command,
    ModelFailed,
    ModelReplied,
    ModelSaid,
    Obligation,
    RunCall,
    RunningCalls,
)
from midstream.errors import ContextOverflowError
from midstream.runtime import performers
from midstream.runtime.agent import Agent
from midstream.runtime.host import Host
from midstream.runtime.performers import Performer
from midstream.store.contract import Attempt
from midstream.store.memory import MemoryStore
from midstream.testing import ScriptedModel, Stall, text
from midstream.testing.models import Step
from midstream.tools import tool
from midstream.world import World
from tests.spec import spec


class Noted:
    """A runner's mailbox that keeps what it is given."""

    session_id = "s"
    is_closing = False
    is_transactional = False

    def __init__(self) -> None:
        self.said: list[ModelSaid | ToolsFound] = []
        self.reports: list[Command] = []
        self.blobs: dict[str, bytes] = {}

    async def say(self, command: ModelSaid | ToolsFound) -> None:
        self.said.append(command)

    def tell(self, progress: CallProgress) -> None:
        self.reports.append(progress)

    async def show(self, command: ChildSpoke) -> None:
        self.reports.append(command)

    async def report(self, command: Command) -> None:
        self.reports.append(command)

    async def report_within(self, owed: RunCall, run: Callable[[Attempt], CallFinished]) -> None:
        raise AssertionError(owed)

    async def blob(self, digest: str) -> bytes | None:
        return self.blobs.get(digest)


NOBODY = Host(Agent(ScriptedModel([])), MemoryStore())
"""A host without children."""


ASKED = AskModel(turn=3, reply_no=1, attempt=1)


def _session() -> Session:
    history = History((UserMessage.of("hi"),))
    return Session(turn=AwaitingModel(3, 1, attempt=1), turns=3, history=history)


async def _perform(agent: Agent, obligation: Obligation) -> Noted:
    noted = Noted()
    async with asyncio.timeout(5):
        await Performer(agent, World(), noted, NOBODY).perform(obligation, _session())
    return noted


async def test_a_model_is_asked_with_history_instructions_and_a_key_stable_over_attempts() -> None:
    model = ScriptedModel([text("yes")])
    noted = await _perform(Agent(model, instructions="be brief"), ASKED)
    assert model.requests == [ModelRequest("be brief", _session().history, (), 1, "s/3/1")]
    words = (delta.text for said in noted.said if isinstance(said, ModelSaid) for delta in said.deltas)
    assert "".join(words) == "yes"
    (replied,) = noted.reports
    assert isinstance(replied, ModelReplied)
    assert replied.reply.text == "yes"


async def test_calls_with_empty_or_repeated_ids_get_distinct_ones() -> None:
    steps: list[Step] = [
        CallRequested("", "a", "{}"),
        CallRequested("x", "a", "{}"),
        CallRequested("x", "a", "{}"),
        Finished(),
    ]
    noted = await _perform(Agent(ScriptedModel([steps])), ASKED)
    (replied,) = noted.reports
    assert isinstance(replied, ModelReplied)
    reply: Reply = replied.reply
    assert [(call.id, call.provider_id) for call in reply.calls] == [
        ("call-1-0", ""),
        ("x", None),
        ("call-1-2", "x"),
    ]


@pytest.mark.parametrize(
    ("steps", "code"),
    [
        ([TextDelta("no end")], "model_unavailable"),
        ([Finished()], "model_empty"),
        ([TextDelta("a"), Stall()], "model_stalled"),
    ],
)
async def test_silence_emptiness_and_a_missing_end_are_failures_to_try_again(
    steps: list[Step], code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(performers, "STALL_S", 0.05)
    noted = await _perform(Agent(ScriptedModel([steps])), ASKED)
    (failed,) = noted.reports
    assert isinstance(failed, ModelFailed)
    assert (failed.code, failed.is_retriable) == (code, True)


class GivesUp(ScriptedModel):
    """A model whose own patience ends."""

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        yield TextDelta("let me")
        raise TimeoutError


async def test_a_models_own_timeout_is_not_told_as_our_stall() -> None:
    noted = await _perform(Agent(GivesUp([])), ASKED)
    (failed,) = noted.reports
    assert isinstance(failed, ModelFailed)
    assert (failed.code, failed.is_retriable) == ("model_unavailable", True)


async def test_deadlines_report_that_they_have_passed() -> None:
    agent = Agent(ScriptedModel([]))
    expired = await _perform(agent, AwaitClient(3, 1, "c", deadline_at=1.0))
    assert expired.reports == [CallExpired(3, 1, "c")]
    cancelled = await _perform(agent, AwaitCancelled(3, deadline_at=1.0))
    assert cancelled.reports == [CancelExpired(3)]


def test_only_a_running_tool_is_worth_waiting_for() -> None:
    performer = Performer(Agent(ScriptedModel([])), World(), Noted(), NOBODY)
    assert performer.is_repeatable(ASKED)
    assert not performer.is_repeatable(RunCall(3, 1, "c", 1))


@spec("TURN-25")
async def test_a_conversation_that_is_too_long_is_reported_with_what_to_leave_out() -> None:
    model = ScriptedModel(lambda _: [ContextOverflowError("too long")])
    (failed,) = (await _perform(Agent(model), ASKED)).reports
    assert isinstance(failed, ModelFailed)
    assert (failed.code, failed.is_retriable, failed.cut) == ("context_overflow", False, None)


@spec("TURN-27")
async def test_the_model_is_shown_what_the_cut_leaves() -> None:
    model = ScriptedModel([text("yes")])
    history = History((UserMessage.of("one"), Exchange(Reply((Text("x"),))), UserMessage.of("two")))
    session = Session(turn=AwaitingModel(3, 1, attempt=1), turns=3, history=history, cut=2)
    await Performer(Agent(model), World(), Noted(), NOBODY).perform(ASKED, session)
    assert model.requests[0].history == session.shown != history


@spec("TURN-53")
@pytest.mark.parametrize(
    ("run", "has_effects", "outcome"),
    [(1, True, Outcome.ERROR), (2, False, Outcome.ERROR), (2, True, Outcome.UNKNOWN)],
)
async def test_a_call_whose_tool_is_gone_ends_and_an_earlier_run_of_it_is_not_forgotten(
    run: int, *, has_effects: bool, outcome: Outcome
) -> None:
    plan = CallPlan("c1", digest_of("put", "{}"), has_effects=has_effects)
    call = Call("c1", "put", "{}")
    running = RunningCalls(3, 1, Reply((call,)), (CallState(call, plan, runs=run, epoch=1),))
    noted = Noted()
    performer = Performer(Agent(ScriptedModel([])), World(), noted, NOBODY)
    await performer.perform(RunCall(3, 1, "c1", run), Session(turn=running))
    (finished,) = noted.reports
    assert isinstance(finished, CallFinished)
    assert isinstance(finished.result, Result)
    assert finished.result.outcome is outcome
    assert "may or may not" in finished.result.content or outcome is Outcome.ERROR


@spec("TURN-86")
async def test_a_call_whose_arguments_are_not_those_of_its_digest_is_not_run() -> None:
    ran: list[str] = []

    @tool
    async def put(what: str) -> str:
        ran.append(what)
        return what

    call = Call("c1", "put", '{"what":"b"}')
    plan = CallPlan("c1", digest_of("put", '{"what":"a"}'))
    running = RunningCalls(3, 1, Reply((call,)), (CallState(call, plan, runs=1, epoch=1),))
    noted = Noted()
    performer = Performer(Agent(ScriptedModel([]), tools=[put]), World(), noted, NOBODY)
    await performer.perform(RunCall(3, 1, "c1", 1), Session(turn=running))
    assert noted.reports == [
        CallFinished(3, 1, Result("c1", "The arguments do not match their digest.", Outcome.ERROR))
    ]
    assert ran == []


async def test_a_tool_of_a_source_that_wants_a_transaction_the_store_has_not_is_not_run() -> None:
    @tool(on_doubt="in_transaction")
    def put() -> str:
        raise AssertionError

    call, plan = Call("c1", "put"), CallPlan("c1", digest_of("put", "{}"), on_doubt=OnDoubt.IN_TRANSACTION)
    running = RunningCalls(3, 1, Reply((call,)), (CallState(call, plan, runs=1, epoch=1),))
    noted = Noted()
    performer = Performer(Agent(ScriptedModel([]), tools=[put]), World(), noted, NOBODY)
    await performer.perform(RunCall(3, 1, "c1", 1), Session(turn=running))
    (finished,) = noted.reports
    assert isinstance(finished, CallFinished)
    assert "needs a store" in finished.result.content
