from __future__ import annotations

import asyncio

import pytest

from midstream.agents.live_agents import LiveAgents
from midstream.agents.upstream_abilities import Abilities
from midstream.agents.upstreams import Setup, UpstreamAgent
from midstream.testing import FakeWorld
from midstream.testing.scripted_upstream import ScriptedAgent, ScriptedUpstream, UpstreamMemory
from tests.agents.pooling import PoolApplication, PoolBench
from tests.spec import spec

SETUP = Setup("be brief")


async def test_an_idle_agent_is_reused_for_the_same_setup() -> None:
    upstream, _, live = _live_agents()
    await _take_and_release(live, "agent-1")
    await _take(live, "agent-1")
    assert upstream.opened == ["agent-1"]


async def test_an_agent_with_another_setup_is_closed_and_resumed() -> None:
    upstream, _, live = _live_agents()
    await _take_and_release(live, "agent-1")
    await _take(live, "agent-1", Setup("be long"))
    assert upstream.opened == ["agent-1", "agent-1"]
    assert upstream.live_max == 1


async def test_an_agent_that_was_idle_for_too_long_is_closed_and_resumed() -> None:
    upstream, world, live = _live_agents()
    await _take_and_release(live, "agent-1")
    await world.advance(300.0)
    await _take(live, "agent-1")
    assert upstream.opened == ["agent-1", "agent-1"]
    assert upstream.live == 1


@spec("REUSE-46")
async def test_idle_agents_are_closed_in_time_without_a_further_turn() -> None:
    upstream, world, live = _live_agents(agents=2)
    await _take_and_release(live, "agent-1")
    await world.advance(100.0)
    await _take_and_release(live, "agent-2")
    await world.advance(199.0)
    assert upstream.live == 2
    await world.advance(1.0)
    assert upstream.live == 1
    await world.advance(100.0)
    assert (upstream.live, live.resting, world.next_wake_at) == (0, 0, None)


async def test_only_agents_in_a_turn_exceed_the_cap() -> None:
    upstream, world, live = _live_agents(agents=6, live_max=3)
    for number in range(1, 6):
        await _take_and_release(live, f"agent-{number}")
        await world.settle()
    assert (upstream.live, live.resting) == (3, 3)
    for number in range(3, 7):
        await _take(live, f"agent-{number}")
    await world.settle()
    assert (upstream.live, live.resting) == (4, 0)


async def test_a_deleted_agent_is_closed_first() -> None:
    upstream, world, live = _live_agents()
    await _take_and_release(live, "agent-1")
    live.delete("agent-1")
    await world.settle()
    assert (upstream.live, upstream.memory.forgotten) == (0, ["agent-1"])


async def test_closing_waits_for_all_agents() -> None:
    upstream, _, live = _live_agents(agents=3)
    for number in range(1, 4):
        await _take_and_release(live, f"agent-{number}")
    agent = await live.open(SETUP)
    live.close(agent, deleted="agent-2")
    await live.aclose()
    assert (upstream.live, upstream.memory.forgotten) == (0, ["agent-2"])


async def test_an_agent_that_cannot_be_closed_or_deleted_does_not_affect_others() -> None:
    class Stubborn(ScriptedUpstream):
        async def delete(self, agent: str) -> None:
            raise OSError(agent)

    upstream = Stubborn()
    live = LiveAgents(upstream, FakeWorld(), live_max=2, rest_s=300.0, close_s=5.0)
    live.close(await live.open(SETUP), deleted="agent-1")
    await live.aclose()
    assert upstream.live == 0


async def test_two_agents_of_one_conversation_are_never_open_at_once() -> None:
    class Slow(ScriptedAgent):
        async def aclose(self) -> None:
            await asyncio.sleep(0)
            await super().aclose()

    class SlowUpstream(ScriptedUpstream):
        async def open(self, setup: Setup, *, resume: str = "") -> ScriptedAgent:
            return Slow(self, setup, resume)

    world = FakeWorld()
    upstream = SlowUpstream(_memory(2))
    live = LiveAgents(upstream, world, live_max=1, rest_s=300.0, close_s=5.0)
    await _take_and_release(live, "agent-1")
    await _take_and_release(live, "agent-2")  # agent-1 must be closed
    before = upstream.live
    await _take(live, "agent-1")
    assert upstream.live <= before


def _memory(agents: int) -> UpstreamMemory:
    memory = UpstreamMemory()
    for _ in range(agents):
        memory.begin()
    return memory


@spec("REUSE-46")
async def test_beyond_the_memory_limit_the_longest_idle_agents_are_closed_and_none_in_a_turn() -> None:
    upstream, world = ScriptedUpstream(abilities=Abilities(has_process=True)), FakeWorld()

    def measure() -> float:
        return 100.0 * upstream.live

    limits = {"live_max": 8, "rest_s": 300.0, "close_s": 5.0}
    live = LiveAgents(upstream, world, **limits, memory_mib_max=250.0, measure=measure)  # type: ignore[arg-type]
    for _ in range(4):
        upstream.memory.begin()
    await _take_and_release(live, "agent-1")
    await _take(live, "agent-1")
    for number in range(2, 5):
        await _take_and_release(live, f"agent-{number}")
        await _await_open(world, upstream, 2)
    assert not live.has(SETUP, "agent-3")
    assert live.has(SETUP, "agent-4")
    await live.aclose()


async def _await_open(world: FakeWorld, upstream: ScriptedUpstream, live: int) -> None:
    """Wait until this many agents are open: the measurement runs in a thread."""
    async with asyncio.timeout(60):
        while upstream.live > live:
            await world.settle()
            await asyncio.sleep(0)


def _live_agents(*, agents: int = 1, live_max: int = 8) -> tuple[ScriptedUpstream, FakeWorld, LiveAgents]:
    world, upstream = FakeWorld(), ScriptedUpstream(_memory(agents))
    return upstream, world, LiveAgents(upstream, world, live_max=live_max, rest_s=300.0, close_s=5.0)


async def _take_and_release(live: LiveAgents, name: str) -> None:
    live.rest(name, await _take(live, name), SETUP)


async def _take(live: LiveAgents, name: str, setup: Setup = SETUP) -> UpstreamAgent:
    return await live.take(setup, name) or await live.open(setup, resume=name)


@spec("REUSE-46")
async def test_the_upstream_is_closed_even_if_the_end_of_an_agent_is_not_awaited() -> None:
    asked = asyncio.Event()

    class Slow(ScriptedAgent):
        async def aclose(self) -> None:
            asked.set()
            await asyncio.Event().wait()

    class Upstream(ScriptedUpstream):
        async def open(self, setup: Setup, *, resume: str = "") -> ScriptedAgent:
            return Slow(self, setup, resume)

    bench = PoolBench(Upstream())
    pool = await bench.pool()
    await PoolApplication(pool, bench.world).send_messages("one")
    closing = asyncio.create_task(pool.aclose())
    async with asyncio.timeout(60):
        await asked.wait()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert bench.upstream.is_closed
