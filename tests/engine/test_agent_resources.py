from __future__ import annotations

import asyncio

import pytest

from midstream.engine.agent import Agent, sub_agent
from midstream.engine.agent_resources import AgentResources
from midstream.engine.host import Host
from midstream.environment import World
from midstream.store.memory import MemoryStore
from midstream.testing import ScriptedModel
from tests.engine.test_toolset import Shelf


async def test_a_host_that_stops_closes_the_sources_of_sub_agents_too_and_each_once() -> None:
    shared, deep = Shelf("shared"), Shelf("deep")
    below = sub_agent(Agent(ScriptedModel([]), name="below", tools=[deep, shared]), description="Deep.")
    middle = sub_agent(Agent(ScriptedModel([]), name="middle", tools=[below]), description="Less so.")
    host = Host(Agent(ScriptedModel([]), tools=[middle, shared]), MemoryStore())
    await host.start()
    async with asyncio.timeout(30):
        await host.stop(grace_s=0.1)
    assert (shared.closings, deep.closings) == (1, 1)


async def test_tool_servers_that_take_their_time_do_not_keep_the_store_from_others() -> None:
    store = MemoryStore()
    nodes: list[str] = []

    class Slow(Shelf):
        async def close(self) -> None:
            nodes.append(store.node)

    host = Host(Agent(ScriptedModel([]), tools=[Slow("slow")]), store)
    await host.start()
    async with asyncio.timeout(30):
        await host.stop(grace_s=0.1)
    assert nodes == [""], "it was closed before"


async def test_a_tool_server_that_cannot_be_closed_is_logged_and_the_others_are_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(Shelf):
        async def close(self) -> None:
            raise OSError("its pipe is gone")

    whole = Shelf("whole")
    await AgentResources(Agent(ScriptedModel([]), tools=[Broken("broken"), whole]), World()).close()
    assert whole.closings == 1
    assert "its pipe is gone" in caplog.text
