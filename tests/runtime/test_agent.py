from __future__ import annotations

import pytest

from midstream.errors import ToolDefinitionError
from midstream.runtime.agent import Agent
from midstream.testing import ScriptedModel


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
