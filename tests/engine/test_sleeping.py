"""Idle sessions sleep, by time and by bytes; sessions with readers or work stay awake."""

from __future__ import annotations

import asyncio
import logging
import math
from pathlib import Path

import pytest

from midstream import Agent, Host, MemoryLimits
from midstream.engine.agent import sub_agent
from midstream.engine.sleeping import TAIL_BYTES_MIN
from midstream.errors import StoreBusyError, UsageError
from midstream.history.messages import UserMessage
from midstream.models.responses import ModelRequest
from midstream.session.turn.commands import SendMessage
from midstream.store.memory import MemoryStore
from midstream.store.sqlite import SQLiteStore
from midstream.testing import ScriptedModel, calls, run_turn, text
from midstream.testing.fake_worlds import FakeWorld
from midstream.testing.scripted_model import ScriptedStep, Stall
from midstream.testing.store_fakes import StoreInFront
from tests.spec import spec

KIB = 1024
LONG = f"{'long' * 10}word " * 2_000
MANY_WORDS = "word " * 20_000


@spec("TURN-88")
async def test_an_idle_session_sleeps_after_a_minute_and_wakes_on_demand() -> None:
    world = FakeWorld()
    async with Host(Agent(ScriptedModel([text("a")])), MemoryStore(), world=world) as host:
        await host.wait_for_recovery()
        await run_turn(host, "s", "one")
        await world.advance(55)
        assert host.awake.get("s") is not None
        await world.advance(15)
        assert (host.awake.get("s"), len(host.awake)) == (None, 0)
        await run_turn(host, "s", "two")
        assert len((await host.session("s")).state.history.entries) == 4


async def test_each_use_restarts_the_minute() -> None:
    world = FakeWorld()
    async with Host(Agent(ScriptedModel([text("a")])), MemoryStore(), world=world) as host:
        await host.wait_for_recovery()
        await run_turn(host, "s", "one")
        for _ in range(5):
            await world.advance(40)
            await host.session("s")
        assert host.awake.get("s") is not None
        await world.advance(80)
        assert host.awake.get("s") is None


async def test_sessions_with_readers_or_work_stay_awake() -> None:
    world = FakeWorld()

    def response(request: ModelRequest) -> list[ScriptedStep]:
        return [Stall()] if "think" in repr(request.history.entries[-1]) else text("a")

    async with Host(Agent(ScriptedModel(response)), MemoryStore(), world=world) as host:
        await host.wait_for_recovery()
        await run_turn(host, "read", "one")
        (await host.session("read")).attach()
        busy = await host.session("busy", create=True)
        await busy.submit(SendMessage(UserMessage.of("think")))
        await world.advance(100)
        assert sorted(each for each in ("read", "busy") if host.awake.get(each)) == ["busy", "read"]
        (await host.session("read")).detach()
        await world.advance(100)
        assert host.awake.get("read") is None


@pytest.mark.slow
@spec("TURN-89")
async def test_all_sessions_together_stay_within_the_limit(tmp_path: Path) -> None:
    limit, count = 1000 * KIB, 12
    agent = Agent(ScriptedModel([text(LONG)]))
    async with Host(agent, SQLiteStore(tmp_path / "s.db"), memory=MemoryLimits(bytes_max=limit)) as host:
        await host.wait_for_recovery()
        most = 0
        for number in range(count):
            assert await host.ask(f"s{number}", "tell me") == LONG
            most = max(most, host.memory_held)
        largest = (await host.session(f"s{count - 1}")).journal.bytes_held
        assert most <= limit + largest
        assert 1 < len(host.awake) < count
        for number in range(count):
            runner = await host.session(f"s{number}")
            assert len(runner.state.history.entries) == 2
            assert host.memory_held <= limit + largest


async def test_busy_sessions_above_the_limit_keep_fewer_events(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = FakeWorld()
    agent = Agent(ScriptedModel([[*text(MANY_WORDS)[:-1], Stall()]]))
    limits = MemoryLimits(bytes_max=100 * KIB)
    async with Host(agent, MemoryStore(), world=world, memory=limits) as host:
        await host.wait_for_recovery()
        runner = await host.session("s", create=True)
        await runner.submit(SendMessage(UserMessage.of("tell me")))
        async with asyncio.timeout(60):
            while runner.journal.bytes_held < 2 * len(MANY_WORDS):
                await runner.wait(runner.newest.position)
        before = await runner.read(after=0, limit=100_000)
        with caplog.at_level(logging.WARNING, "midstream.engine.sleeping"):
            await world.advance(20)
        assert runner.journal.bytes_held < 2 * len(MANY_WORDS) + TAIL_BYTES_MIN
        assert (await runner.read(after=0, limit=100_000))[: len(before)] == before
        assert [each.message.partition(" hold")[0] for each in caplog.records] == ["1 busy sessions"]


@pytest.mark.parametrize("wrong", [{"bytes_max": 0}, {"idle_s": 0.0}])
def test_limits_are_positive(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=r"expected (an integer, 1 or more|more than 0)"):
        MemoryLimits(**wrong)  # type: ignore[arg-type] # one of each kind


def test_limits_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(UsageError, match="`idle_s`"):
        MemoryLimits(idle_s=math.nan)


async def test_a_session_that_is_not_released_does_not_keep_its_sub_agents_awake() -> None:
    class Busy(StoreInFront):
        async def before_operation(self, operation: str, session: str) -> None:
            if (operation, session) == ("release", "s"):
                raise StoreBusyError("busy")

    helper = sub_agent(
        Agent(ScriptedModel([text("found")]), name="finder"), name="research", description="Finds."
    )
    ask = calls(("research", '{"task": "find it"}'))
    host = Host(Agent(ScriptedModel([ask, text("thanks")]), tools=[helper]), Busy(MemoryStore()))
    await host.start()
    await host.wait_for_recovery()
    await run_turn(host, "s", "hi")
    family = host.awake.family_of("s")
    assert len(family) == 2
    with pytest.raises(StoreBusyError):
        await host.put_to_sleep("s")
    assert [runner.has_failed for runner in family] == [True, True]
    await host.stop()
