"""Retention in a host, on a clock that the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from midstream.engine import pruning as pruning_module
from midstream.engine.agent import Agent, SubAgent, sub_agent
from midstream.engine.host import Host
from midstream.engine.journal import Journal
from midstream.engine.pruning import SWEEP_S, Pruner
from midstream.environment import Fault
from midstream.errors import StoreDamagedError, StoreFullError
from midstream.history.messages import UserMessage
from midstream.models.responses import Finished, ModelRequest, TextDelta
from midstream.protocol.frames import START, EventId
from midstream.session import retention as retention_module
from midstream.session.call_references import CallRef
from midstream.session.calls import Choice
from midstream.session.records import JournalPruned, TurnEnded, decode
from midstream.session.retention import Retention
from midstream.session.session import Session, fold
from midstream.session.turn.commands import Answer, SendMessage
from midstream.store.contract import Store, StoredRecord
from midstream.store.memory import Memory, MemoryStore
from midstream.testing import FailingStore, ScriptedModel, calls, run_turn, text
from midstream.testing.fake_worlds import Crashed, FakeWorld
from midstream.testing.scripted_model import Gate, Response, Script, steps_since_user
from midstream.testing.store_fakes import StoreInFront
from midstream.tools.function_tools import Tool, tool
from tests.spec import spec

WAIT_S = 60.0
AGE = Retention(events_for_s=3600.0, events_max=None, bytes_max=None)
COUNT = Retention(events_for_s=None, events_max=30, bytes_max=None)
BYTES = Retention(events_for_s=None, events_max=None, bytes_max=2000)


@tool(needs_approval=True)
async def publish(words: str) -> str:
    """Publish words."""
    return words


class PruningBench:
    """A host and a pruner that sweeps on the test's command."""

    def __init__(self, host: Host, memory: Memory, world: FakeWorld, retention: Retention) -> None:
        self.host = host
        self.memory = memory
        self.world = world
        self.pruner = Pruner(host, host.store, world, retention)

    async def sweep(self) -> None:
        await self.world.live_through(self.pruner.sweep())

    async def fold(self, session: str = "s") -> Session:
        """Fold a journal from the store, as the next node does."""
        return fold(await Journal(self.host.store, session, self.world).load())

    def positions(self, session: str = "s") -> list[int]:
        return [each.position for each in self.memory.sessions[session].records]

    async def turns(self, count: int, session: str = "s") -> None:
        for number in range(count):
            await run_turn(self.host, session, f"question {number}")


FOR_EVER = Retention(events_for_s=None, events_max=None, bytes_max=None)


@asynccontextmanager
async def keeping(
    retention: Retention,
    script: Script = (),
    *,
    tools: Sequence[Tool | SubAgent] = (),
    world: FakeWorld | None = None,
    store: Store | None = None,
    memory: Memory | None = None,
    of_host: Retention = FOR_EVER,
) -> AsyncIterator[PruningBench]:
    world = world or FakeWorld()
    memory = memory or Memory()
    host = Host(
        Agent(ScriptedModel(script), tools=tools),
        store or MemoryStore(memory),
        world=world,
        retention=of_host,
    )
    async with asyncio.timeout(WAIT_S):
        await host.start()
        await host.wait_for_recovery()
        # These tests move the clock by days at once: with a sweep to wake for, all the timers between would
        # fire.
        await host._sleeping.stop()
        yield PruningBench(host, memory, world, retention)
        await host.stop(grace_s=0.1)


def _script(*turns: Sequence[Response]) -> Callable[[ModelRequest], Response]:
    """Return a script of the model's text in each turn; later turns repeat the last one."""

    def response(request: ModelRequest) -> Response:
        turn = sum(isinstance(entry, UserMessage) for entry in request.history.entries) - 1
        responses = turns[min(turn, len(turns) - 1)]
        return responses[min(steps_since_user(request.history), len(responses) - 1)]

    return response


async def _until(is_true: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if is_true():
            return
        await asyncio.sleep(0)
    raise TimeoutError


async def test_the_cost_of_a_sweep_is_constant_in_a_large_store_and_reaches_all_sessions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pruning_module, "SWEEP_SESSIONS_MAX", 4)
    async with keeping(AGE, [text("one two three four", tokens=9)]) as on:
        names = [f"s{number:02}" for number in range(20)]
        for name in names:
            await on.turns(1, name)
            await on.world.advance(1.0)
        await on.world.advance(7200.0)
        pruned = []
        for _ in range(4):
            await on.sweep()
            on.pruner = Pruner(
                on.host, on.host.store, on.world, AGE
            )  # another process continues at this position
            pruned.append([name for name in names if on.positions(name)[0] > 1])
        assert pruned[0] == names[-8:]  # the most recently changed ones, and some others
        assert [len(each) for each in pruned] == [8, 12, 16, 20]
        await on.turns(1, "new")
        await on.world.advance(7200.0)
        await on.sweep()
        assert on.positions("new")[0] > 1


@spec("STREAM-60", "STREAM-61", "STREAM-62")
@pytest.mark.parametrize("retention", [AGE, COUNT, BYTES], ids=["age", "count", "bytes"])
async def test_old_and_excess_events_are_pruned_and_the_conversation_stays(
    retention: Retention, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruning_module, "UNREAD_MAX", 16)
    script = [text("one two three four", tokens=9)]
    async with keeping(retention, script) as on:
        await on.turns(6)
        before, end = await on.fold(), on.positions()[-1]
        await on.world.advance(7200.0)
        await on.sweep()
        positions = on.positions()
        assert positions == [*range(positions[0], end + 1)]
        assert positions[0] > 20
        assert await on.fold() == before
        await run_turn(on.host, "s", "and now?")
        state = await on.fold()
        assert (state.turns, len(state.history.entries)) == (7, 14)
        assert state.history == on.host.awake.get("s").state.history  # type: ignore[union-attr] # it is awake


@spec("STREAM-62")
async def test_readers_of_an_awake_session_are_informed_of_the_new_first_event() -> None:
    async with keeping(AGE, [text("one two three four", tokens=9)]) as on:
        await on.turns(2)
        runner = await on.host.session("s")
        runner.attach()
        assert runner.events.pruned_to == START
        await on.world.advance(7200.0)
        await on.sweep()
        last = on.memory.sessions["s"].records[0]
        assert runner.events.pruned_to == EventId(last.epoch, last.position)
        await on.sweep()  # there is nothing more to prune
        assert runner.events.pruned_to == EventId(last.epoch, last.position)


@spec("STREAM-61", "STREAM-62")
async def test_recent_events_within_the_limits_are_not_pruned() -> None:
    async with keeping(Retention(), [text("hello")]) as on:
        await on.turns(3)
        before = on.positions()
        await on.world.advance(3600.0)
        await on.sweep()
        assert on.positions() == before


@spec("STREAM-61")
async def test_a_running_turn_is_not_disturbed() -> None:
    go = asyncio.Event()
    slow: Response = [TextDelta("half "), Gate(go), TextDelta("whole"), Finished()]
    script = _script(*[[text("one two", tokens=7)]] * 5, [slow])
    async with keeping(Retention(events_for_s=1.0, events_max=4, bytes_max=1), script) as on:
        await on.turns(5)
        runner = await on.host.session("s")
        end = runner.newest.position
        await runner.submit(SendMessage(UserMessage.of("go on")))
        await _until(lambda: b"half" in on.memory.sessions["s"].records[-1].body)
        await on.world.advance(10.0)
        await on.sweep()
        assert on.positions()[0] == end, "everything before the open turn, nothing of it"
        go.set()
        await _until(lambda: not runner.state.is_live)
        assert (runner.state.last_turn or TurnEnded).status == "completed"
        assert (await on.fold()).history == runner.state.history


@spec("STREAM-61")
async def test_an_open_question_keeps_the_records_that_its_answer_needs() -> None:
    script = _script([text("hello", tokens=5)], [calls(("publish", '{"words": "x"}')), text("done")])
    async with keeping(
        Retention(events_for_s=1.0, events_max=2, bytes_max=1), script, tools=(publish,)
    ) as on:
        await on.turns(1)
        runner = await on.host.session("s")
        await runner.submit(SendMessage(UserMessage.of("publish x")))
        await _until(lambda: runner.state.rests_on_people)
        await on.world.advance(1e6)
        await on.sweep()
        assert on.positions()[0] > 1
        [call] = (await on.fold()).turn.calls  # type: ignore[union-attr] # it is asking
        await runner.submit(Answer(CallRef(2, 1, call.call.id), call.plan.digest, Choice.ALLOW))
        await _until(lambda: not runner.state.is_live)
        assert runner.state.history.entries[-1].response.text == "done"  # type: ignore[union-attr] # a step


@spec("STREAM-61")
async def test_a_childs_events_stay_until_its_parents_turn_has_ended() -> None:
    go = asyncio.Event()
    helper = Agent(ScriptedModel([text("found it", tokens=30), text("again", tokens=30)]))
    script: Script = [
        calls(("help", '{"task": "look"}')),
        [Gate(go), TextDelta("so"), Finished()],
    ]
    named = sub_agent(helper, name="help", description="Helps.")
    async with keeping(
        Retention(events_for_s=1.0, events_max=8, bytes_max=None), script, tools=(named,)
    ) as on:
        runner = await on.host.session("s", create=True)
        await runner.submit(SendMessage(UserMessage.of("look")))
        await _until(lambda: len(runner.state.history.entries) == 2)
        [child] = [name for name in on.memory.sessions if "::" in name]
        await on.world.advance(1e6)
        before = on.positions(child)
        await on.sweep()
        assert on.positions(child) == before
        go.set()
        await _until(lambda: not runner.state.is_live)
        await on.world.advance(1e6)
        await on.sweep()
        assert on.positions(child)[0] > 1


@spec("STREAM-68")
async def test_an_expired_session_is_deleted_and_one_with_an_open_turn_is_not() -> None:
    kept = Retention(sessions_for_s=3600.0)
    script = _script([text("hello")], [calls(("publish", '{"words": "x"}'))])
    async with keeping(kept, script, tools=(publish,)) as on:
        await run_turn(on.host, "old", "hi")
        await run_turn(on.host, "asking", "hi")
        asking = await on.host.session("asking")
        await asking.submit(SendMessage(UserMessage.of("publish x")))
        await _until(lambda: asking.state.rests_on_people)
        await on.world.advance(3600.0)
        await on.sweep()
        assert sorted(on.memory.sessions) == ["asking", "old"]
        await on.world.advance(1.0)
        await on.sweep()
        assert sorted(on.memory.sessions) == ["asking"]


@spec("STREAM-60")
@pytest.mark.parametrize("point", [Fault.BEFORE_PRUNE, Fault.AFTER_PRUNE])
async def test_a_death_during_pruning_leaves_the_journal_before_or_after(point: Fault) -> None:
    memory, world = Memory(), FakeWorld()
    async with keeping(AGE, [text("one two", tokens=9)], memory=memory, world=world) as on:
        await on.turns(4)
        before, positions = await on.fold(), on.positions()
        await world.advance(7200.0)
        world.crash_at(point)
        with pytest.raises(Crashed):
            await on.sweep()
        assert await on.fold() == before
        assert (on.positions() == positions) is (point is Fault.BEFORE_PRUNE)


@spec("STREAM-60")
async def test_a_full_store_keeps_everything_until_the_next_sweep() -> None:
    memory = Memory()
    store = FailingStore(MemoryStore(memory))
    async with keeping(AGE, [text("one two", tokens=9)], store=store, memory=memory) as on:
        await on.turns(2)
        positions = on.positions()
        await on.world.advance(7200.0)
        store.outage = StoreFullError("no room")
        with pytest.raises(StoreFullError):
            await on.sweep()
        assert on.positions() == positions
        store.outage = None
        await on.world.advance(7200.0)
        await on.sweep()
        assert on.positions() == positions[-1:]


async def test_the_caretaker_sweeps_while_the_host_lives() -> None:
    async with keeping(AGE, [text("one two", tokens=9)], of_host=AGE) as on:
        await on.turns(1)
        end = on.positions()[-1]
        for _ in range(3):
            await on.world.advance(3600.0)
        assert on.positions() == [end]
        assert isinstance(decode(on.memory.sessions["s"].records[0].body), JournalPruned)


async def test_of_two_concurrent_pruners_one_prunes() -> None:
    async with keeping(AGE, [text("one two", tokens=9)]) as on:
        await on.turns(2)
        await on.world.advance(7200.0)
        again = Pruner(on.host, on.host.store, on.world, AGE)
        before = await on.fold()
        await on.world.live_through(_both(on.pruner, again))
        assert (len(on.positions()), await on.fold()) == (1, before)


async def _both(one: Pruner, other: Pruner) -> None:
    await asyncio.gather(one.sweep(), other.sweep())


async def test_a_damaged_journal_is_left_unchanged_and_does_not_affect_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with keeping(AGE, [text("one two", tokens=9)]) as on:
        await run_turn(on.host, "bad", "hi")
        await run_turn(on.host, "good", "hi")
        records = on.memory.sessions["bad"].records
        records[2] = type(records[2])(3, records[2].epoch, b'{"type":"from_a_newer_version"}')
        await on.world.advance(7200.0)
        await on.sweep()
        assert (len(on.positions("bad")) > 1, len(on.positions("good"))) == (True, 1)
        assert "not pruned" in caplog.text


async def test_a_journal_is_not_read_again_before_pruning_is_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pruning_module, "UNREAD_MAX", 4)
    reads: list[str] = []

    class Counting(MemoryStore):
        async def read(self, session: str, *, after: int, limit: int) -> list[StoredRecord]:
            reads.append(session)
            return await super().read(session, after=after, limit=limit)

    memory = Memory()
    async with keeping(COUNT, [text("a b", tokens=2)], store=Counting(memory), memory=memory) as on:
        await on.turns(1)
        reads.clear()
        await on.sweep()
        assert len(reads) == 2, "a page, and that there is no more"
        for _ in range(3):
            await on.world.advance(SWEEP_S)
            await on.sweep()
        assert len(reads) == 2


async def test_a_sweep_that_has_read_its_limit_leaves_the_rest_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pruning_module, "SWEEP_RECORDS_MAX", 1)
    monkeypatch.setattr(retention_module, "PRUNED_AT_ONCE_MAX", 10)
    async with keeping(AGE, [text("one two", tokens=9)]) as on:
        await on.turns(5)
        end, before = on.positions()[-1], await on.fold()
        await on.world.advance(7200.0)
        begins: list[int] = []
        while on.positions()[0] != end:
            await on.sweep()
            begins.append(on.positions()[0])
        assert begins == sorted(set(begins))
        assert len(begins) > 2
        assert await on.fold() == before


async def test_pruning_continues_after_a_sweep_that_failed() -> None:
    class Damaged(StoreInFront):
        lists = 0

        async def before_operation(self, operation: str, session: str) -> None:
            self.lists += operation == "list"
            if operation == "list":
                raise StoreDamagedError("a line of the list cannot be read")

    world, store = FakeWorld(), Damaged(MemoryStore())
    host = Host(Agent(ScriptedModel([])), store, world=world)
    pruning = asyncio.create_task(Pruner(host, store, world, AGE).run())
    await world.settle()
    for sweeps in (1, 2):
        await world.advance(SWEEP_S)
        assert store.lists == sweeps
    pruning.cancel()
    await asyncio.wait({pruning}, timeout=WAIT_S)
