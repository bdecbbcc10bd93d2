from __future__ import annotations

import asyncio

import pytest

from midstream.engine.agent import Agent, sub_agent
from midstream.engine.agent_resources import AgentResources
from midstream.engine.host import Host
from midstream.environment import World
from midstream.store.memory import MemoryStore
from midstream.testing import ScriptedModel, text
from tests.engine.test_toolset import ScriptedToolSource, named_tool


async def test_a_stopping_host_closes_the_sources_of_sub_agents_too_and_each_once() -> None:
    shared, deep = ScriptedToolSource("shared"), ScriptedToolSource("deep")
    below = sub_agent(Agent(ScriptedModel([]), name="below", tools=[deep, shared]), description="Deep.")
    middle = sub_agent(Agent(ScriptedModel([]), name="middle", tools=[below]), description="Less so.")
    host = Host(Agent(ScriptedModel([]), tools=[middle, shared]), MemoryStore())
    await host.start()
    async with asyncio.timeout(60):
        await host.stop(grace_s=0.1)
    assert (shared.closings, deep.closings) == (1, 1)


async def test_slow_tool_servers_do_not_delay_the_release_of_the_store() -> None:
    store = MemoryStore()
    nodes: list[str] = []

    class Slow(ScriptedToolSource):
        async def close(self) -> None:
            nodes.append(store.node)

    host = Host(Agent(ScriptedModel([]), tools=[Slow("slow")]), store)
    await host.start()
    async with asyncio.timeout(60):
        await host.stop(grace_s=0.1)
    assert nodes == [""], "it was closed before"


async def test_a_tool_server_that_cannot_be_closed_is_logged_and_the_others_are_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(ScriptedToolSource):
        async def close(self) -> None:
            raise OSError("its pipe is gone")

    whole = ScriptedToolSource("whole")
    await AgentResources(Agent(ScriptedModel([]), tools=[Broken("broken"), whole]), World()).close()
    assert whole.closings == 1
    assert "its pipe is gone" in caplog.text


async def test_sources_of_one_session_are_closed_with_it_or_with_the_host() -> None:
    mine, later, other = (
        ScriptedToolSource("mine", named_tool("a")),
        ScriptedToolSource("later"),
        ScriptedToolSource("other"),
    )
    model = ScriptedModel(lambda request: text(f"I have {[each.name for each in request.tools]}"))
    async with Host(Agent(model), MemoryStore()) as host:
        await host.set_sources("one", [mine])
        await host.set_sources("two", [other])
        assert await host.ask("one", "Which tools?") == "I have ['a']"
        assert await host.ask("three", "Which tools?") == "I have []"
        await host.set_sources("one", [later])
        assert (mine.closings, later.closings) == (1, 0)
        await host.set_sources("one", [])
        assert (mine.closings, later.closings, other.closings) == (1, 1, 0)
    assert (mine.closings, later.closings, other.closings) == (1, 1, 1)
