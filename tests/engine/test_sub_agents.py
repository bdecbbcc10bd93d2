"""Sub-agents: a child session runs a call of another session, whatever happens to either of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct, field

from midstream.engine.agent import Agent, sub_agent
from midstream.engine.executors import HAND_IN
from midstream.engine.host import Host
from midstream.engine.runner import Runner, StopMode
from midstream.engine.sub_agents import DEPTH_MAX, result_of
from midstream.errors import (
    DrainingError,
    LeaseHeldError,
    SessionNotFoundError,
    ToolDefinitionError,
    UsageError,
)
from midstream.history.messages import History, Outcome, Response, Step, Text, ToolResult, UserMessage
from midstream.models.responses import ModelRequest, TextDelta
from midstream.session import session as sessions
from midstream.session.call_references import CallRef
from midstream.session.calls import Choice
from midstream.session.child_names import PART_MARK
from midstream.session.records import (
    CallEnded,
    ChildDelta,
    CommandAccepted,
    Delta,
    EpochStarted,
    QuestionAsked,
    Record,
    StreamOpened,
    StreamTaken,
    TurnEnded,
    TurnStatus,
    decode,
    encode,
)
from midstream.session.session import Session
from midstream.session.turn.commands import (
    Answer,
    CallFinished,
    Cancel,
    ChildStreamed,
    Command,
    Recover,
    Resume,
    SendMessage,
)
from midstream.session.turn.states import AwaitingModel
from midstream.store.contract import Store, StoredRecord
from midstream.store.memory import MemoryStore
from midstream.testing import FakeWorld, ScriptedModel, Stall, calls, records_until_end, run_turn, text
from midstream.testing.history_checker import Evidence, check
from midstream.testing.scripted_model import ScriptedStep
from midstream.tools.function_tools import tool
from tests.session.turn_stories import AT, answers, asks, at_child, sends, streams
from tests.spec import spec

CHILD = "s::1.1.0"
OF_NODES = (EpochStarted, StreamOpened, StreamTaken, CommandAccepted)
ASK = calls(("research", '{"task": "find it"}'))


def _boss(child: Agent, *, responses_max: int = 50, timeout_s: float = 60.0) -> Agent:
    helper = sub_agent(
        child, name="research", description="Finds things.", responses_max=responses_max, timeout_s=timeout_s
    )
    return Agent(ScriptedModel([ASK, text("thanks")]), tools=[helper])


async def _start(agent: Agent, store: Store) -> Host:
    host = Host(agent, store)
    await host.start()
    await host.wait_for_recovery()
    return host


async def _die(host: Host) -> None:
    for runner in host.awake.runners.values():
        await runner.stop(StopMode.CLOSE, DrainingError("killed"))


async def _journal(store: Store, session: str) -> list[Record]:
    return [decode(each.body) for each in await store.read(session, after=0, limit=10_000)]


def _outcomes(records: Sequence[Record]) -> list[ToolResult]:
    return [record.result for record in records if isinstance(record, CallEnded)]


@spec("TURN-46", "TURN-47")
async def test_a_child_runs_the_call_and_its_records_are_shown_once_and_in_order() -> None:
    store = MemoryStore()
    host = await _start(_boss(Agent(ScriptedModel([text("it is here")]), name="finder")), store)
    records = await run_turn(host, "s", "where is it?")
    assert _outcomes(records) == [ToolResult("c1", "it is here")]

    shown = [record for record in records if isinstance(record, ChildDelta)]
    places = [record.position for record in shown]
    assert places == sorted(set(places))
    inner = [decode(bytes(record.record)) for record in shown]
    own = await _journal(store, CHILD)
    assert [record for record in own if record in inner] == inner
    assert "".join(record.text for record in inner if isinstance(record, Delta)) == "it is here"
    assert isinstance(inner[-1], TurnEnded)
    await host.stop()


@spec("TURN-46")
async def test_after_a_crash_the_same_child_continues_and_its_tools_run_once() -> None:
    store = MemoryStore()
    ran: list[str] = []

    def agent(*, stalls: bool) -> Agent:
        @tool
        async def note(what: str) -> str:
            ran.append(what)
            return "noted"

        ending: list[ScriptedStep] = [TextDelta("half"), Stall()] if stalls else text("all of it")
        child = ScriptedModel([calls(("note", '{"what": "x"}')), ending])
        return _boss(Agent(child, tools=[note], name="finder"))

    first = await _start(agent(stalls=True), store)
    runner = await first.session("s", create=True)
    await runner.submit(SendMessage(UserMessage.of("where is it?")))
    async with asyncio.timeout(60):
        while not any(
            isinstance(each, ChildDelta) and b"half" in bytes(each.record)
            for each in await _journal(store, "s")
        ):
            await runner.wait(runner.newest.position)
    await _die(first)

    second = await _start(agent(stalls=False), store)
    records = await records_until_end(await second.session("s"), after=0)
    assert ran == ["x"]
    assert _outcomes(records) == [ToolResult("c1", "all of it")]
    places = [record.position for record in records if isinstance(record, ChildDelta)]
    assert places == sorted(set(places))
    await second.stop()


@spec("TURN-48")
async def test_a_cancel_stops_the_child_too_and_keeps_its_text() -> None:
    store = MemoryStore()
    host = await _start(_boss(Agent(ScriptedModel([[TextDelta("so far"), Stall()]]), name="finder")), store)
    runner = await host.session("s", create=True)
    await runner.submit(SendMessage(UserMessage.of("where is it?")))
    async with asyncio.timeout(60):
        while not any(isinstance(each, ChildDelta) for each in await _journal(store, "s")):
            await runner.wait(runner.newest.position)
    await runner.submit(Cancel())
    records = await records_until_end(runner, after=0)
    (outcome,) = _outcomes(records)
    assert outcome.outcome is Outcome.CANCELLED
    assert "so far" in outcome.content
    ends = [record.status for record in await _journal(store, CHILD) if isinstance(record, TurnEnded)]
    assert ends == [TurnStatus.CANCELLED]
    await host.stop()


@spec("TURN-48")
async def test_a_child_without_a_waiting_parent_is_cancelled_when_it_is_found() -> None:
    store = MemoryStore()
    child = Agent(ScriptedModel([[TextDelta("so far"), Stall()]]), name="finder")
    first = await _start(_boss(child), store)
    runner = await first.session("s", create=True)
    await runner.submit(SendMessage(UserMessage.of("where is it?")))
    async with asyncio.timeout(60):
        while not any(isinstance(each, ChildDelta) for each in await _journal(store, "s")):
            await runner.wait(runner.newest.position)
    await (await first.session(CHILD)).stop(StopMode.CLOSE, DrainingError("killed first"))
    runner._work._doing.clear()  # no node is left to pass the cancel on
    await runner.submit(Cancel())
    await _die(first)

    second = await _start(_boss(child), store)
    async with asyncio.timeout(60):
        found = await second.session(CHILD)
        while found.state.is_live:
            await found.wait(found.newest.position)
    assert found.state.last_turn is not None
    assert found.state.last_turn.status is TurnStatus.CANCELLED
    await second.stop()


@spec("TURN-49")
async def test_a_child_that_reaches_its_limit_hands_in_its_answer() -> None:
    @tool(has_effects=False)
    async def look() -> str:
        return "nothing yet"

    def script(request: ModelRequest) -> list[ScriptedStep]:
        return calls(("look", "{}")) if request.tools else text("this much I know")

    model = ScriptedModel(script)
    store = MemoryStore()
    host = await _start(_boss(Agent(model, tools=[look], name="finder"), responses_max=2), store)
    records = await run_turn(host, "s", "where is it?")
    assert _outcomes(records) == [ToolResult("c1", "this much I know")]
    assert len(model.requests) == 3
    assert model.requests[-1].history.entries[-1] == UserMessage.of(HAND_IN)
    await host.stop()


@spec("TURN-49")
async def test_a_child_that_takes_too_long_hands_in_its_answer() -> None:
    def script(request: ModelRequest) -> list[ScriptedStep]:
        return [TextDelta("thinking"), Stall()] if request.tools else text("this much I know")

    @tool(has_effects=False)
    async def look() -> str:
        return "nothing yet"

    store = MemoryStore()
    child = Agent(ScriptedModel(script), tools=[look], name="finder")
    host = await _start(_boss(child, timeout_s=0.05), store)
    records = await run_turn(host, "s", "where is it?")
    assert _outcomes(records) == [ToolResult("c1", "this much I know")]
    await host.stop()


@spec("TURN-49")
async def test_the_depth_of_sub_agents_is_limited() -> None:
    model = ScriptedModel([ASK, text("done")])
    agent = Agent(model, name="bottom")
    for _ in range(DEPTH_MAX + 1):
        helper = sub_agent(agent, name="research", description="Finds things.")
        agent = Agent(model, tools=[helper])
    store = MemoryStore()
    host = await _start(agent, store)
    records = await run_turn(host, "s", "where is it?")
    assert _outcomes(records) == [ToolResult("c1", "done")]
    sessions = [info.session async for info in store.list()]
    assert max(each.count(PART_MARK) for each in sessions) == DEPTH_MAX
    await host.stop()


@spec("TURN-50", "TURN-35")
async def test_a_person_answers_in_the_child_and_the_parent_continues() -> None:
    @tool(needs_approval=True)
    async def pay(amount: int) -> str:
        return f"paid {amount}"

    child = Agent(ScriptedModel([calls(("pay", '{"amount": 5}')), text("it is paid")]), tools=[pay])
    store = MemoryStore()
    host = await _start(_boss(child), store)
    runner = await host.session("s", create=True)
    await runner.submit(SendMessage(UserMessage.of("pay them")))
    asked = await _wait_for_question(runner)
    assert host.awake.children_wait_for("s") == ["person"]
    answer = Answer(CallRef(asked.turn, asked.response, asked.call_id), asked.digest, Choice.ALLOW)
    await (await host.session(CHILD)).submit(answer)
    records = await records_until_end(runner, after=0)
    assert _outcomes(records) == [ToolResult("c1", "it is paid")]
    assert host.awake.children_wait_for("s") == host.awake.children_wait_for("nobody") == []
    await host.stop()


async def _wait_for_question(runner: object) -> QuestionAsked:
    """Wait for a child's question, as the readers of its parent receive it."""
    after = 0
    async with asyncio.timeout(60):
        while True:
            for stored in await runner.read(after=after, limit=100):  # type: ignore[attr-defined]
                after = stored.position
                record = decode(stored.body)
                inner = decode(bytes(record.record)) if isinstance(record, ChildDelta) else record
                if isinstance(inner, QuestionAsked):
                    return inner
            await runner.wait(after)  # type: ignore[attr-defined]


@spec("TURN-50")
async def test_only_the_parent_can_send_messages_to_a_child() -> None:
    host = await _start(_boss(Agent(ScriptedModel([text("here")]), name="finder")), MemoryStore())
    await run_turn(host, "s", "where is it?")
    child = await host.session(CHILD)
    with pytest.raises(UsageError, match="runs a call of another session"):
        await child.submit(SendMessage(UserMessage.of("and you?")))
    end = child.newest.position
    assert await child.submit(SendMessage(UserMessage.of("find it"), parent=child.state.parent)) == end
    with pytest.raises(SessionNotFoundError):
        await host.session("s::9.9.9", create=True)
    await host.stop()


@spec("TURN-43", "TURN-90")
async def test_a_turn_with_a_missing_sub_agent_is_held_and_once_resumed_the_outcome_is_unknown() -> None:
    store = MemoryStore()
    first = await _start(_boss(Agent(ScriptedModel([[Stall()]]), name="finder")), store)
    runner = await first.session("s", create=True)
    await runner.submit(SendMessage(UserMessage.of("where is it?")))
    async with asyncio.timeout(60):
        while not any(isinstance(each, ChildDelta) for each in await _journal(store, "s")):
            await runner.wait(runner.newest.position)
    await _die(first)

    second = await _start(Agent(ScriptedModel([ASK, text("well")])), store)
    runner = await second.session("s")
    assert runner.waits_for_agent
    await runner.submit(Resume())
    records = await records_until_end(runner, after=0)
    (outcome,) = _outcomes(records)
    assert (outcome.outcome, "no longer exists" in outcome.content) == (Outcome.UNKNOWN, True)
    await second.stop()


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (TurnStatus.COMPLETED, Outcome.OK),
        (TurnStatus.CANCELLED, Outcome.CANCELLED),
        (TurnStatus.FAILED, Outcome.ERROR),
        (TurnStatus.INTERRUPTED, Outcome.ERROR),
    ],
)
def test_the_outcome_follows_from_the_end_of_the_child(status: TurnStatus, outcome: Outcome) -> None:
    history = History((UserMessage.of("find it"), Step(Response((Text("words"),)))))
    child = Session(turns=1, history=history, last_turn=TurnEnded(1, status, 0.0))
    result = result_of("c1", child)
    assert (result.outcome, "words" in result.content) == (outcome, True)


def test_limits_of_a_sub_agent_are_positive() -> None:
    with pytest.raises(ToolDefinitionError):
        sub_agent(Agent(ScriptedModel([])), description="x", responses_max=0)
    with pytest.raises(ToolDefinitionError):
        sub_agent(Agent(ScriptedModel([])), description="x", timeout_s=0)


# --- invariants under any interleaving ----------------------------------------------------------------------------


class _SessionLine(Struct, eq=False):
    """A session in its journal and at its newest node."""

    name: str
    journal: list[tuple[int, Record]] = field(default_factory=list)
    epoch: int = 0
    session: Session = field(default_factory=Session)

    def take_over(self) -> None:
        """Let its node die and the next one start."""
        self.epoch += 1
        self.append((EpochStarted(self.epoch, f"node {self.epoch}", AT),))
        self.append_command(Recover())

    def append_command(self, command: Command) -> None:
        self.append(sessions.decide(self.session, command, epoch=self.epoch, at=AT))

    def append(self, records: tuple[Record, ...]) -> None:
        self.journal += [(self.epoch, each) for each in records]
        self.session = sessions.fold([(self.epoch, each) for each in records], self.session)

    def stored(self) -> list[StoredRecord]:
        return [
            StoredRecord(at, epoch, encode(each)) for at, (epoch, each) in enumerate(self.journal, start=1)
        ]


class _Follower(Struct, eq=False):
    """A node of the parent, perhaps fenced off: its state, and the shown position of each child."""

    epoch: int
    session: Session
    shown: dict[str, int] = field(default_factory=dict)


class _Family:
    """A parent with two children, and all their followers."""

    def __init__(self) -> None:
        self.parent = _SessionLine("s")
        self.parent.take_over()
        self.parent.append_command(sends())
        self.parent.append_command(asks(at_child("a"), at_child("b")))
        self.children = {call_id: _SessionLine(f"s::1.1.{at}") for at, call_id in enumerate("ab")}
        for child in self.children.values():
            child.take_over()
            child.append_command(sends("work"))
        self.followers: list[_Follower] = []
        self.follow()

    def follow(self) -> None:
        """Let the parent's newest node start to follow: from the position in the journal."""
        self.followers.append(_Follower(self.parent.epoch, self.parent.session))

    def show(self, follower: _Follower, call_id: str, limit: int) -> None:
        """Run one iteration of `children._follow`, and report the child's outcome once all is shown."""
        child = self.children[call_id]
        calls = {each.call.id: each for each in getattr(follower.session.turn, "calls", ())}
        if call_id not in calls:
            return
        after = follower.shown.get(call_id, calls[call_id].child_position)
        page = child.stored()[after : after + limit]
        if page:
            follower.shown[call_id] = page[-1].position
            found = tuple(
                (each.position, each.body) for each in page if not isinstance(decode(each.body), OF_NODES)
            )
            self._append_command(follower, ChildStreamed(CallRef(1, 1, call_id), child.name, found))
        elif not child.session.is_live:
            self._append_command(follower, CallFinished(1, 1, result_of(call_id, child.session)))

    def _append_command(self, follower: _Follower, command: Command) -> None:
        records = sessions.decide(follower.session, command, epoch=follower.epoch, at=AT)
        if not records:
            return
        if follower.epoch != self.parent.epoch or follower.session.position != self.parent.session.position:
            self.followers.remove(follower)  # the store fences it off
            return
        self.parent.append(records)
        follower.session = self.parent.session


@given(st.data())
@spec("TURN-12", "TURN-46", "TURN-47")
def test_each_child_is_shown_once_and_has_one_outcome_under_any_interleaving(data: st.DataObject) -> None:
    family = _Family()
    for _ in range(data.draw(st.integers(1, 40))):
        call_id = data.draw(st.sampled_from("ab"))
        child = family.children[call_id]
        match data.draw(
            st.sampled_from(["follow", "follow", "follow", "speak", "end", "child dies", "parent dies"])
        ):
            case "parent dies":
                family.parent.take_over()
                family.follow()
            case "child dies":
                child.take_over()
            case "speak" if isinstance(child.session.turn, AwaitingModel):
                child.append_command(streams("words", attempt=child.session.turn.attempt))
            case "end" if isinstance(child.session.turn, AwaitingModel):
                child.append_command(answers(f"{call_id} is done", attempt=child.session.turn.attempt))
            case _:
                if family.followers:
                    follower = data.draw(st.sampled_from(family.followers))
                    family.show(follower, call_id, data.draw(st.integers(1, 4)))

    for call_id, child in family.children.items():
        if isinstance(child.session.turn, AwaitingModel):
            child.append_command(answers(f"{call_id} is done", attempt=child.session.turn.attempt))
    family.parent.take_over()
    family.follow()
    for _ in range(100):
        for call_id in "ab":
            family.show(family.followers[-1], call_id, 3)
    lines = (family.parent, *family.children.values())
    assert check(Evidence({each.name: each.stored() for each in lines})) == []
    ends = [record.result for _, record in family.parent.journal if isinstance(record, CallEnded)]
    theirs = [result_of(call_id, child.session) for call_id, child in family.children.items()]
    assert sorted(ends, key=str) == sorted(theirs, key=str)


class _Elsewhere(Host):
    """A host whose child sessions another process holds, while it reports that."""

    is_elsewhere = False

    async def child(self, session_id: str, path: tuple[str, ...]) -> Runner:
        if self.is_elsewhere:
            raise LeaseHeldError("another process has it")
        return await super().child(session_id, path)


@spec("TURN-48", "TURN-8")
@pytest.mark.parametrize(
    ("back_after_s", "status"),
    [(1.0, TurnStatus.CANCELLED), (3600.0, TurnStatus.FAILED)],
    ids=["soon", "never"],
)
async def test_a_child_that_cannot_be_reached_for_a_cancel_ends_no_session(
    back_after_s: float, status: TurnStatus
) -> None:
    world = FakeWorld()
    store = MemoryStore(world=world)
    child = Agent(ScriptedModel([[TextDelta("looking"), Stall()]], world=world), name="finder")
    host = _Elsewhere(_boss(child), store, world=world)
    await host.start()
    runner = await host.session("s", create=True)
    runner.attach()
    await runner.submit(SendMessage(UserMessage.of("where is it?")))
    await world.settle()
    inner = await host.child(CHILD, ("research",))
    host.is_elsewhere = True
    await runner.submit(Cancel())
    await world.advance(back_after_s)
    host.is_elsewhere = False
    await world.advance(10.0)
    assert not runner.has_failed
    assert runner.state.last_turn is not None
    assert runner.state.last_turn.status is TurnStatus.CANCELLED
    assert inner.state.last_turn is not None
    assert inner.state.last_turn.status is status, "at the latest its own time limit ends it"
    await host.stop(grace_s=0.0)
