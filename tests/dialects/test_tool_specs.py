from __future__ import annotations

from typing import Any

import msgspec
import pytest

from midstream.dialects.fields import BadFieldError, fields_of
from midstream.dialects.tool_specs import tools_of
from midstream.history.messages import ToolSpec

SCHEMA = {"type": "object"}
LOOK = ToolSpec("look", "Look.", {"type": "object"})


def read(**fields: object) -> tuple[tuple[ToolSpec, ...], list[str]]:
    ignored: list[str] = []
    return tools_of(fields_of(msgspec.json.encode(fields)), ignored), ignored


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": SCHEMA}},
        {"type": "function", "name": "look", "description": "Look.", "parameters": SCHEMA, "strict": True},
        {"name": "look", "description": "Look.", "input_schema": SCHEMA},
        {"type": "custom", "name": "look", "description": "Look.", "input_schema": SCHEMA},
    ],
)
def test_a_tool_is_read_in_every_shape(tool: dict[str, Any]) -> None:
    assert read(tools=[tool]) == ((LOOK,), [])


def test_functions_of_the_old_kind_are_tools() -> None:
    assert read(functions=[{"name": "look", "description": "Look.", "parameters": SCHEMA}])[0] == (LOOK,)


def test_tools_of_a_provider_are_left_out_and_named() -> None:
    kinds = [{"type": "web_search"}, {"type": "custom", "name": "grammar"}]
    assert read(tools=[*kinds, {"name": "look", "description": "Look.", "input_schema": SCHEMA}]) == (
        (LOOK,),
        ["tools.web_search", "tools.custom"],
    )


def test_a_host_may_forbid_calls() -> None:
    tool = {"name": "look", "input_schema": SCHEMA}
    for choice in ("none", {"type": "none"}):
        assert read(tools=[tool], tool_choice=choice) == ((), [])


@pytest.mark.parametrize("tools", [[1], [{}], [{"name": ""}], [{"function": {"name": 3}}]])
def test_a_tool_without_a_name_is_refused(tools: list[Any]) -> None:
    with pytest.raises(BadFieldError):
        read(tools=tools)
