from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection

import pytest

from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.environment import World
from midstream.errors import (
    StoreBusyError,
    StoreDamagedError,
)
from midstream.history.messages import Step, UserMessage
from midstream.models.responses import TextDelta
from midstream.session.records import (
    AttemptStarted,
    CommandAccepted,
    EpochStarted,
    TurnStatus,
    encode,
)
from midstream.session.turn.commands import SendMessage
from midstream.store.contract import ListPlace, SessionInfo, StoredRecord
from midstream.store.memory import Memory, MemoryStore
from midstream.testing import FakeWorld, ScriptedModel, Stall, records_until_end, text
from midstream.testing.store_fakes import StoreInFront
from tests.engine.test_host import SlowTo, _die, _start
from tests.spec import spec


async def test_a_new_host_continues_where_a_dead_one_stopped() -> None:
    store = MemoryStore()
    first = await _start(Host(Agent(ScriptedModel([[TextDelta("half"), Stall()]])), store))
    runner = await first.session("s", create=True)
    await runner.submit(SendMessage(UserMessage.of("hi")))
    await _die(first)

    second = await _start(Host(Agent(ScriptedModel([text("the whole answer")])), store))
    assert (second.recovery.total, second.recovery.done, second.recovery.is_done) == (1, 1, True)
    runner = await second.session("s")
    records = await records_until_end(runner, after=0)
    assert [r.epoch for r in records if isinstance(r, EpochStarted)] == [1, 2]
    assert [r.attempt for r in records if isinstance(r, AttemptStarted)] == [1, 2]
    assert isinstance(runner.state.history.entries[-1], Step)
    assert runner.state.history.entries[-1].response.text == "the whole answer"
    await second.stop()


class LaterWorld(World):
    """Now, but `offset_s` later."""

    offset_s = 0.0

    def now(self) -> float:
        return super().now() + self.offset_s


async def test_a_turn_older_than_the_look_back_is_ended_and_its_text_is_kept() -> None:
    store = MemoryStore()
    first = await _start(Host(Agent(ScriptedModel([[TextDelta("half"), Stall()]])), store))
    runner = await first.session("s", create=True)
    await runner.submit(SendMessage(UserMessage.of("hi")))
    async with asyncio.timeout(60):
        await runner.wait(runner.newest.position)  # the text
    await _die(first)

    later = LaterWorld()
    later.offset_s = 3 * 3600.0
    second = await _start(Host(Agent(ScriptedModel([text("no")])), store, world=later))
    runner = await second.session("s")
    assert not runner.state.is_live
    assert runner.state.last_turn is not None
    assert runner.state.last_turn.status is TurnStatus.INTERRUPTED
    step = runner.state.history.entries[-1]
    assert isinstance(step, Step)
    assert step.response.text == "half"
    await second.stop()


@spec("TURN-18")
async def test_a_turn_that_waits_for_a_model_survives_any_number_of_nodes() -> None:
    store = MemoryStore()
    stalling = Agent(ScriptedModel([[Stall()]]))
    host = await _start(Host(stalling, store))
    await (await host.session("s", create=True)).submit(SendMessage(UserMessage.of("hi")))
    for _ in range(10):
        await _die(host)
        host = await _start(Host(stalling, store))
    assert (await host.session("s")).state.is_live
    await host.stop()


class SlowList(MemoryStore):
    """A store whose listings of live sessions fail at first."""

    def __init__(self, memory: Memory, error: Exception) -> None:
        super().__init__(memory)
        self.error = error
        self.failures = 2

    def list(
        self,
        *,
        live: bool | None = None,
        of: Collection[str] | None = None,
        after: ListPlace | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[SessionInfo]:
        if live:  # the opening of the store reads a list, too
            self.failures -= 1
            if self.failures >= 0:
                raise self.error
        return super().list(live=live, of=of, after=after, limit=limit)


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (StoreBusyError("locked"), logging.WARNING),
        (StoreDamagedError("bad row"), logging.ERROR),
        (KeyError("x"), logging.ERROR),
    ],
    ids=["outage", "damage", "defect"],
)
async def test_recovery_lists_again_until_the_store_answers(
    error: Exception, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    memory = Memory()
    first = await _start(Host(Agent(ScriptedModel([[Stall()]])), MemoryStore(memory)))
    await (await first.session("s", create=True)).submit(SendMessage(UserMessage.of("hi")))
    await first.stop()
    world = FakeWorld()
    second = Host(Agent(ScriptedModel([text("a")])), SlowList(memory, error), world=world)
    await second.start()
    await world.settle()
    await world.advance(10.0)
    assert (second.recovery.total, second.recovery.is_done) == (1, True)
    assert [each.levelno for each in caplog.records if each.levelno >= logging.WARNING] == [level] * 2
    await second.stop()


async def test_a_defect_in_one_session_does_not_cost_the_recovery_of_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Defective(StoreInFront):
        async def before_operation(self, operation: str, session: str) -> None:
            if (operation, session) == ("read", "bad"):
                raise KeyError("a defect")

    store = MemoryStore()
    first = await _start(Host(Agent(ScriptedModel([[Stall()]])), store))
    for name in ("bad", "good"):
        await (await first.session(name, create=True)).submit(SendMessage(UserMessage.of("hi")))
    await first.stop()
    second = await _start(Host(Agent(ScriptedModel([text("a")])), Defective(store)))
    assert (second.recovery.done, second.recovery.failed, second.recovery.is_done) == (2, 1, True)
    assert "a defect stopped the recovery of a session" in caplog.text
    await records_until_end(await second.session("good"), after=0)
    await second.stop()


async def test_a_journal_that_does_not_fold_is_counted_and_the_others_are_recovered() -> None:
    memory = Memory()
    store = MemoryStore(memory)
    first = await _start(Host(Agent(ScriptedModel([[Stall()]])), store))
    for name in ("bad", "good"):
        await (await first.session(name, create=True)).submit(SendMessage(UserMessage.of("hi")))
    await first.stop()
    body = encode(CommandAccepted("a stream that was never opened", 0, "digest"))
    memory.sessions["bad"].records.append(StoredRecord(4, 1, body))
    second = await _start(Host(Agent(ScriptedModel([text("a")])), store))
    assert (second.recovery.done, second.recovery.failed) == (2, 1)
    await records_until_end(await second.session("good"), after=0)
    with pytest.raises(StoreDamagedError, match="'bad'"):
        await second.session("bad")
    await second.stop()


async def test_a_caller_that_stops_waiting_does_not_stop_the_recovery() -> None:
    store = SlowTo("list", MemoryStore())
    host = Host(Agent(ScriptedModel([])), store)
    store.may_continue.set()
    await host.start()
    store.may_continue.clear()
    waiting = asyncio.create_task(host.wait_for_recovery())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    store.may_continue.set()
    async with asyncio.timeout(60):
        await host.wait_for_recovery()
    assert host.recovery.is_done
    await host.stop()
