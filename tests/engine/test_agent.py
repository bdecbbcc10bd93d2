from __future__ import annotations

import functools
import math

import pydantic_ai
import pytest
from pydantic_ai.models.test import TestModel

import midstream
from midstream.engine.agent import Agent
from midstream.errors import ToolDefinitionError, UsageError
from midstream.store.memory import MemoryStore
from midstream.testing import ScriptedModel
from midstream.tools.function_tools import Tool


def read(path: str) -> str:
    """Read a file."""
    return path


def test_plain_functions_become_tools_with_the_safe_defaults() -> None:
    agent = Agent(ScriptedModel([]), tools=[read])
    assert agent.tools["read"].has_effects
    assert agent.tools["read"].on_doubt == "unknown"


def test_two_tools_with_the_same_name_are_refused() -> None:
    with pytest.raises(ToolDefinitionError, match="'read'"):
        Agent(ScriptedModel([]), tools=[read, read])


class EmptyToolSource:
    """A source of tools."""

    name = "shelf"

    async def tools(self) -> tuple[Tool, ...]:
        return ()

    async def close(self) -> None:
        pass


def test_sources_are_combined_with_tools_and_two_with_the_same_name_are_refused() -> None:
    shelf = EmptyToolSource()
    agent = Agent(ScriptedModel([]), instructions="be brief", tools=[read, shelf], name="a")
    assert (sorted(agent.tools), agent.sources) == (["read"], (shelf,))
    assert repr(agent) == "Agent('a', model='scripted', tools=['read'], sources=['shelf'])"
    with pytest.raises(ToolDefinitionError, match="'shelf'"):
        agent.with_tools(EmptyToolSource())


def test_an_agent_with_more_tools_is_a_separate_agent() -> None:
    agent = Agent(ScriptedModel([]), instructions="be brief", tools=[read], name="a")
    more = agent.with_tools(EmptyToolSource())
    assert (more.model, more.instructions, more.name) == (agent.model, "be brief", "a")
    assert (sorted(more.tools), len(more.sources), agent.sources) == (["read"], 1, ())


def greet(name: str) -> str:
    """Greet somebody."""
    return name


@pytest.mark.parametrize(
    ("model", "advice"),
    [
        ("openai:gpt-5", r"the string 'openai:gpt-5'.*PydanticAIModel\('openai:gpt-5'\)"),
        (None, "`model` is None; expected a `midstream.Model`"),
        (object(), r"a `builtins.object`.*`stream\(request\)`"),
        (ScriptedModel, r"the class `midstream.ScriptedModel`.*`ScriptedModel\(\.\.\.\)`"),
        (Agent(ScriptedModel([])), r"midstream.sub_agent\(agent"),
    ],
)
def test_an_invalid_model_is_refused_by_the_constructor(model: object, advice: str) -> None:
    with pytest.raises(UsageError, match=advice):
        Agent(model)  # type: ignore[arg-type]


def test_models_and_agents_of_other_frameworks_are_refused_with_their_wrapper() -> None:
    with pytest.raises(UsageError, match=r"`pydantic_ai.Agent`.*pydantic_ai_durable"):
        Agent(pydantic_ai.Agent("test"))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"`pydantic_ai.TestModel`.*PydanticAIModel\(model\)"):
        Agent(TestModel())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"`pydantic_ai.Agent`.*pydantic_ai_served.make_agent\(agent\)"):
        midstream.asgi(pydantic_ai.Agent("test"))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"`agent` is a `pydantic_ai.Agent`; expected a `midstream.Agent`"):
        midstream.Host(pydantic_ai.Agent("test"), MemoryStore())  # type: ignore[arg-type]


@pytest.mark.parametrize("tools", ["greet", greet, [greet, 3], [Agent], [functools.partial(greet, "Ada")]])
def test_an_invalid_tool_is_refused_with_the_accepted_types(tools: object) -> None:
    with pytest.raises(ToolDefinitionError, match=r"`tools` (is|contains) .*(expected|Give)"):
        Agent(ScriptedModel([]), tools=tools)  # type: ignore[arg-type]


def test_instructions_must_be_text() -> None:
    with pytest.raises(UsageError, match=r"`instructions` is a `builtins.list`; expected a string"):
        Agent(ScriptedModel([]), instructions=["be brief"])  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0])
def test_a_limit_of_turns_that_is_no_number_of_seconds_is_refused(seconds: float) -> None:
    with pytest.raises(UsageError, match="`turn_s`"):
        Agent(ScriptedModel([]), turn_s=seconds)
