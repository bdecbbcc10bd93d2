from __future__ import annotations

import asyncio

from midstream.agents.live_agents import LiveAgents
from midstream.agents.upstream_abilities import Abilities
from midstream.agents.upstreams import Setup, UpstreamAgent
from midstream.testing import FakeWorld
from midstream.testing.scripted_upstream import ScriptedAgent, ScriptedUpstream, UpstreamMemory
from tests.spec import spec

SETUP = Setup("be brief")


async def test_an_agent_at_rest_is_used_again_for_the_same_setup() -> None:
    upstream, _, live = _made()
    await _spoken(live, "agent-1")
    await _taken(live, "agent-1")
    assert upstream.opened == ["agent-1"]


async def test_for_another_setup_it_is_closed_and_resumed() -> None:
    upstream, _, live = _made()
    await _spoken(live, "agent-1")
    await _taken(live, "agent-1", Setup("be long"))
    assert upstream.opened == ["agent-1", "agent-1"]
    assert upstream.live_max == 1


async def test_one_that_rested_too_long_is_closed_and_resumed() -> None:
    upstream, world, live = _made()
    await _spoken(live, "agent-1")
    await world.advance(300.0)
    await _taken(live, "agent-1")
    assert upstream.opened == ["agent-1", "agent-1"]
    assert upstream.live == 1


async def test_there_are_never_more_than_the_cap_but_for_those_in_a_turn() -> None:
    upstream, world, live = _made(agents=6, live_max=3)
    for number in range(1, 6):
        await _spoken(live, f"agent-{number}")
        await world.settle()
    assert (upstream.live, live.resting) == (3, 3)
    for number in range(3, 7):
        await _taken(live, f"agent-{number}")
    await world.settle()
    assert (upstream.live, live.resting) == (4, 0)


async def test_what_is_forgotten_is_closed_first() -> None:
    upstream, world, live = _made()
    await _spoken(live, "agent-1")
    live.delete("agent-1")
    await world.settle()
    assert (upstream.live, upstream.memory.forgotten) == (0, ["agent-1"])


async def test_closing_waits_for_all_of_them() -> None:
    upstream, _, live = _made(agents=3)
    for number in range(1, 4):
        await _spoken(live, f"agent-{number}")
    agent = await live.open(SETUP)
    live.close(agent, deleted="agent-2")
    await live.aclose()
    assert (upstream.live, upstream.memory.forgotten) == (0, ["agent-2"])


async def test_an_agent_that_cannot_be_closed_or_forgotten_hurts_nobody() -> None:
    class Stubborn(ScriptedUpstream):
        async def delete(self, agent: str) -> None:
            raise OSError(agent)

    upstream = Stubborn()
    live = LiveAgents(upstream, FakeWorld(), live_max=2, rest_s=300.0, close_s=5.0)
    live.close(await live.open(SETUP), deleted="agent-1")
    await live.aclose()
    assert upstream.live == 0


async def test_two_of_one_conversation_are_never_open_at_once() -> None:
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
    await _spoken(live, "agent-1")
    await _spoken(live, "agent-2")  # agent-1 has to go
    before = upstream.live
    await _taken(live, "agent-1")
    assert upstream.live <= before


def _memory(agents: int) -> UpstreamMemory:
    memory = UpstreamMemory()
    for _ in range(agents):
        memory.begin()
    return memory


@spec("REUSE-46")
async def test_beyond_the_limit_of_memory_the_longest_idle_are_closed_and_none_in_a_turn() -> None:
    upstream, world = ScriptedUpstream(abilities=Abilities(has_process=True)), FakeWorld()

    def measure() -> float:
        return 100.0 * upstream.live

    limits = {"live_max": 8, "rest_s": 300.0, "close_s": 5.0}
    live = LiveAgents(upstream, world, **limits, memory_mib_max=250.0, measure=measure)  # type: ignore[arg-type]
    for _ in range(4):
        upstream.memory.begin()
    await _spoken(live, "agent-1")
    await _taken(live, "agent-1")
    for number in range(2, 5):
        await _spoken(live, f"agent-{number}")
        await _measured(world, upstream, 2)
    assert not live.has(SETUP, "agent-3")
    assert live.has(SETUP, "agent-4")
    await live.aclose()


async def _measured(world: FakeWorld, upstream: ScriptedUpstream, live: int) -> None:
    """Wait until so few agents are open: measuring takes a thread."""
    async with asyncio.timeout(60):
        while upstream.live > live:
            await world.settle()
            await asyncio.sleep(0)


def _made(*, agents: int = 1, live_max: int = 8) -> tuple[ScriptedUpstream, FakeWorld, LiveAgents]:
    world, upstream = FakeWorld(), ScriptedUpstream(_memory(agents))
    return upstream, world, LiveAgents(upstream, world, live_max=live_max, rest_s=300.0, close_s=5.0)


async def _spoken(live: LiveAgents, name: str) -> None:
    live.rest(name, await _taken(live, name), SETUP)


async def _taken(live: LiveAgents, name: str, setup: Setup = SETUP) -> UpstreamAgent:
    return await live.take(setup, name) or await live.open(setup, resume=name)
