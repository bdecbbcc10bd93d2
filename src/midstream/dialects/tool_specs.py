"""The tools that a client application declares, in three formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from midstream.dialects.declared_tools import DeclaredTool, list_chat_customs, list_others
from midstream.dialects.request_fields import Fields, bad_field, field
from midstream.history.codecs.codec_spec import Json, Value
from midstream.history.messages import ToolSpec

NO_CHOICE = "none"


def tools_of(
    fields: Fields, ignored: list[str], *, loaded: Sequence[Value] | None = None
) -> tuple[ToolSpec, ...]:
    """Return the functions that a client application declares; none if it forbids calls.

    Args:
        fields: Fields of the request.
        ignored: Receives the names of hosted tools, which only the API's own provider can run.
        loaded: Declarations from tool searches. If given, functions replace tools of other kinds (`declared_tools`);
            otherwise they replace custom tools of chat completions.

    Raises:
        BadFieldError: `tools` is not a list of objects, or a function has no name.
    """
    listed = field(fields, "tools", list[Any]) or []
    legacy = field(fields, "functions", list[Any]) or []
    found: list[ToolSpec | None] = []
    for tool in [*listed, *({"function": each} for each in legacy), *(loaded or ())]:
        others = list_chat_customs(tool) if loaded is None else list_others(tool)
        found += [_spec(each) for each in others] or [_tool(tool, ignored)]
    choice = field(fields, "tool_choice", object)
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind == NO_CHOICE:
        return ()
    return tuple({tool.name: tool for tool in found if tool is not None}.values())


def _spec(tool: DeclaredTool) -> ToolSpec:
    return ToolSpec(tool.function_name, tool.description, tool.schema, _strict_of(tool.source))


def _tool(tool: Value, ignored: list[str]) -> ToolSpec | None:
    if not isinstance(tool, dict):
        raise bad_field("tools", "`tools` must be a list of objects")
    kind = tool.get("type")
    inner = tool.get("function")
    if kind not in (None, "function", "custom") or (kind == "custom" and "input_schema" not in tool):
        ignored.append(f"tools.{kind}")
        return None
    described: Json = inner if isinstance(inner, dict) else tool
    name = described.get("name")
    if not isinstance(name, str) or not name:
        raise bad_field("tools", "each tool needs a name")
    schema = described.get("parameters", described.get("input_schema"))
    words = described.get("description")
    text = words if isinstance(words, str) else ""
    return ToolSpec(name, text, schema if isinstance(schema, dict) else {}, _strict_of(described))


def _strict_of(described: Json) -> bool | None:
    strict = described.get("strict")
    return strict if isinstance(strict, bool) else None
