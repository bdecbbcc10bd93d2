"""The tools of a chat completion."""

from __future__ import annotations

from midstream.history.messages import ToolSpec
from midstream.models.openai_chat_tools import render_tools


def test_tools_carry_their_schema_and_a_tool_without_one_has_no_parameters() -> None:
    schema = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    rendered = render_tools([ToolSpec("read", "Read a file.", schema), ToolSpec("now")])
    assert [each["function"] for each in rendered] == [
        {"name": "read", "description": "Read a file.", "parameters": schema},
        {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}},
    ]
