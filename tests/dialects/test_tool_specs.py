from __future__ import annotations

from typing import Any

import msgspec
import pytest

from midstream.dialects.request_fields import BadFieldError, fields_of
from midstream.dialects.tool_specs import tools_of
from midstream.history.messages import ToolSpec
from tests.spec import spec

SCHEMA = {"type": "object"}
LOOK = ToolSpec("look", "Look.", {"type": "object"})


def read(**fields: object) -> tuple[tuple[ToolSpec, ...], list[str]]:
    ignored: list[str] = []
    return tools_of(fields_of(msgspec.json.encode(fields)), ignored), ignored


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": SCHEMA}},
        {"type": "function", "name": "look", "description": "Look.", "parameters": SCHEMA, "strict": "yes"},
        {"name": "look", "description": "Look.", "input_schema": SCHEMA},
        {"type": "custom", "name": "look", "description": "Look.", "input_schema": SCHEMA},
    ],
)
def test_a_tool_is_read_in_every_shape(tool: dict[str, Any]) -> None:
    assert read(tools=[tool]) == ((LOOK,), [])


@spec("SEC-75")
@pytest.mark.parametrize("field", ["tools", "functions", "tool_choice"])
def test_a_schema_that_is_nested_too_deeply_is_refused_with_its_field(field: str) -> None:
    def nested_tool(levels: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "object"}
        for _ in range(levels):
            schema = {"type": "object", "properties": {"a": schema}}
        tool = {"name": "look", "description": "Look.", "input_schema": schema}
        return {field: tool if field == "tool_choice" else [tool]}

    read(**nested_tool(20))
    with pytest.raises(BadFieldError, match="nested more than 64 levels deep") as refused:
        read(**nested_tool(450))
    assert refused.value.param == field


@pytest.mark.parametrize("strict", [True, False])
def test_strict_is_read_in_every_shape(*, strict: bool) -> None:
    named = {"name": "look", "description": "Look.", "strict": strict}
    (spec_of_chat,), _ = read(tools=[{"type": "function", "function": {**named, "parameters": SCHEMA}}])
    (spec_of_messages,), _ = read(tools=[{**named, "input_schema": SCHEMA}])
    assert spec_of_chat == spec_of_messages == ToolSpec("look", "Look.", {"type": "object"}, strict)


def test_legacy_functions_are_tools() -> None:
    assert read(functions=[{"name": "look", "description": "Look.", "parameters": SCHEMA}])[0] == (LOOK,)


def test_tools_of_a_provider_are_omitted_and_named() -> None:
    kinds = [{"type": "web_search"}, {"type": "custom", "name": "grammar"}]
    assert read(tools=[*kinds, {"name": "look", "description": "Look.", "input_schema": SCHEMA}]) == (
        (LOOK,),
        ["tools.web_search", "tools.custom"],
    )


def test_a_client_application_may_forbid_calls() -> None:
    tool = {"name": "look", "input_schema": SCHEMA}
    for choice in ("none", {"type": "none"}):
        assert read(tools=[tool], tool_choice=choice) == ((), [])


@pytest.mark.parametrize("tools", [[1], [{}], [{"name": ""}], [{"function": {"name": 3}}]])
def test_a_tool_without_a_name_is_refused(tools: list[Any]) -> None:
    with pytest.raises(BadFieldError):
        read(tools=tools)
