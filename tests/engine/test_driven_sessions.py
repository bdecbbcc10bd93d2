"""A foreign loop on a real journal: replayed, grouped, refused, and not run by a host."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import cast

import pytest

from midstream.engine.agent import Agent
from midstream.engine.driven_sessions import DrivenTurn, Driver
from midstream.engine.host import Host
from midstream.environment import Fault
from midstream.errors import (
    AgentMismatchError,
    LeaseHeldError,
    SessionBusyError,
    StoreDamagedError,
    StoreFullError,
    StreamReusedError,
    UnavailableError,
    UsageError,
)
from midstream.history.messages import Finish, Response, Text, ToolCall, ToolResult, UserMessage
from midstream.session.calls import UNKNOWN_CONTENT
from midstream.session.records import (
    CallEnded,
    CallStarted,
    Delta,
    EpochStarted,
    Record,
    ResponseCompleted,
    TurnEnded,
    TurnStatus,
    decode,
)
from midstream.store.memory import Memory, MemoryStore
from midstream.testing.fake_worlds import SETTLE_TURNS, Crashed, FakeWorld
from midstream.testing.scripted_model import ScriptedModel
from midstream.testing.store_fakes import FailingStore
from midstream.tools.function_tools import CallContext
from tests.spec import spec

GO = UserMessage.of("go")
ASKS = Response((ToolCall("a", "work"), ToolCall("b", "work")), Finish.CALLS)
DONE = Response((Text("done"),))


async def stored(memory: Memory, session: str = "s") -> list[Record]:
    store = MemoryStore(memory)
    await store.open()
    return [decode(each.body) for each in await store.read(session, after=0, limit=1000)]


def kinds(records: Sequence[Record]) -> list[str]:
    return [type(record).__name__ for record in records]


async def called(turn: DrivenTurn, call_id: str) -> str:
    started = await turn.start(call_id)
    if isinstance(started, CallContext):
        await turn.journal_outcome(ToolResult(started.call_id, f"{call_id} ran"), "")
        return f"{call_id} ran"
    return started.result.content


async def test_a_whole_turn_is_four_appends() -> None:
    memory = Memory()
    store = FailingStore(MemoryStore(memory))
    driver = Driver("loop", store)
    turn = await driver.begin("s", GO)
    assert await turn.request_response({}) is None
    await turn.journal_response(ASKS, (), "native")
    assert [*await asyncio.gather(called(turn, "a"), called(turn, "b"))] == ["a ran", "b ran"]
    assert await turn.request_response({}) is None
    await turn.journal_response(DONE, (), "")
    await turn.close(TurnStatus.COMPLETED, {})
    driver.leave("s")
    # begin; response and both starts; two outcomes (one append if they arrive together); the answer; the end
    assert store.appends <= 6
    assert kinds(await stored(memory))[-2:] == ["StepCommitted", "TurnEnded"]
    turn = await driver.begin("s", UserMessage.of("more"))
    assert turn.number == 2
    assert [type(record) for record in await stored(memory)].count(EpochStarted) <= 2


async def test_observers_receive_the_records_of_a_driven_turn() -> None:
    observed: list[Record] = []

    class Noting:
        def on_append(self, session: str, records: Sequence[Record]) -> None:
            assert session == "s"
            observed.extend(records)

    memory = Memory()
    driver = Driver("loop", MemoryStore(memory), observers=[Noting()])
    turn = await driver.begin("s", GO)
    await turn.request_response({})
    turn.journal_output((Delta(*turn.next_place, 0, "text", "one"),))
    await turn.journal_response(ASKS, (), "native")
    await asyncio.gather(called(turn, "a"), called(turn, "b"))
    await turn.request_response({})
    await turn.journal_response(DONE, (), "")
    await turn.close(TurnStatus.COMPLETED, {})
    driver.leave("s")
    assert observed == [record for record in await stored(memory) if not isinstance(record, Delta)]


async def test_deltas_are_journaled_before_their_response() -> None:
    memory = Memory()
    driver = Driver("loop", MemoryStore(memory))
    turn = await driver.begin("s", GO)
    await turn.request_response({})
    for word in ("one ", "two"):
        turn.journal_output((Delta(*turn.next_place, 0, "text", word),))
    await turn.journal_response(DONE, (), "")
    records = await stored(memory)
    assert [record.text for record in records if isinstance(record, Delta)] == ["one two"]
    assert kinds(records)[-3:] == ["Delta", "ResponseCompleted", "StepCommitted"]


@spec("DRIVEN-5")
async def test_a_delayed_response_is_written_soon_even_without_a_call() -> None:
    memory = Memory()
    driver = Driver("loop", MemoryStore(memory))
    turn = await driver.begin("s", GO)
    await turn.request_response({})
    await turn.journal_response(ASKS, (), "")
    async with asyncio.timeout(60):
        async for record in driver.follow("s"):
            if isinstance(decode(record.body), ResponseCompleted):
                break


@spec("DRIVEN-1", "DRIVEN-6")
@pytest.mark.parametrize(
    "point", [Fault.BEFORE_APPEND, Fault.AFTER_APPEND, Fault.BEFORE_TOOL, Fault.AFTER_TOOL]
)
@pytest.mark.parametrize("count", range(1, 7))
async def test_after_a_death_at_any_point_the_next_process_continues(point: Fault, count: int) -> None:
    memory, ran = Memory(), list[str]()

    async def loop(driver: Driver) -> list[str]:
        turn = await driver.begin("s", GO, key="k", digest="d")
        if await turn.request_response({}) is None:
            await turn.journal_response(ASKS, (), "")
        answers = []
        for call_id in ("a", "b"):
            started = await turn.start(call_id)
            if isinstance(started, CallEnded):
                answers.append(started.result.content)
                continue
            ran.append(call_id)
            answers.append(f"{call_id} ran")
            await turn.journal_outcome(ToolResult(started.call_id, answers[-1]), "")
        if await turn.request_response({}) is None:
            await turn.journal_response(DONE, (), "")
        await turn.close(TurnStatus.COMPLETED, {})
        return answers

    world = FakeWorld()
    world.crash_at(point, count=count)
    first = Driver("loop", MemoryStore(memory, world=FakeWorld(1)), world=world)
    try:
        async with asyncio.timeout(60):
            await loop(first)
    except (Crashed, UnavailableError):
        pass
    memory.living.clear()
    answers = await loop(Driver("loop", MemoryStore(memory, world=FakeWorld(2)), world=FakeWorld(3)))
    assert sorted(set(ran)) == sorted(ran)  # nothing ran twice
    assert all(answer in ("a ran", "b ran", UNKNOWN_CONTENT) for answer in answers)
    assert [name for name in ("a", "b") if f"{name} ran" in answers and name not in ran] == []
    records = await stored(memory)
    assert kinds(records).count("TurnEnded") == 1
    assert len([record for record in records if isinstance(record, CallEnded)]) == 2


async def test_an_outcome_waits_while_the_store_is_full() -> None:
    memory, world = Memory(), FakeWorld()
    store = FailingStore(MemoryStore(memory))
    driver = Driver("loop", store, world=world)
    turn = await driver.begin("s", GO)
    await turn.request_response({})
    await turn.journal_response(ASKS, (), "")
    started = await turn.start("a")
    assert isinstance(started, CallContext)
    store.outage = StoreFullError("no room")
    ending = asyncio.create_task(turn.journal_outcome(ToolResult("a", "1"), ""))
    await world.advance(1.0)
    assert not ending.done()
    store.outage = None
    await world.advance(60.0)
    await ending
    assert kinds(await stored(memory))[-1] == "CallEnded"


async def test_a_background_failure_is_raised_in_the_next_call() -> None:
    store = FailingStore(MemoryStore(), {2: StoreDamagedError("gone")})
    driver = Driver("loop", store)
    turn = await driver.begin("s", GO)
    await turn.request_response({})
    turn.journal_output((Delta(*turn.next_place, 0, "text", "word"),))
    for _ in range(SETTLE_TURNS):
        await asyncio.sleep(0)
    assert store.appends == 2
    with pytest.raises(StoreDamagedError):
        await turn.journal_response(DONE, (), "")
    driver.leave("s")
    with pytest.raises(SessionBusyError, match="left open"):
        await driver.begin("s", UserMessage.of("other"))


async def test_a_failed_first_append_leaves_nothing_behind() -> None:
    memory = Memory()
    driver = Driver("loop", FailingStore(MemoryStore(memory), {1: StoreFullError("no room")}))
    with pytest.raises(StoreFullError):
        await driver.begin("s", GO)
    assert await stored(memory) == []
    assert (await driver.begin("s", GO)).number == 1


@pytest.mark.parametrize("key", [5, None, "\ud800"])
async def test_a_key_that_cannot_be_stored_is_refused_by_its_name(key: object) -> None:
    driver = Driver("test", MemoryStore())
    with pytest.raises(UsageError, match="`key` is "):
        await driver.begin("s", GO, key=cast(str, key), digest="d")
    assert (await driver.begin("s", GO)).number == 1


async def test_a_key_of_another_message_is_refused_by_its_name() -> None:
    driver = Driver("test", MemoryStore())
    await driver.begin("s", GO, key="k", digest="d")
    driver.leave("s")
    with pytest.raises(StreamReusedError, match="`key` 'k' was used for another message of session 's'"):
        await driver.begin("s", GO, key="k", digest="other")


@spec("DRIVEN-3")
async def test_a_message_without_a_key_continues_an_equal_one_with_a_key() -> None:
    driver = Driver("loop", MemoryStore())
    for key in ("k", "", "k"):
        assert (await driver.begin("s", GO, key=key, digest="d", cancels=True)).number == 1
        driver.leave("s")


@spec("DRIVEN-3", "DRIVEN-9")
@pytest.mark.parametrize("first", ["", "k1"])
async def test_an_equal_message_under_a_new_key_is_another_message(first: str) -> None:
    memory = Memory()
    driver = Driver("loop", MemoryStore(memory))
    await driver.begin("s", GO, key=first, digest="d")
    driver.leave("s")
    before = await stored(memory)
    with pytest.raises(SessionBusyError, match="its own message and key"):
        await driver.begin("s", GO, key="k2", digest="d")
    assert [each for each in await stored(memory) if not isinstance(each, EpochStarted)] == [
        each for each in before if not isinstance(each, EpochStarted)
    ]
    for _ in range(2):  # also after the end
        turn = await driver.begin("s", GO, key="k2", digest="d", cancels=True)
        assert turn.number == 2
        assert kinds(turn.cancelled)[0] == "MessageAccepted"
        if await turn.request_response({}) is None:
            await turn.journal_response(DONE, (), "")
        await turn.close(TurnStatus.COMPLETED, {})
        driver.leave("s")
    ends = [record.status for record in await stored(memory) if isinstance(record, TurnEnded)]
    assert ends == [TurnStatus.CANCELLED, TurnStatus.COMPLETED]
    if first:
        with pytest.raises(UsageError, match="ended as cancelled"):
            await driver.begin("s", GO, key=first, digest="d", cancels=True)


@spec("DRIVEN-3", "DRIVEN-9")
@pytest.mark.parametrize("first", ["", "k1"])
@pytest.mark.parametrize("point", [Fault.BEFORE_APPEND, Fault.AFTER_APPEND])
@pytest.mark.parametrize("count", range(1, 7))
async def test_a_second_key_runs_each_call_once_also_after_a_death(
    first: str, point: Fault, count: int
) -> None:
    memory, ran = Memory(), list[tuple[int, str]]()

    async def loop(driver: Driver, key: str) -> int:
        turn = await driver.begin("s", GO, key=key, digest="d", cancels=True)
        if await turn.request_response({}) is None:
            await turn.journal_response(ASKS, (), "")
        for call_id in ("a", "b"):
            started = await turn.start(call_id)
            if isinstance(started, CallContext):
                ran.append((turn.number, call_id))
                await turn.journal_outcome(ToolResult(started.call_id, "ran"), "")
        if key == first:
            raise LookupError("the model is down")
        if await turn.request_response({}) is None:
            await turn.journal_response(DONE, (), "")
        await turn.close(TurnStatus.COMPLETED, {})
        driver.leave("s")
        return turn.number

    def process(seed: int, world: FakeWorld) -> Driver:
        memory.living.clear()
        return Driver("loop", MemoryStore(memory, world=FakeWorld(seed)), world=world)

    with pytest.raises(LookupError):
        await loop(process(1, FakeWorld()), first)
    dying = FakeWorld(2)
    dying.crash_at(point, count=count)
    with contextlib.suppress(Crashed, UnavailableError):
        async with asyncio.timeout(60):
            await loop(process(3, dying), "k2")
    assert [await loop(process(seed, FakeWorld(seed)), "k2") for seed in (4, 5)] == [2, 2]
    assert sorted(set(ran)) == sorted(ran)
    ends = [record.status for record in await stored(memory) if isinstance(record, TurnEnded)]
    assert ends == [TurnStatus.CANCELLED, TurnStatus.COMPLETED]


@spec("DRIVEN-7")
async def test_another_process_is_refused_while_the_first_one_lives() -> None:
    memory = Memory()
    first, second = Driver("loop", MemoryStore(memory)), Driver("loop", MemoryStore(memory))
    turn = await first.begin("s", GO)
    before = await stored(memory)
    for message in (GO, UserMessage.of("something else")):
        for goes_on in (False, True):
            with pytest.raises(LeaseHeldError):
                await second.begin("s", message, goes_on=goes_on, cancels=True)
    with pytest.raises(LeaseHeldError):
        await second.abandon("s")
    assert await stored(memory) == before
    assert await turn.request_response({}) is None
    await first.close()
    assert await (await second.begin("s", GO)).request_response({}) is None


async def test_a_driver_with_another_name_does_not_continue() -> None:
    memory = Memory()
    driver = Driver("loop", MemoryStore(memory))
    await driver.begin("s", GO)
    await driver.close()
    other = Driver("other", MemoryStore(memory))
    with pytest.raises(SessionBusyError):
        await other.begin("s", GO)
    assert [each async for each in other.open_turns()] == []


@pytest.mark.parametrize("session", ["", "a b", "x" * 129])
async def test_a_session_needs_a_plain_name(session: str) -> None:
    with pytest.raises(UsageError, match="a session id has"):
        await Driver("loop", MemoryStore()).begin(session, GO)


async def test_a_session_without_a_run_in_this_process_cannot_be_followed() -> None:
    with pytest.raises(UsageError, match="no run of this process"):
        await anext(Driver("loop", MemoryStore()).follow("s"))


@spec("DRIVEN-2")
async def test_a_host_reads_a_driven_session_and_runs_nothing_of_it() -> None:
    memory = Memory()
    driver = Driver("loop", MemoryStore(memory))
    turn = await driver.begin("s", GO)
    await turn.request_response({})
    await turn.journal_response(ASKS, (), "")
    await turn.start("a")
    await driver.close()
    before = await stored(memory)
    host = Host(Agent(ScriptedModel([])), MemoryStore(memory))
    await host.start()
    await host.wait_for_recovery()
    runner = await host.session("s")
    assert [decode(each.body) for each in await runner.read(after=0, limit=100)] == before
    await host.stop()
    assert await stored(memory) == before
    later = await Driver("loop", MemoryStore(memory)).begin("s", GO)
    assert (await later.request_response({})) == next(
        record for record in before if isinstance(record, ResponseCompleted)
    )
    doubtful = await later.start("a")
    assert isinstance(doubtful, CallEnded)
    assert doubtful.result.content == UNKNOWN_CONTENT


async def test_the_journal_of_an_abandoned_turn_has_its_end() -> None:
    memory = Memory()
    driver = Driver("loop", MemoryStore(memory))
    await driver.begin("s", GO)
    with pytest.raises(SessionBusyError):
        await driver.abandon("s")
    driver.leave("s")
    await driver.abandon("s")
    await driver.abandon("s")  # again: nothing is open
    ends = [record for record in await stored(memory) if isinstance(record, TurnEnded)]
    assert [end.status for end in ends] == [TurnStatus.INTERRUPTED]
    assert [record for record in await stored(memory) if isinstance(record, CallStarted)] == []


@spec("DRIVEN-7")
async def test_between_turns_a_session_is_free_for_other_processes() -> None:
    memory = Memory()
    first, second = Driver("loop", MemoryStore(memory)), Driver("loop", MemoryStore(memory))

    async def run_turn(driver: Driver, words: str) -> int:
        turn = await driver.begin("s", UserMessage.of(words))
        await turn.request_response({})
        await turn.journal_response(DONE, (), "")
        await turn.close(TurnStatus.COMPLETED, {})
        driver.leave("s")
        for _ in range(SETTLE_TURNS):
            await asyncio.sleep(0)
        assert memory.sessions["s"].node is None
        return turn.number

    turns = [await run_turn(driver, str(n)) for n, driver in enumerate((first, second, first, first, second))]
    assert turns == [1, 2, 3, 4, 5]
    assert kinds(await stored(memory)).count("TurnEnded") == 5


async def test_an_immediate_next_turn_keeps_the_session() -> None:
    memory = Memory()
    driver = Driver("loop", MemoryStore(memory))
    await driver.begin("s", GO)
    for _ in range(3):
        driver.leave("s")
        turn = await driver.begin("s", GO)
        assert await turn.request_response({}) is None
        assert memory.sessions["s"].node is not None


@spec("DRIVEN-10")
@pytest.mark.parametrize(("agent", "version"), [("thief", ""), ("cook", "2")])
async def test_a_turn_of_another_agent_is_neither_continued_nor_listed(agent: str, version: str) -> None:
    memory = Memory()
    cook = Driver("loop", MemoryStore(memory), agent="cook", agent_version="1")
    await (await cook.begin("s", GO, key="k")).request_response({})
    await cook.close()
    before = await stored(memory)
    assert [each.agent for each in before if isinstance(each, EpochStarted)] == ["cook"]
    other = Driver("loop", MemoryStore(memory), agent=agent, agent_version=version)
    assert [each async for each in other.open_turns()] == []
    for key, goes_on in (("", False), ("k", False), ("", True)):
        runs = f"belongs to the agent 'cook' 1, and this program runs {agent!r} {version}".strip()
        with pytest.raises(AgentMismatchError, match=f"{runs}: run that agent"):
            await other.begin("s", GO, key=key, goes_on=goes_on)
    assert await stored(memory) == before
    await other.close()
    for name in ("cook", ""):  # its own agent, or a program without a name
        driver = Driver("loop", MemoryStore(memory), agent=name)
        assert [each.session async for each in driver.open_turns()] == ["s"]
        assert (await driver.begin("s", GO)).number == 1
        await driver.close()
    another = Driver("loop", MemoryStore(memory), agent=agent, agent_version=version)
    await another.abandon("s")
    assert (await another.begin("s", UserMessage.of("more"))).number == 2


@spec("DRIVEN-7")
async def test_a_run_cancelled_during_its_start_leaves_the_session_free() -> None:
    for turns in range(1, 30):
        memory = Memory()
        driver = Driver("loop", MemoryStore(memory))
        beginning = asyncio.create_task(driver.begin("s", GO))
        for _ in range(turns):
            await asyncio.sleep(0)
        if beginning.done():
            break
        beginning.cancel()
        await asyncio.wait([beginning])
        for _ in range(SETTLE_TURNS):
            await asyncio.sleep(0)
        assert "s" not in memory.sessions or memory.sessions["s"].node is None
        assert (await driver.begin("s", GO)).number == 1
    else:
        pytest.fail("the turn never began")


@spec("DRIVEN-6")
async def test_only_a_late_outcome_of_a_finished_run_is_accepted() -> None:
    memory = Memory()
    driver = Driver("loop", MemoryStore(memory))
    first = await driver.begin("s", GO)
    await first.request_response({})
    await first.journal_response(ASKS, (), "")
    started = await first.start("a")
    assert isinstance(started, CallContext)
    driver.leave("s")
    second = await driver.begin("s", GO)
    known = await second.request_response({})
    assert known is not None
    await first.journal_outcome(ToolResult("a", "late"), "")
    first.journal_output((Delta(*first.next_place, 0, "text", "word"),))
    await first.journal_failure("model_failed", "late")
    for act in (first.request_response({}), first.start("b"), first.journal_response(DONE, (), "")):
        with pytest.raises(UsageError, match="has left turn 1"):
            await act
    assert await called(second, "a") == "late"
    assert await called(second, "b") == "b ran"
    driver.leave("s", first)  # once more: the second run is not disturbed
    assert await second.request_response({}) is None
    await second.journal_response(DONE, (), "")
    await second.close(TurnStatus.COMPLETED, {})
    records = await stored(memory)
    assert [record.result.content for record in records if isinstance(record, CallEnded)] == ["late", "b ran"]
    assert [record for record in records if isinstance(record, Delta)] == []


@spec("DRIVEN-5")
async def test_a_loop_that_waits_for_people_has_everything_in_the_journal() -> None:
    memory = Memory()
    driver = Driver("loop", MemoryStore(memory))
    turn = await driver.begin("s", GO)
    await turn.request_response({})
    await turn.journal_response(ASKS, (), "")
    assert turn.find_response({"a", "b"}) == 1
    assert "ResponseCompleted" not in kinds(await stored(memory))
    await turn.pause()
    assert kinds(await stored(memory))[-1] == "ResponseCompleted"
