from __future__ import annotations

import asyncio
import math

import pytest

from midstream.engine import sleeping
from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.engine.runner import Runner, StopMode
from midstream.errors import (
    DrainingError,
    SessionBusyError,
    SessionNotFoundError,
    UsageError,
)
from midstream.history.messages import Outcome, Step, ToolResult, UserMessage
from midstream.session.call_references import CallRef
from midstream.session.calls import DAMAGED_CONTENT, Choice, OnDoubtName
from midstream.session.records import (
    CallEnded,
    CallStarted,
    EpochStarted,
    MessageAccepted,
    OutcomeDamaged,
    Record,
    TurnEnded,
    decode,
)
from midstream.session.turn.commands import Answer, Resume, SendMessage
from midstream.session.turn.states import SUSPECTED_CODE, SUSPECTED_MAX
from midstream.store.contract import Batch, SessionInfo, Store, StoredRecord
from midstream.store.memory import Memory, MemoryStore
from midstream.testing import FakeWorld, ScriptedModel, Stall, calls, records_until_end, run_turn, text
from midstream.testing.store_fakes import StoreInFront
from midstream.tools.function_tools import Tool, tool
from tests.spec import spec


async def _die(host: Host) -> None:
    """Release everything at once, as a killed process does; the store keeps its contents."""
    for runner in host.awake.runners.values():
        await runner.stop(StopMode.CLOSE, DrainingError("killed"))


async def _start(host: Host) -> Host:
    await host.start()
    await host.wait_for_recovery()
    return host


async def test_a_new_session_starts_without_reading_the_store() -> None:
    class Unread(StoreInFront):
        async def before_operation(self, operation: str, session: str) -> None:
            assert (operation, session) not in {("read", "new"), ("find", "new")}

    async with Host(Agent(ScriptedModel([text("a")])), Unread(MemoryStore())) as host:
        await host.wait_for_recovery()
        runner = await host.begin("new")
        assert await host.begin("new") is runner
        end = await runner.submit(SendMessage(UserMessage.of("hi")))
        assert end == runner.newest.position > 0
        async with asyncio.timeout(30):
            while runner.state.is_live:
                await runner.wait(runner.newest.position)
        assert len(runner.state.history.entries) == 2


async def test_a_draining_host_starts_no_session() -> None:
    async with Host(Agent(ScriptedModel([])), MemoryStore()) as host:
        host.drain()
        with pytest.raises(DrainingError):
            await host.begin("new")
        with pytest.raises(UsageError):
            await host.begin("no name")


@pytest.mark.parametrize(("on_doubt", "runs"), [("unknown", 1), ("rerun", 2), ("rerun_with_key", 2)])
async def test_a_tool_in_doubt_is_handled_by_its_policy(on_doubt: OnDoubtName, runs: int) -> None:
    store = MemoryStore()
    ran: list[int] = []

    def writing(*, hangs: bool) -> Tool:
        @tool(on_doubt=on_doubt)
        async def write(path: str) -> str:
            ran.append(1)
            if hangs:
                started.set()
                await asyncio.Event().wait()
            return path

        return write

    started = asyncio.Event()
    script = [calls(("write", '{"path":"a"}')), text("done")]
    first = await _start(Host(Agent(ScriptedModel(script), tools=[writing(hangs=True)]), store))
    runner = await first.session("s", create=True)
    await runner.submit(SendMessage(UserMessage.of("hi")))
    async with asyncio.timeout(60):
        await started.wait()
    await _die(first)

    second = await _start(Host(Agent(ScriptedModel(script), tools=[writing(hangs=False)]), store))
    records = await records_until_end(await second.session("s"), after=0)
    assert len(ran) == runs
    assert [r.run for r in records if isinstance(r, CallStarted)] == list(range(1, runs + 1))
    outcomes = [r.result.outcome for r in records if isinstance(r, CallEnded)]
    assert outcomes == [Outcome.UNKNOWN if runs == 1 else Outcome.OK]
    await second.stop()


@pytest.mark.slow
@spec("TURN-84", "TURN-85")
async def test_a_turn_whose_tool_runs_at_each_death_of_its_node_is_given_up() -> None:
    store = MemoryStore()
    started = asyncio.Event()

    @tool(on_doubt="unknown")
    async def write() -> str:
        started.set()
        await asyncio.Event().wait()
        return ""

    agent = Agent(ScriptedModel(lambda _request: calls(("write", "{}"))), tools=[write])
    host = await _start(Host(agent, store))
    await (await host.session("s", create=True)).submit(SendMessage(UserMessage.of("hi")))
    for _ in range(SUSPECTED_MAX + 1):
        async with asyncio.timeout(60):
            await started.wait()
        await _die(host)
        started.clear()
        host = await _start(Host(agent, store))
    runner = await host.session("s")
    assert not runner.state.is_live
    assert runner.state.last_turn is not None
    assert (runner.state.last_turn.status, runner.state.last_turn.code) == ("interrupted", SUSPECTED_CODE)
    await runner.submit(Resume())
    assert runner.state.suspected == 0, "who asks for it again means it"
    await host.stop(grace_s=0.1)


async def test_unknown_and_invalid_session_names_are_distinguished() -> None:
    host = await _start(Host(Agent(ScriptedModel([])), MemoryStore()))
    with pytest.raises(SessionNotFoundError):
        await host.session("nobody")
    with pytest.raises(UsageError):
        await host.session("../etc", create=True)
    await host.stop()


async def test_stopping_waits_for_running_tools_and_records_their_outcome() -> None:
    store = MemoryStore()
    started, release = asyncio.Event(), asyncio.Event()

    @tool
    async def write(path: str) -> str:
        started.set()
        await release.wait()
        return path

    script = [calls(("write", '{"path":"a"}')), text("done")]
    host = await _start(Host(Agent(ScriptedModel(script), tools=[write]), store))
    runner = await host.session("s", create=True)
    await runner.submit(SendMessage(UserMessage.of("hi")))
    async with asyncio.timeout(60):
        await started.wait()
        stopping = asyncio.ensure_future(host.stop(grace_s=5))
        with pytest.raises(DrainingError):
            await runner.wait(runner.newest.position)
        release.set()
        await stopping
    await store.open()
    stored = [decode(each.body) for each in await store.read("s", after=0, limit=100)]
    assert [r.result.outcome for r in stored if isinstance(r, CallEnded)] == [Outcome.OK]

    second = await _start(Host(Agent(ScriptedModel(script), tools=[write]), store))
    records = await records_until_end(await second.session("s"), after=0)
    assert isinstance(records[-1], TurnEnded)
    assert len([r for r in records if isinstance(r, CallStarted)]) == 1
    await second.stop()


async def test_stopping_is_limited_in_time_if_a_tool_hangs() -> None:
    started = asyncio.Event()

    @tool
    async def hang() -> str:
        started.set()
        await asyncio.Event().wait()
        return ""

    store = MemoryStore()
    host = await _start(Host(Agent(ScriptedModel([calls(("hang", "{}"))]), tools=[hang]), store))
    await (await host.session("s", create=True)).submit(SendMessage(UserMessage.of("hi")))
    async with asyncio.timeout(60):
        await started.wait()
        await host.stop(grace_s=0.01)
        await host.stop()
    await store.open()
    stored = [decode(each.body) for each in await store.read("s", after=0, limit=100)]
    assert not any(isinstance(r, CallEnded) for r in stored)  # in doubt, for the next node to decide


async def test_records_of_another_process_are_read_and_continued() -> None:
    memory = Memory()
    here = await _start(Host(Agent(ScriptedModel([text("from here")])), MemoryStore(memory)))
    await run_turn(here, "s", "one")
    there = await _start(Host(Agent(ScriptedModel([text("from there")])), MemoryStore(memory)))
    cached = await there.session("s")

    await run_turn(here, "s", "two")
    assert len((await there.session("s")).state.history.entries) == 4

    await run_turn(here, "s", "three")
    await here.stop()
    before = await cached.submit(
        SendMessage(UserMessage.of("four"))
    )  # missed records are read with the claim
    await records_until_end(cached, after=before)
    records = [decode(each.body) for each in await cached.read(after=0, limit=100)]
    messages = [r.message.parts[0].text for r in records if isinstance(r, MessageAccepted)]  # type: ignore[union-attr] # words
    assert messages == ["one", "two", "three", "four"]
    assert [r.epoch for r in records if isinstance(r, EpochStarted)] == [1, 2]
    await there.stop()


class SlowTo(StoreInFront):
    """A store that delays an operation."""

    def __init__(self, operation: str, store: Store) -> None:
        super().__init__(store)
        self.was_called = asyncio.Event()
        self.may_continue = asyncio.Event()
        self._operation = operation

    async def before_operation(self, operation: str, session: str) -> None:
        if operation == self._operation:
            self.was_called.set()
            await self.may_continue.wait()


async def test_a_host_stopped_while_it_opens_its_store_leaves_nothing_open() -> None:
    behind = MemoryStore()
    store = SlowTo("open", behind)
    host = Host(Agent(ScriptedModel([])), store)
    starting = asyncio.ensure_future(host.start())
    await store.was_called.wait()
    await host.stop()
    store.may_continue.set()
    with pytest.raises(DrainingError):
        await starting
    assert behind.node == ""
    with pytest.raises(DrainingError):
        await host.start()
    assert behind.node == ""


async def test_a_turn_of_a_dead_process_is_taken_over_by_a_living_one() -> None:
    memory = Memory()
    here = await _start(Host(Agent(ScriptedModel([[Stall()]])), MemoryStore(memory)))
    await (await here.session("s", create=True)).submit(SendMessage(UserMessage.of("hi")))
    world = FakeWorld()
    there = await _start(Host(Agent(ScriptedModel([text("done")])), MemoryStore(memory), world=world))
    assert (there.recovery.done, there.recovery.failed) == (1, 0)
    await here.stop(grace_s=0.0)
    await world.advance(60.0)
    assert not (await there.session("s")).state.is_live
    await there.stop()


class SlowStore(MemoryStore):
    """A store whose appends and releases wait for the test."""

    def __init__(self, memory: Memory | None = None) -> None:
        super().__init__(memory)
        self.go = asyncio.Event()
        self.go.set()

    async def append(self, session: str, batch: Batch) -> int:
        await self.go.wait()
        return await super().append(session, batch)

    async def release(self, session: str, *, epoch: int) -> None:
        await self.go.wait()
        await super().release(session, epoch=epoch)


async def test_a_message_being_stored_keeps_its_session_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleeping, "SESSIONS_AWAKE_MAX", 1)
    store = SlowStore()
    host = await _start(Host(Agent(ScriptedModel([text("a")])), store))
    await run_turn(host, "s", "first")
    store.go.clear()
    runner = await host.session("s")
    before = runner.newest.position
    sending = asyncio.ensure_future(runner.submit(SendMessage(UserMessage.of("hi"))))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    with pytest.raises(SessionBusyError):
        await host.delete("s")
    await host.session("t", create=True)
    store.go.set()
    async with asyncio.timeout(60):
        await sending
        await records_until_end(runner, after=before)
    await host.stop()


async def test_sessions_opened_concurrently_stay_within_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sleeping, "SESSIONS_AWAKE_MAX", 3)
    store = SlowStore()
    host = await _start(Host(Agent(ScriptedModel([text("a")])), store))
    for number in range(3):
        await run_turn(host, f"s{number}", "hi")
    store.go.clear()
    opening = [asyncio.ensure_future(host.session(f"t{number}", create=True)) for number in range(3)]
    for _ in range(5):
        await asyncio.sleep(0)
    store.go.set()
    async with asyncio.timeout(60):
        await asyncio.gather(*opening)
    assert len(host.awake.runners) == 3
    await host.stop()


async def test_a_session_being_opened_while_the_host_stops_does_nothing_afterwards() -> None:
    memory = Memory()
    first = await _start(Host(Agent(ScriptedModel([[Stall()]])), MemoryStore(memory)))
    await (await first.session("s", create=True)).submit(SendMessage(UserMessage.of("hi")))
    await first.stop()
    store = SlowStore(memory)
    store.go.clear()
    second = Host(Agent(ScriptedModel([text("a")])), store)
    await second.start()
    for _ in range(5):
        await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await second.stop()
    working = [task for task in asyncio.all_tasks() if task.get_name().startswith("runner")]
    assert working == []


async def test_idle_sessions_sleep_and_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleeping, "SESSIONS_AWAKE_MAX", 3)
    host = await _start(Host(Agent(ScriptedModel([text("a")])), MemoryStore()))
    for number in range(6):
        await run_turn(host, f"s{number}", "hi")
    assert len(host.awake.runners) == 3
    runner = await host.session("s0")
    assert len(runner.state.history.entries) == 2
    await host.stop()


@spec("TURN-35")
async def test_a_turn_that_waits_for_people_needs_no_node_until_an_answer() -> None:
    store = MemoryStore()
    ran: list[int] = []

    @tool(needs_approval=True)
    async def pay(amount: int) -> str:
        ran.append(amount)
        return "paid"

    script = [calls(("pay", '{"amount": 5}')), text("done")]
    first = await _start(Host(Agent(ScriptedModel(script), tools=[pay]), store))
    runner = await first.session("s", create=True)
    await runner.submit(SendMessage(UserMessage.of("pay")))
    async with asyncio.timeout(60):
        while not runner.state.rests_on_people:
            await runner.wait(runner.newest.position)
    found = await store.find("s")
    assert found is not None
    assert (found.mark.is_live, found.mark.status) == (False, "waiting")
    await _die(first)

    second = await _start(Host(Agent(ScriptedModel(script), tools=[pay]), store))
    assert second.recovery.total == 0
    woken = await second.session("s")
    assert woken.state.epoch == 1, "looking at it claims nothing"
    call = woken.state.turn.calls[0]  # type: ignore[union-attr]
    await woken.submit(Answer(CallRef(1, 1, call.call.id), call.plan.digest, Choice.ALLOW))
    records = await records_until_end(woken, after=0)
    assert ran == [5]
    assert [r.epoch for r in records if isinstance(r, EpochStarted)] == [1, 2]
    found = await store.find("s")
    assert found is not None
    assert (found.mark.is_live, found.mark.status) == (False, "completed")
    await second.stop()


async def test_concurrent_reopening_of_an_outdated_session_gives_one_runner() -> None:
    """Found by the simulation: the second caller opened it once more, and the readers of the first received nothing."""
    memory = Memory()
    agent = Agent(ScriptedModel([text("one"), text("two")]))
    ours = await _start(Host(agent, _SlowToFind(memory)))
    theirs = await _start(Host(agent, MemoryStore(memory)))
    await run_turn(theirs, "s", "hi")
    await (await theirs.session("s")).stop(StopMode.SLEEP)
    theirs.awake.runners.clear()
    old = await ours.session("s")
    await run_turn(theirs, "s", "go on")

    first, second = await asyncio.gather(ours.session("s"), ours.session("s"))
    assert first is second
    assert first.state.turns == 2 == old.state.turns
    assert first is await ours.session("s")
    assert not first.has_failed
    for host in (ours, theirs):
        await host.stop(grace_s=0.0)


class _SlowToFind(MemoryStore):
    """A store that takes a moment to find where a session ends, each time a little longer."""

    _turns = 0

    async def find(self, session: str) -> SessionInfo | None:
        self._turns += 5
        for _ in range(self._turns):
            await asyncio.sleep(0)
        return await super().find(session)


def _damage_outcome(memory: Memory) -> None:
    """Truncate the stored record of the first outcome."""
    stored = memory.sessions["s"].records
    at, found = next((at, each) for at, each in enumerate(stored) if isinstance(decode(each.body), CallEnded))
    stored[at] = StoredRecord(found.position, found.epoch, found.body[:-3])


@spec("TURN-72")
async def test_a_damaged_outcome_does_not_stop_the_session() -> None:
    memory = Memory()

    @tool
    async def write(path: str) -> str:
        return path

    model = ScriptedModel([calls(("write", '{"path":"a"}')), text("ok")])
    first = await _start(Host(Agent(model, tools=[write]), MemoryStore(memory)))
    await run_turn(first, "s", "hi")
    await first.stop()
    _damage_outcome(memory)

    second = await _start(Host(Agent(model, tools=[write]), MemoryStore(memory)))
    runner = await second.session("s")
    step = runner.state.history.entries[1]
    assert isinstance(step, Step)
    assert step.results == (ToolResult("c1", DAMAGED_CONTENT, Outcome.UNKNOWN),)
    records = await run_turn(second, "s", "and now?")
    assert isinstance(records[-1], TurnEnded)
    assert any(isinstance(each, OutcomeDamaged) for each in await records_of(runner))
    await second.stop()


@spec("TURN-72")
async def test_a_damaged_outcome_of_an_open_batch_puts_its_call_in_doubt() -> None:
    memory = Memory()
    ran: list[str] = []

    @tool(on_doubt="rerun")
    async def write(path: str) -> str:
        ran.append(path)
        return path

    @tool
    async def hang() -> str:
        await asyncio.Event().wait()
        return ""

    model = ScriptedModel([calls(("write", '{"path":"a"}'), ("hang", "{}")), text("ok")])
    first = await _start(Host(Agent(model, tools=[write, hang]), MemoryStore(memory)))
    runner = await first.session("s", create=True)
    await runner.submit(SendMessage(UserMessage.of("hi")))
    async with asyncio.timeout(60):
        while not any(isinstance(each, CallEnded) for each in await records_of(runner)):
            await runner.wait(runner.newest.position)
    await first.stop(grace_s=0)
    _damage_outcome(memory)

    second = await _start(Host(Agent(model, tools=[write, hang]), MemoryStore(memory)))
    await records_until_end(await second.session("s"), after=0)
    step = (await second.session("s")).state.history.entries[1]
    assert isinstance(step, Step)
    assert [result.outcome for result in step.results] == [Outcome.OK, Outcome.UNKNOWN]
    assert ran == ["a", "a"]
    await second.stop()


async def records_of(runner: Runner) -> list[Record]:
    return [decode(each.body) for each in await runner.read(after=0, limit=1000)]


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0])
def test_a_look_back_that_is_no_number_of_seconds_is_refused(seconds: float) -> None:
    with pytest.raises(UsageError, match="`look_back_s`"):
        Host(Agent(ScriptedModel([])), MemoryStore(), look_back_s=seconds)


async def test_a_cancelled_stop_still_releases_the_sessions_and_closes_the_store() -> None:
    memory = Memory()
    store = SlowTo("release", MemoryStore(memory))
    host = await _start(Host(Agent(ScriptedModel([text("a")])), store))
    await run_turn(host, "s", "hi")
    stopping = asyncio.create_task(host.stop())
    async with asyncio.timeout(60):
        await store.was_called.wait()
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    store.may_continue.set()
    other = MemoryStore(memory)
    await other.open()
    async with asyncio.timeout(60):
        while store.node:  # noqa: ASYNC110 - no event reports it
            await asyncio.sleep(0)
    found = await other.find("s")
    assert found is not None
    assert found.is_free
    await other.close()


async def test_a_cancelled_start_leaves_nothing_open_and_can_be_repeated() -> None:
    behind = MemoryStore()
    store = SlowTo("open", behind)
    host = Host(Agent(ScriptedModel([text("a")])), store)
    starting = asyncio.create_task(host.start())
    async with asyncio.timeout(60):
        await store.was_called.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert behind.node == ""
    store.may_continue.set()
    await _start(host)
    await run_turn(host, "s", "hi")
    await host.stop()
