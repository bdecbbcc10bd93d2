"""Lists with messages of several formats, such as after a change of providers during a session.

A message that its own format cannot read is read in the format of its shape, and written in its own. One of an unknown
shape is kept as text, so that no content is lost.
"""

from __future__ import annotations

from midstream.history.codecs.codec_spec import (
    Format,
    Json,
    MessageTurn,
    ResultPlacement,
    Value,
    as_words,
    type_of,
)
from midstream.history.codecs.format_registry import find_format
from midstream.history.conversion import convert_messages

_BLOCKS = ("tool_use", "tool_result")
_ITEMS = frozenset({"function_call", "function_call_output"})
_ABOUT = frozenset(
    {
        "role",
        "kind",
        "type",
        "id",
        "uuid",
        "name",
        "tool_call_id",
        "artifact",
        "timestamp",
        "created",
        "created_at",
        "model",
        "model_name",
    }
    | {
        "usage",
        "status",
        "stop_reason",
        "finish_reason",
        "run_id",
        "conversation_id",
        "session_id",
        "metadata",
    }
    | {"additional_kwargs", "response_metadata", "usage_metadata", "invalid_tool_calls", "example", "lc"}
    | {
        "provider_name",
        "provider_details",
        "provider_response_id",
        "provider_url",
        "instructions",
        "vendor_id",
    }
    | {"stop_sequence", "parent_id", "state", "index", "refusal", "annotations", "audio", "function_call"}
)
"""Keys for metadata of a message."""


def read_as_foreign(message: Json, at: int, form: Format) -> list[MessageTurn]:
    """Read a message of another format; an empty list if it is of this format."""
    other = shape_of(message, form)
    if other is None:
        return []
    source = find_format(other)
    found = convert_messages([message], source, form)
    turns = [form.parse(each, at) for each in found.messages]
    if found.system is not None:
        turns.append(form.parse({"role": "system", "content": found.system}, at))
    for turn in turns:
        turn.is_changed = True
    return turns


def shape_of(message: Json, form: Format) -> str | None:
    """Return the format of a message's shape if it is another than that of its list."""
    content, spec = message.get("content"), form.spec
    has_content = spec.content_key == "content"
    if content is None and has_content and isinstance(message.get("parts"), list):
        return "pydantic-ai" if message.get("kind") in ("request", "response") else "gemini"
    if not spec.has_tool_messages:
        asks = "tool_calls" in message and isinstance(message["tool_calls"], list) and message["tool_calls"]
        if asks or ("tool_call_id" in message and message.get("role") == "tool"):
            return "openai-chat"
    if "type" in message and form.layout is not ResultPlacement.FLAT and type_of(message) in _ITEMS:
        return "openai-responses"
    if not has_content and "parts" not in message and _has_role(message):
        return _shape_of_content(content) or ("openai-chat" if content else None)
    if type(content) is not list or (shape := _shape_of_content(content)) is None:
        return None
    return shape if shape not in spec.own_shapes and _has_role(message) else None


def _has_role(message: Json) -> bool:
    return message.get("role") in ("user", "assistant", "system", "model")


def _shape_of_content(content: Value) -> str | None:
    for block in content if isinstance(content, list) else ():
        if isinstance(block, dict):
            if block.get("type") in _BLOCKS:
                return "anthropic"
            if "toolUse" in block or "toolResult" in block or "reasoningContent" in block:
                return "bedrock"
    return None


def foreign_words(message: Json, form: Format) -> str:
    """Return the text of a message that has none at the places of its format."""
    if form.layout is ResultPlacement.FLAT and "role" not in message:
        return ""
    inner = message.get("data") if isinstance(message.get("data"), dict) else message
    assert isinstance(inner, dict)
    key = form.spec.content_key
    if inner.get(key) not in (None, "", []):
        return ""
    held = {
        name: value
        for name, value in inner.items()
        if name not in _ABOUT and name != key and value and isinstance(value, str | list | dict)
    }
    only = next(iter(held.values())) if len(held) == 1 else held
    return as_words(only) if held else ""
