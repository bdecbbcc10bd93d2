"""Conversion between functions and other kinds of a client application's tools.

Other models and APIs have only functions. So a function in a namespace becomes `namespace__name`, and a custom tool,
whose input is a text, becomes a function with one text argument. Codex declares every MCP server as a namespace, and
`apply_patch` as a custom tool. Chat completions also have custom tools, in another format.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, Literal

import msgspec
from msgspec import Struct

from midstream.history.codecs.codec_spec import Json, Value

NAME_CHARS_MAX = 64
"""Longest name of a function in OpenAI's and Anthropic's APIs."""
INPUT = "input"
"""Parameter of the function that replaces a custom tool."""
SEARCH: Final = "tool_search"
_FORMAT = "Its input has this format:"

ToolKind = Literal["function", "custom", "tool_search"]


class DeclaredTool(Struct, frozen=True):
    """A tool in the client application's declaration.

    Args:
        kind: Kind of the tool; `tool_search` finds further tools, which the application then loads.
        namespace: Its namespace, or "".
        name: Its name in the namespace.
        source: The declaration.
    """

    kind: ToolKind
    namespace: str
    name: str
    source: Json

    @property
    def function_name(self) -> str:
        """Name of the function that replaces the tool."""
        return function_name(self.namespace, self.name)

    @property
    def description(self) -> str:
        """Description of the function, including the format of a custom tool's input."""
        words = self.source.get("description")
        text = words if isinstance(words, str) else ""
        form = self.source.get("format")
        if self.kind == "custom" and isinstance(form, dict) and isinstance(form.get("definition"), str):
            return f"{text}\n\n{_FORMAT}\n{form['definition']}"
        return text

    @property
    def schema(self) -> Json:
        """Schema of the function's arguments."""
        if self.kind == "custom":
            return {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
        schema = self.source.get("parameters", self.source.get("input_schema"))
        return schema if isinstance(schema, dict) else {}


def function_name(namespace: str, name: str) -> str:
    """Return the name of the function that replaces a tool in a namespace; a long name ends with a digest."""
    whole = f"{namespace.rstrip('_')}__{name}" if namespace else name
    if not namespace or len(whole) <= NAME_CHARS_MAX:
        return whole
    digest = blake2b(whole.encode("utf-8", "replace"), digest_size=6).hexdigest()
    return f"{whole[: NAME_CHARS_MAX - len(digest) - 1]}_{digest}"


def list_others(tool: Value) -> list[DeclaredTool]:
    """Return the tools of a declaration that need conversion; none for a function or a hosted tool."""
    kind, name = (tool.get("type"), tool.get("name")) if isinstance(tool, dict) else (None, None)
    if kind == SEARCH and tool.get("execution") == "client":
        return [DeclaredTool(SEARCH, "", SEARCH, tool)]
    if not (isinstance(name, str) and name):
        return []
    if kind == "custom":
        return [DeclaredTool("custom", "", name, tool)]
    if kind != "namespace":
        return []
    return [
        DeclaredTool(_kind_of(each), name, each["name"], each)
        for each in _list_of(tool.get("tools"))
        if isinstance(each, dict) and isinstance(each.get("name"), str)
    ]


def list_chat_customs(tool: Value) -> list[DeclaredTool]:
    """Return the custom tool of a declaration in chat completions; none for another tool."""
    custom = tool.get("custom") if isinstance(tool, dict) and tool.get("type") == "custom" else None
    name = custom.get("name") if isinstance(custom, dict) else None
    if custom is None or not (isinstance(name, str) and name):
        return []
    form = custom.get("format")
    if isinstance(form, dict) and isinstance(form.get("grammar"), dict):
        custom = {**custom, "format": {**form, **form["grammar"]}}
    return [DeclaredTool("custom", "", name, custom)]


def chat_in_functions(messages: Sequence[Value]) -> list[Value]:
    """Replace calls of custom tools in messages of chat completions by calls of functions."""
    if not any(isinstance(each, dict) and "tool_calls" in each for each in messages):
        return [*messages]
    return [_chat_in_functions(each) if isinstance(each, dict) else each for each in messages]


def _chat_in_functions(message: Json) -> Json:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_chat_call_in_functions(call) for call in calls]}


def _chat_call_in_functions(call: Value) -> Value:
    custom = call.get("custom") if isinstance(call, dict) and call.get("type") == "custom" else None
    if not isinstance(custom, dict):
        return call
    text = custom.get("input")
    function = {"name": custom.get("name"), "arguments": write_input(text if isinstance(text, str) else "")}
    rest = {name: value for name, value in call.items() if name != "custom"}
    return {**rest, "type": "function", "function": function}


def in_functions(items: Sequence[Value]) -> list[Value]:
    """Replace calls of other tools in items of the Responses API by calls of functions, one for one."""
    return [_in_functions(item) if isinstance(item, dict) else item for item in items]


def _in_functions(item: Json) -> Json:
    match item.get("type"):
        case "function_call" if isinstance(item.get("namespace"), str) and isinstance(item.get("name"), str):
            return {**item, "name": function_name(item["namespace"], item["name"])}
        case "custom_tool_call" if isinstance(item.get("name"), str):
            space, text = item.get("namespace"), item.get("input")
            name = function_name(space if isinstance(space, str) else "", item["name"])
            arguments = write_input(text if isinstance(text, str) else "")
            return {**item, "type": "function_call", "name": name, "arguments": arguments}
        case "custom_tool_call_output":
            return {**item, "type": "function_call_output"}
        case "tool_search_call" if item.get("execution") == "client":
            arguments = json.dumps(item.get("arguments"), ensure_ascii=False)
            return {**item, "type": "function_call", "name": SEARCH, "arguments": arguments}
        case "tool_search_output" if item.get("execution") == "client":
            names = [each.function_name for tool in _list_of(item.get("tools")) for each in list_others(tool)]
            return {**item, "type": "function_call_output", "output": f"Loaded: {', '.join(names) or 'none'}"}
        case _:
            return item


def _kind_of(tool: Json) -> ToolKind:
    return "custom" if tool.get("type") == "custom" else "function"


def _list_of(value: Value) -> list[Value]:
    return value if isinstance(value, list) else []


def loaded_tools(items: Sequence[Value]) -> list[Value]:
    """Return the declarations of tools in the outputs of tool searches."""
    return [
        tool
        for item in items
        if isinstance(item, dict) and item.get("type") == "tool_search_output"
        for tool in _list_of(item.get("tools"))
    ]


def write_input(text: str) -> str:
    """Return the arguments of the function for the input of a custom tool."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def read_input(arguments: str) -> str:
    """Return the input of a custom tool from a function's arguments; arguments of another form are the input."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return arguments
    text = value.get(INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments
