from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
from msgspec.structs import replace

from midstream.engine.agent import Agent
from midstream.engine.executors import CUT_CONTENT, Executor
from midstream.engine.host import Host
from midstream.engine.timers import Work
from midstream.environment import World
from midstream.errors import ContextOverflowError, ModelCutError
from midstream.history.messages import (
    Finish,
    History,
    Outcome,
    Response,
    Step,
    Text,
    ToolCall,
    ToolResult,
    ToolSpec,
    UpstreamCall,
    UserMessage,
)
from midstream.models.prompt_prefix import head_of
from midstream.models.responses import (
    Finished,
    KeepAlive,
    ModelEvent,
    ModelRequest,
    Resumable,
    ReuseReported,
    TextDelta,
    ToolCallRequested,
    UpstreamCallEnded,
    UpstreamCallStarted,
    Working,
)
from midstream.session.call_references import AttemptRef, CallRef
from midstream.session.calls import CallPlan, CallState, OnDoubt, Site, digest_of
from midstream.session.records import ClientTool, Delta, ReuseDecision, TurnEnded, TurnStatus
from midstream.session.session import Session, ToolsFound
from midstream.session.turn.commands import (
    CallFinished,
    CallProgress,
    ChildStreamed,
    Command,
    ModelFailed,
    ModelResponded,
    ModelResumable,
    ModelReuseDecided,
    ModelStreamed,
    PermissionRequested,
    PermissionWithdrawn,
    Stalled,
    StallFinished,
    UseAnswer,
)
from midstream.session.turn.pending import CallModel, RunCall
from midstream.session.turn.states import AwaitingModel, RunningCalls, Terms
from midstream.store.contract import Attempt
from midstream.store.memory import MemoryStore
from midstream.testing import ScriptedModel, Stall, calls, run_turn, text
from midstream.testing.fake_worlds import FakeWorld
from midstream.testing.scripted_model import Pause, ScriptedStep
from midstream.timing import StallBudgets, StalledOn
from midstream.tools.function_tools import Tool, current_call, tool
from tests.spec import spec


class RecordingMailbox:
    """A runner's mailbox that stores its commands."""

    session_id = "s"
    is_closing = False
    is_transactional = False

    def __init__(self) -> None:
        self.commands: list[ModelStreamed | ModelResumable | ModelReuseDecided | ToolsFound] = []
        self.reports: list[Command] = []
        self.blobs: dict[str, bytes] = {}

    async def journal_output(
        self, command: ModelStreamed | ModelResumable | ModelReuseDecided | ToolsFound
    ) -> None:
        self.commands.append(command)

    def journal_progress(self, progress: CallProgress | Stalled | StallFinished) -> None:
        self.reports.append(progress)

    async def show(self, command: ChildStreamed | PermissionRequested) -> None:
        self.reports.append(command)

    def report(self, command: Command) -> None:
        self.reports.append(command)

    async def append_first(self, command: PermissionWithdrawn | UseAnswer) -> None:
        self.reports.append(command)

    def note(self, command: PermissionWithdrawn) -> None:
        self.reports.append(command)

    async def confirm(self) -> None:
        """Confirm the lease."""

    async def report_within(self, pending_work: RunCall, run: Callable[[Attempt], CallFinished]) -> None:
        raise AssertionError(pending_work)

    async def blob(self, digest: str) -> bytes | None:
        return self.blobs.get(digest)


NO_HOST = Host(Agent(ScriptedModel([])), MemoryStore())
"""A host without children."""


ASKED = CallModel(AttemptRef(3, 1, 1))


def _session() -> Session:
    history = History((UserMessage.of("hi"),))
    return Session(turn=AwaitingModel(3, 1, attempt=1), turns=3, history=history)


async def _live(agent: Agent, session: Session | None = None) -> tuple[RecordingMailbox, FakeWorld]:
    """Call the model in a world whose clock goes as fast as it can."""
    noted, world = RecordingMailbox(), FakeWorld()
    performing = Executor(agent, world, noted, NO_HOST).execute(ASKED, session or _session())
    await world.live_through(performing)
    return noted, world


async def _execute(agent: Agent, work_item: Work) -> RecordingMailbox:
    noted = RecordingMailbox()
    async with asyncio.timeout(60):
        await Executor(agent, World(), noted, NO_HOST).execute(work_item, _session())
    return noted


async def test_a_model_receives_history_instructions_and_a_key_that_is_stable_over_attempts() -> None:
    model = ScriptedModel([text("yes")])
    budgets = StallBudgets(first_token_max_s=900.0)
    noted = await _execute(Agent(model, instructions="be brief", stalls=budgets), ASKED)
    (asked,) = model.requests
    assert asked.person is not None
    reported = replace(asked, person=None)
    assert reported == ModelRequest(
        "be brief", _session().history, (), 1, "s/3/1", session="s", stalls=budgets
    )
    words = (
        delta.text
        for commands in noted.commands
        if isinstance(commands, ModelStreamed)
        for delta in commands.deltas
    )
    assert "".join(words) == "yes"
    (responded,) = noted.reports
    assert isinstance(responded, ModelResponded)
    assert responded.response.text == "yes"


async def test_calls_with_empty_or_repeated_ids_get_distinct_ones() -> None:
    steps: list[ScriptedStep] = [
        ToolCallRequested("", "a", "{}"),
        ToolCallRequested("x", "a", "{}"),
        ToolCallRequested("x", "a", "{}"),
        Finished(),
    ]
    noted = await _execute(Agent(ScriptedModel([steps])), ASKED)
    (responded,) = noted.reports
    assert isinstance(responded, ModelResponded)
    response: Response = responded.response
    assert [(call.id, call.provider_id) for call in response.calls] == [
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
        ([Stall()], "model_stalled"),
        ([KeepAlive(), TextDelta(""), Stall()], "model_stalled"),
    ],
)
@spec("TURN-64")
async def test_silence_emptiness_and_a_missing_end_are_retriable_failures(
    steps: list[ScriptedStep], code: str
) -> None:
    noted, world = await _live(Agent(ScriptedModel([steps])))
    failed = noted.reports[-1]
    assert isinstance(failed, ModelFailed)
    assert (failed.code, failed.is_retriable) == (code, True)
    assert world.now() - FakeWorld().now() <= StallBudgets().first_token_max_s


class GivesUp(ScriptedModel):
    """A model whose own timeout expires."""

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        yield TextDelta("let me")
        raise TimeoutError


async def test_a_models_own_timeout_is_not_reported_as_our_stall() -> None:
    noted = await _execute(Agent(GivesUp([])), ASKED)
    (failed,) = noted.reports
    assert isinstance(failed, ModelFailed)
    assert (failed.code, failed.is_retriable) == ("model_unavailable", True)


def test_only_a_running_tool_is_waited_for() -> None:
    executor = Executor(Agent(ScriptedModel([])), World(), RecordingMailbox(), NO_HOST)
    assert executor.is_repeatable(ASKED)
    assert not executor.is_repeatable(RunCall(CallRef(3, 1, "c"), 1))


@spec("TURN-25")
async def test_a_conversation_that_is_too_long_is_reported_with_the_entries_to_omit() -> None:
    model = ScriptedModel(lambda _: [ContextOverflowError("too long")])
    (failed,) = (await _execute(Agent(model), ASKED)).reports
    assert isinstance(failed, ModelFailed)
    assert (failed.code, failed.is_retriable, failed.cut) == ("context_overflow", False, None)


@spec("TURN-27")
async def test_the_model_receives_the_history_after_the_cut() -> None:
    model = ScriptedModel([text("yes")])
    history = History((UserMessage.of("one"), Step(Response((Text("x"),))), UserMessage.of("two")))
    session = Session(turn=AwaitingModel(3, 1, attempt=1), turns=3, history=history, cut=2)
    await Executor(Agent(model), World(), RecordingMailbox(), NO_HOST).execute(ASKED, session)
    assert model.requests[0].history == session.model_history != history


@spec("TURN-43")
@pytest.mark.parametrize(
    ("run", "has_effects", "outcome"),
    [(1, True, Outcome.ERROR), (2, False, Outcome.ERROR), (2, True, Outcome.UNKNOWN)],
)
async def test_a_call_with_a_missing_tool_ends_as_unknown_only_if_an_earlier_run_had_effects(
    run: int, *, has_effects: bool, outcome: Outcome
) -> None:
    plan = CallPlan("c1", digest_of("put", "{}"), has_effects=has_effects)
    call = ToolCall("c1", "put", "{}")
    running = RunningCalls(3, 1, Response((call,)), (CallState(call, plan, runs=run, epoch=1),))
    noted = RecordingMailbox()
    executor = Executor(Agent(ScriptedModel([])), World(), noted, NO_HOST)
    await executor.execute(RunCall(CallRef(3, 1, "c1"), run), Session(turn=running))
    (finished,) = noted.reports
    assert isinstance(finished, CallFinished)
    assert isinstance(finished.result, ToolResult)
    assert finished.result.outcome is outcome
    assert "may or may not" in finished.result.content or outcome is Outcome.ERROR


@spec("TURN-64")
async def test_long_arguments_are_not_silence() -> None:
    world = FakeWorld()
    writing = [step for _ in range(20) for step in (Working("put"), Pause(100.0))]
    model = ScriptedModel([[*writing, ToolCallRequested("a", "put", "{}"), Finished()]], world=world)
    noted = RecordingMailbox()
    await world.live_through(Executor(Agent(model), world, noted, NO_HOST).execute(ASKED, _session()))
    assert isinstance(noted.reports[-1], ModelResponded)
    stalls = [each for each in noted.reports if isinstance(each, Stalled)]
    assert stalls[0] == Stalled(3, 1, StalledOn.BETWEEN_TOKENS, 15.0)


@spec("TURN-64")
async def test_a_tool_of_the_upstream_may_be_silent_for_longer() -> None:
    world = FakeWorld()
    start, end = UpstreamCallStarted("u", "build", "{}"), UpstreamCallEnded("u", "built")
    model = ScriptedModel([[start, Pause(599.0), end, *text("Done.")]], world=world)
    noted = RecordingMailbox()
    await world.live_through(Executor(Agent(model), world, noted, NO_HOST).execute(ASKED, _session()))

    ran = UpstreamCall("u", "build", "{}", "built", Outcome.OK)
    assert noted.reports == [
        Stalled(3, 1, StalledOn.TOOL, 60.0),
        StallFinished(3, 1, StalledOn.TOOL, 599.0),
        ModelResponded(AttemptRef(3, 1, 1), Response((ran, Text("Done."))), prompt=head_of("", ())),
    ]


@spec("TURN-64")
async def test_a_tool_of_the_upstream_that_never_ends_is_cut() -> None:
    noted, _ = await _live(Agent(ScriptedModel([[UpstreamCallStarted("u", "build", "{}"), Stall()]])))

    failed = noted.reports[-1]
    assert isinstance(failed, ModelFailed)
    assert failed.message == "scripted sent nothing for 600 s"


@spec("TURN-65")
async def test_a_silent_tool_is_reported_and_its_progress_ends_the_silence() -> None:
    world = FakeWorld()

    async def work() -> str:
        await world.sleep(61.0)
        current_call().tell("half")
        await asyncio.sleep(0)
        await world.sleep(30.0)
        return "done"

    plan = CallPlan("c1", digest_of("work", "{}"))
    call = ToolCall("c1", "work", "{}")
    running = RunningCalls(3, 1, Response((call,)), (CallState(call, plan, runs=1, epoch=1),))
    noted = RecordingMailbox()
    executor = Executor(Agent(ScriptedModel([]), tools=[work]), world, noted, NO_HOST)
    await world.live_through(executor.execute(RunCall(CallRef(3, 1, "c1"), 1), Session(turn=running)))
    assert noted.reports == [
        Stalled(3, 1, StalledOn.TOOL, 60.0, "c1"),
        StallFinished(3, 1, StalledOn.TOOL, 61.0, "c1"),
        CallProgress(CallRef(3, 1, "c1"), 1, "half"),
        CallFinished(3, 1, ToolResult("c1", "done")),
    ]


# --- truncated responses ----------------------------------------------------------------------------------------


@spec("TURN-60")
@pytest.mark.parametrize("arguments", ['{"path": "/tm', ""], ids=["in the middle", "before they began"])
async def test_a_call_truncated_by_the_length_limit_is_not_run_and_the_model_is_informed(
    arguments: str,
) -> None:
    def clear(path: str = "/") -> str:
        raise AssertionError(path)

    steps: list[ScriptedStep] = [
        ToolCallRequested("a", "clear", '{"path": "/x"}'),
        ToolCallRequested("b", "clear", arguments),
        Finished(Finish.LENGTH),
    ]
    noted, _ = await _live(Agent(ScriptedModel([steps]), tools=[clear]))
    (responded,) = noted.reports
    assert isinstance(responded, ModelResponded)
    assert [plan.problem for plan in responded.plans] == [None, CUT_CONTENT]


@spec("TURN-60")
async def test_a_response_truncated_by_the_length_limit_is_kept() -> None:
    steps: list[ScriptedStep] = [TextDelta("Once upon"), Finished(Finish.LENGTH)]
    noted, _ = await _live(Agent(ScriptedModel([steps])))
    (responded,) = noted.reports
    assert isinstance(responded, ModelResponded)
    assert responded.response == Response((Text("Once upon"),), Finish.LENGTH)


# --- responses stored by their provider -------------------------------------------------------------------------


class StoringModel(ScriptedModel):
    """A model whose provider stores its responses."""

    def __init__(self, steps: list[ScriptedStep]) -> None:
        super().__init__([steps])
        self.stopped: list[str] = []

    async def stop(self, token: str) -> None:
        self.stopped.append(token)


def _resumed() -> Session:
    commands = ((), Delta(3, 1, 1, 0, "text", "Half a "))
    history = History((UserMessage.of("hi"),))
    turn = AwaitingModel(3, 1, attempt=1, token="resp_1", continued=1, deltas=commands)
    return Session(turn=turn, turns=3, history=history)


async def _continue(*steps: ScriptedStep) -> tuple[RecordingMailbox, StoringModel]:
    model, noted, world = StoringModel([*steps]), RecordingMailbox(), FakeWorld()
    pending_work = CallModel(AttemptRef(3, 1, 1), continued=1)
    await world.live_through(Executor(Agent(model), world, noted, NO_HOST).execute(pending_work, _resumed()))
    return noted, model


@spec("TURN-61")
async def test_a_resumed_response_is_shown_only_from_its_new_part() -> None:
    noted, model = await _continue(Resumable("resp_1"), *text("Half a word"))
    assert model.requests[0].resume == "resp_1"
    deltas = [
        each for commands in noted.commands if isinstance(commands, ModelStreamed) for each in commands.deltas
    ]
    assert deltas == [Delta(3, 1, 1, 0, "text", "word")] or "".join(each.text for each in deltas) == "word"
    (responded,) = noted.reports
    assert isinstance(responded, ModelResponded)
    assert (responded.ref.attempt, responded.response.text) == (1, "Half a word")


@spec("TURN-62")
@pytest.mark.parametrize("words", ["Another word", "Half", "half a word"])
async def test_a_different_text_is_not_a_continuation(words: str) -> None:
    noted, _ = await _continue(*text(words))
    (failed,) = noted.reports
    assert isinstance(failed, ModelFailed)
    assert (failed.code, failed.is_retriable, failed.is_cut) == ("model_forgot", True, False)


@spec("TURN-61")
@pytest.mark.parametrize("end", [ModelCutError("cut"), Stall()], ids=["cut", "silent"])
async def test_an_interrupted_response_may_be_resumed(end: ScriptedStep) -> None:
    noted, _ = await _live(Agent(StoringModel([Resumable("resp_1"), TextDelta("Half"), end])))
    assert ModelResumable(AttemptRef(3, 1, 1), "resp_1") in noted.commands
    failed = noted.reports[-1]
    assert isinstance(failed, ModelFailed)
    assert failed.is_cut


class ReleasingMailbox(RecordingMailbox):
    """The mailbox of a process that gives up its session."""

    is_closing = True


@spec("TURN-63")
async def test_a_response_is_stopped_at_its_provider_even_if_its_session_ends_meanwhile() -> None:
    asked, may_answer = asyncio.Event(), asyncio.Event()

    class SlowToStop(StoringModel):
        async def stop(self, token: str) -> None:
            asked.set()
            await may_answer.wait()
            await super().stop(token)

    model = SlowToStop([Resumable("resp_1"), TextDelta("Half"), Stall()])
    world = FakeWorld()
    task = asyncio.create_task(
        Executor(Agent(model), world, RecordingMailbox(), NO_HOST).execute(ASKED, _session())
    )
    await world.settle()
    task.cancel()
    async with asyncio.timeout(60):
        await asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 60)
    may_answer.set()
    await world.settle()
    assert model.stopped == ["resp_1"]


@spec("TURN-63")
@pytest.mark.parametrize(("noted", "stopped"), [(RecordingMailbox(), ["resp_1"]), (ReleasingMailbox(), [])])
async def test_a_cancelled_response_is_stopped_at_its_provider_and_a_released_one_is_left(
    noted: RecordingMailbox, stopped: list[str]
) -> None:
    model = StoringModel([Resumable("resp_1"), TextDelta("Half"), Stall()])
    world = FakeWorld()
    task = asyncio.create_task(Executor(Agent(model), world, noted, NO_HOST).execute(ASKED, _session()))
    await world.settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 60)
    assert model.stopped == stopped


@spec("TURN-73")
async def test_a_call_whose_arguments_do_not_match_its_digest_is_not_run() -> None:
    ran: list[str] = []

    @tool
    async def put(what: str) -> str:
        ran.append(what)
        return what

    call = ToolCall("c1", "put", '{"what":"b"}')
    plan = CallPlan("c1", digest_of("put", '{"what":"a"}'))
    running = RunningCalls(3, 1, Response((call,)), (CallState(call, plan, runs=1, epoch=1),))
    noted = RecordingMailbox()
    executor = Executor(Agent(ScriptedModel([]), tools=[put]), World(), noted, NO_HOST)
    await executor.execute(RunCall(CallRef(3, 1, "c1"), 1), Session(turn=running))
    assert noted.reports == [
        CallFinished(3, 1, ToolResult("c1", "The arguments do not match their digest.", Outcome.ERROR))
    ]
    assert ran == []


async def test_a_transactional_tool_of_a_source_is_not_run_with_a_store_without_transactions() -> None:
    @tool(on_doubt="in_transaction")
    def put() -> str:
        raise AssertionError

    call, plan = (
        ToolCall("c1", "put"),
        CallPlan("c1", digest_of("put", "{}"), on_doubt=OnDoubt.IN_TRANSACTION),
    )
    running = RunningCalls(3, 1, Response((call,)), (CallState(call, plan, runs=1, epoch=1),))
    noted = RecordingMailbox()
    executor = Executor(Agent(ScriptedModel([]), tools=[put]), World(), noted, NO_HOST)
    await executor.execute(RunCall(CallRef(3, 1, "c1"), 1), Session(turn=running))
    (finished,) = noted.reports
    assert isinstance(finished, CallFinished)
    assert "needs a store" in finished.result.content


class SlowToolSource:
    """A source of one tool that answers when the test allows it."""

    name = "slow"

    def __init__(self, tool: Tool) -> None:
        self.asked = asyncio.Event()
        self.go = asyncio.Event()
        self._tool = tool

    async def tools(self) -> Sequence[Tool]:
        self.asked.set()
        await self.go.wait()
        return [self._tool]

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""


class LeaseRecordingMailbox(RecordingMailbox):
    """A runner's mailbox that records the lease check among the other steps."""

    def __init__(self, happened: list[str]) -> None:
        super().__init__()
        self._happened = happened

    async def confirm(self) -> None:
        self._happened.append("confirmed")


def _running(run: int) -> Session:
    plan = CallPlan("c1", digest_of("put", "{}"))
    return Session(turn=RunningCalls(3, 1, Response((CALL,)), (CallState(CALL, plan, runs=run, epoch=1),)))


CALL = ToolCall("c1", "put", "{}")


@spec("TURN-53")
async def test_the_lease_is_checked_after_every_slow_step() -> None:
    happened: list[str] = []

    @tool
    async def put() -> str:
        happened.append("called")
        return ""

    source = SlowToolSource(put)
    executor = Executor(
        Agent(ScriptedModel([]), tools=[source]), World(), LeaseRecordingMailbox(happened), NO_HOST
    )
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        group.create_task(executor.execute(RunCall(CallRef(3, 1, "c1"), 1), _running(1)))
        await source.asked.wait()
        assert happened == []
        source.go.set()
    assert happened == ["confirmed", "called"]


@spec("TURN-8")
@pytest.mark.parametrize(("run", "outcome"), [(1, Outcome.CANCELLED), (2, Outcome.UNKNOWN)])
async def test_a_call_cancelled_during_the_search_for_its_tool_has_an_outcome(
    run: int, outcome: Outcome
) -> None:
    @tool
    async def put() -> str:
        raise AssertionError

    source, noted = SlowToolSource(put), RecordingMailbox()
    executor = Executor(Agent(ScriptedModel([]), tools=[source]), World(), noted, NO_HOST)
    performing = asyncio.create_task(executor.execute(RunCall(CallRef(3, 1, "c1"), run), _running(run)))
    async with asyncio.timeout(60):
        await source.asked.wait()
        performing.cancel()
        await asyncio.wait([performing])
    (finished,) = noted.reports
    assert isinstance(finished, CallFinished)
    assert finished.result.outcome is outcome


@spec("TURN-75")
async def test_the_hosts_approval_rule_and_the_answer_time_apply_to_client_calls() -> None:
    seen: list[tuple[str, Site]] = []

    def approval(call: ToolCall, found: Tool) -> bool | str:
        seen.append((call.name, found.site))
        return "It costs money." if "100" in call.arguments else False

    theirs = ClientTool(ToolSpec("pay"), timeout_s=9.0, answer_s=60.0)
    asked = calls(("pay", '{"amount":100}'), ("pay", '{"amount":1}'))
    session = Session(turn=AwaitingModel(3, 1, Terms((theirs,)), attempt=1), turns=3)
    noted, _ = await _live(Agent(ScriptedModel([asked]), approval=approval), session)
    (responded,) = noted.reports
    assert isinstance(responded, ModelResponded)
    costly, cheap = responded.plans
    assert (costly.needs_approval, costly.question, costly.answer_s) == (True, "It costs money.", 60.0)
    assert (cheap.needs_approval, cheap.timeout_s, cheap.site) == (False, 9.0, Site.CLIENT)
    assert seen == [("pay", Site.CLIENT)] * 2


async def test_a_pools_decision_is_journaled_before_the_text() -> None:
    judged = ReuseDecision("continuation", "1 new at the end", "resumed", "users", 1, 1, 1)
    noted = await _execute(Agent(ScriptedModel([[ReuseReported(judged), *text("yes")]])), ASKED)
    assert noted.commands[0] == ModelReuseDecided(ASKED.ref, judged)
    (responded,) = noted.reports
    assert isinstance(responded, ModelResponded)


async def test_a_model_that_exits_fails_its_turn_and_does_not_end_the_process() -> None:
    class ExitingModel(ScriptedModel):
        async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
            async for each in super().stream(request):
                yield each
            raise SystemExit(3)

    async with Host(Agent(ExitingModel([[TextDelta("a")]])), MemoryStore()) as host:
        *_, last = await run_turn(host, "s", "hi")
    assert isinstance(last, TurnEnded)
    assert (last.status, "SystemExit" in last.message) == (TurnStatus.FAILED, True)
