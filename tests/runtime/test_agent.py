from __future__ import annotations

import pytest

from midstream.errors import ToolDefinitionError
from midstream.runtime.agent import Agent
from midstream.testing import ScriptedModel
from midstream.tools import Tool


def read(path: str) -> str:
    """Read a file."""
    return path


def test_plain_functions_become_tools_with_the_careful_defaults() -> None:
    agent = Agent(ScriptedModel([]), tools=[read])
    assert agent.tools["read"].has_effects
    assert agent.tools["read"].on_doubt == "unknown"


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ToolDefinitionError, match="'read'"):
        Agent(ScriptedModel([]), tools=[read, read])


class Shelf:
    """A source of tools."""

    name = "shelf"

    async def tools(self) -> tuple[Tool, ...]:
        return ()

    async def close(self) -> None:
        pass


def test_sources_stand_beside_tools_and_two_of_one_name_are_refused() -> None:
    shelf = Shelf()
    agent = Agent(ScriptedModel([]), instructions="be brief", tools=[read, shelf], name="a")
    assert (sorted(agent.tools), agent.sources) == (["read"], (shelf,))
    assert repr(agent) == "Agent('a', model='scripted', tools=['read'], sources=['shelf'])"
    with pytest.raises(ToolDefinitionError, match="'shelf'"):
        agent.with_tools(Shelf())


def test_an_agent_with_more_tools_is_another_one() -> None:
    agent = Agent(ScriptedModel([]), instructions="be brief", tools=[read], name="a")
    more = agent.with_tools(Shelf())
    assert (more.model, more.instructions, more.name) == (agent.model, "be brief", "a")
    assert (sorted(more.tools), len(more.sources), agent.sources) == (["read"], 1, ())
