"""Sub-agents: a child session does the work of a call, whatever happens to either of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from midstream.core.calls import Choice
from midstream.core.messages import Exchange, History, Outcome, Reply, Result, Text, UserMessage
from midstream.core.records import (
    CallEnded,
    ChildSaid,
    Delta,
    QuestionAsked,
    Record,
    TurnEnded,
    TurnStatus,
    decode,
)
from midstream.core.replies import ModelRequest, TextDelta
from midstream.core.session import Session
from midstream.core.turn import Answer, Cancel, SendMessage
from midstream.errors import DrainingError, SessionNotFoundError, ToolDefinitionError, UsageError
from midstream.runtime.agent import Agent, sub_agent
from midstream.runtime.children import CHILD_MARK, DEPTH_MAX, result_of
from midstream.runtime.host import Host
from midstream.runtime.performers import HAND_IN
from midstream.store.contract import Store
from midstream.store.memory import MemoryStore
from midstream.testing import ScriptedModel, Stall, calls, records_until_end, run_turn, text
from midstream.testing.models import Step
from midstream.tools import tool
from tests.spec import spec

CHILD = "s::1.1.0"
ASK = calls(("research", '{"task": "find it"}'))


def _boss(child: Agent, *, replies_max: int = 50, timeout_s: float = 60.0) -> Agent:
    helper = sub_agent(
        child, name="research", description="Finds things.", replies_max=replies_max, timeout_s=timeout_s
    )
    return Agent(ScriptedModel([ASK, text("thanks")]), tools=[helper])


async def _started(agent: Agent, store: Store) -> Host:
    host = Host(agent, store)
    await host.start()
    await host.recovered()
    return host


async def _die(host: Host) -> None:
    for runner in host._awake.values():
        await runner.close(DrainingError("killed"))


async def _journal(store: Store, session: str) -> list[Record]:
    return [decode(each.body) for each in await store.read(session, after=0, limit=10_000)]


def _outcomes(records: Sequence[Record]) -> list[Result]:
    return [record.result for record in records if isinstance(record, CallEnded)]


@spec("TURN-60", "TURN-61")
async def test_a_child_does_the_work_and_its_records_are_shown_once_and_in_order() -> None:
    store = MemoryStore()
    host = await _started(_boss(Agent(ScriptedModel([text("it is here")]), name="finder")), store)
    records = await run_turn(host, "s", "where is it?")
    assert _outcomes(records) == [Result("c1", "it is here")]

    shown = [record for record in records if isinstance(record, ChildSaid)]
    places = [record.position for record in shown]
    assert places == sorted(set(places))
    inner = [decode(bytes(record.record)) for record in shown]
    own = await _journal(store, CHILD)
    assert [record for record in own if record in inner] == inner
    assert "".join(record.text for record in inner if isinstance(record, Delta)) == "it is here"
    assert isinstance(inner[-1], TurnEnded)
    await host.stop()


@spec("TURN-60")
async def test_after_a_crash_the_same_child_goes_on_and_its_tools_run_once() -> None:
    store = MemoryStore()
    ran: list[str] = []

    def agent(*, stalls: bool) -> Agent:
        @tool
        async def note(what: str) -> str:
            ran.append(what)
            return "noted"

        ending: list[Step] = [TextDelta("half"), Stall()] if stalls else text("all of it")
        child = ScriptedModel([calls(("note", '{"what": "x"}')), ending])
        return _boss(Agent(child, tools=[note], name="finder"))

    first = await _started(agent(stalls=True), store)
    runner = await first.session("s", create=True)
    await runner.submit(SendMessage(UserMessage.of("where is it?")))
    async with asyncio.timeout(5):
        while not any(
            isinstance(each, ChildSaid) and b"half" in bytes(each.record)
            for each in await _journal(store, "s")
        ):
            await runner.wait(runner.newest.position)
    await _die(first)

    second = await _started(agent(stalls=False), store)
    records = await records_until_end(await second.session("s"), after=0)
    assert ran == ["x"]
    assert _outcomes(records) == [Result("c1", "all of it")]
    places = [record.position for record in records if isinstance(record, ChildSaid)]
    assert places == sorted(set(places))
    await second.stop()


@spec("TURN-62")
async def test_a_cancel_stops_the_child_too_and_keeps_what_it_said() -> None:
    store = MemoryStore()
    host = await _started(_boss(Agent(ScriptedModel([[TextDelta("so far"), Stall()]]), name="finder")), store)
    runner = await host.session("s", create=True)
    await runner.submit(SendMessage(UserMessage.of("where is it?")))
    async with asyncio.timeout(5):
        while not any(isinstance(each, ChildSaid) for each in await _journal(store, "s")):
            await runner.wait(runner.newest.position)
    await runner.submit(Cancel())
    records = await records_until_end(runner, after=0)
    (outcome,) = _outcomes(records)
    assert outcome.outcome is Outcome.CANCELLED
    assert "so far" in outcome.content
    ends = [record.status for record in await _journal(store, CHILD) if isinstance(record, TurnEnded)]
    assert ends == [TurnStatus.CANCELLED]
    await host.stop()


@spec("TURN-62")
async def test_a_child_nobody_waits_for_any_more_is_stopped_when_it_is_found() -> None:
    store = MemoryStore()
    child = Agent(ScriptedModel([[TextDelta("so far"), Stall()]]), name="finder")
    first = await _started(_boss(child), store)
    runner = await first.session("s", create=True)
    await runner.submit(SendMessage(UserMessage.of("where is it?")))
    async with asyncio.timeout(5):
        while not any(isinstance(each, ChildSaid) for each in await _journal(store, "s")):
            await runner.wait(runner.newest.position)
    await (await first.session(CHILD)).close(DrainingError("killed first"))
    runner._doing.clear()  # nobody is left to pass the cancel on
    await runner.submit(Cancel())
    await _die(first)

    second = await _started(_boss(child), store)
    async with asyncio.timeout(5):
        found = await second.session(CHILD)
        while found.state.is_live:
            await found.wait(found.newest.position)
    assert found.state.last_turn is not None
    assert found.state.last_turn.status is TurnStatus.CANCELLED
    await second.stop()


@spec("TURN-63")
async def test_a_child_that_reaches_its_limit_hands_in_what_it_has() -> None:
    @tool(has_effects=False)
    async def look() -> str:
        return "nothing yet"

    def script(request: ModelRequest) -> list[Step]:
        return calls(("look", "{}")) if request.tools else text("this much I know")

    model = ScriptedModel(script)
    store = MemoryStore()
    host = await _started(_boss(Agent(model, tools=[look], name="finder"), replies_max=2), store)
    records = await run_turn(host, "s", "where is it?")
    assert _outcomes(records) == [Result("c1", "this much I know")]
    assert len(model.requests) == 3
    assert model.requests[-1].history.entries[-1] == UserMessage.of(HAND_IN)
    await host.stop()


@spec("TURN-63")
async def test_a_child_that_takes_too_long_hands_in_what_it_has() -> None:
    def script(request: ModelRequest) -> list[Step]:
        return [TextDelta("thinking"), Stall()] if request.tools else text("this much I know")

    @tool(has_effects=False)
    async def look() -> str:
        return "nothing yet"

    store = MemoryStore()
    child = Agent(ScriptedModel(script), tools=[look], name="finder")
    host = await _started(_boss(child, timeout_s=0.05), store)
    records = await run_turn(host, "s", "where is it?")
    assert _outcomes(records) == [Result("c1", "this much I know")]
    await host.stop()


@spec("TURN-63")
async def test_sub_agents_go_only_so_deep() -> None:
    model = ScriptedModel([ASK, text("done")])
    agent = Agent(model, name="bottom")
    for _ in range(DEPTH_MAX + 1):
        helper = sub_agent(agent, name="research", description="Finds things.")
        agent = Agent(model, tools=[helper])
    store = MemoryStore()
    host = await _started(agent, store)
    records = await run_turn(host, "s", "where is it?")
    assert _outcomes(records) == [Result("c1", "done")]
    sessions = [info.session async for info in store.list()]
    assert max(each.count(CHILD_MARK) for each in sessions) == DEPTH_MAX
    await host.stop()


@spec("TURN-64", "TURN-35")
async def test_a_person_answers_in_the_child_and_the_parent_goes_on() -> None:
    @tool(needs_approval=True)
    async def pay(amount: int) -> str:
        return f"paid {amount}"

    child = Agent(ScriptedModel([calls(("pay", '{"amount": 5}')), text("it is paid")]), tools=[pay])
    store = MemoryStore()
    host = await _started(_boss(child), store)
    runner = await host.session("s", create=True)
    await runner.submit(SendMessage(UserMessage.of("pay them")))
    asked = await _question(runner)
    answer = Answer(asked.turn, asked.reply, asked.call_id, asked.digest, Choice.ALLOW)
    await (await host.session(CHILD)).submit(answer)
    records = await records_until_end(runner, after=0)
    assert _outcomes(records) == [Result("c1", "it is paid")]
    await host.stop()


async def _question(runner: object) -> QuestionAsked:
    """Wait for a question that a child asks, as the readers of its parent see it."""
    after = 0
    async with asyncio.timeout(5):
        while True:
            for stored in await runner.read(after=after, limit=100):  # type: ignore[attr-defined]
                after = stored.position
                record = decode(stored.body)
                inner = decode(bytes(record.record)) if isinstance(record, ChildSaid) else record
                if isinstance(inner, QuestionAsked):
                    return inner
            await runner.wait(after)  # type: ignore[attr-defined]


@spec("TURN-64")
async def test_nobody_speaks_to_a_child_but_its_parent() -> None:
    host = await _started(_boss(Agent(ScriptedModel([text("here")]), name="finder")), MemoryStore())
    await run_turn(host, "s", "where is it?")
    child = await host.session(CHILD)
    with pytest.raises(UsageError, match="does the work of a call"):
        await child.submit(SendMessage(UserMessage.of("and you?")))
    with pytest.raises(SessionNotFoundError):
        await host.session("s::9.9.9", create=True)
    await host.stop()


async def test_a_sub_agent_that_is_gone_is_an_error_the_model_reads() -> None:
    store = MemoryStore()
    first = await _started(_boss(Agent(ScriptedModel([[Stall()]]), name="finder")), store)
    runner = await first.session("s", create=True)
    await runner.submit(SendMessage(UserMessage.of("where is it?")))
    async with asyncio.timeout(5):
        while not any(isinstance(each, ChildSaid) for each in await _journal(store, "s")):
            await runner.wait(runner.newest.position)
    await _die(first)

    second = await _started(Agent(ScriptedModel([ASK, text("well")])), store)
    records = await records_until_end(await second.session("s"), after=0)
    (outcome,) = _outcomes(records)
    assert (outcome.outcome, "no longer exists" in outcome.content) == (Outcome.ERROR, True)
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
    history = History((UserMessage.of("find it"), Exchange(Reply((Text("words"),)))))
    child = Session(turns=1, history=history, last_turn=TurnEnded(1, status, 0.0))
    result = result_of("c1", child)
    assert (result.outcome, "words" in result.content) == (outcome, True)


def test_limits_of_a_sub_agent_must_leave_it_something() -> None:
    with pytest.raises(ToolDefinitionError):
        sub_agent(Agent(ScriptedModel([])), description="x", replies_max=0)
    with pytest.raises(ToolDefinitionError):
        sub_agent(Agent(ScriptedModel([])), description="x", timeout_s=0)
