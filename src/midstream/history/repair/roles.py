"""Missing or invalid roles of messages."""

from __future__ import annotations

from typing import Any

from midstream.history.codecs.codec_spec import CodecSpec, Json, as_words, type_of

_ASSISTANTS = frozenset({"assistant", "ai", "model", "bot", "agent", "response", "aimessage"})
_SYSTEMS = frozenset({"system", "developer", "systemmessage"})
_RESPONSE_FIELDS = ("tool_calls", "function_call", "reasoning_content", "refusal")
_RESPONSE_BLOCKS = frozenset({"tool_use", "thinking", "redacted_thinking", "server_tool_use", "output_text"})
_RESPONSE_KEYS = frozenset({"toolUse", "reasoningContent", "functionCall", "function_call"})
_RESPONSE_PARTS = frozenset({"text", "thinking", "tool-call", "builtin-tool-call", "builtin-tool-return"})


_REQUEST_BLOCKS = frozenset({"tool_result", "input_text", "input_image", "input_file"})
_REQUEST_KEYS = frozenset({"toolResult", "functionResponse", "function_response"})
_REQUEST_PARTS = frozenset({"user-prompt", "system-prompt", "tool-return", "retry-prompt"})


def with_known_role(message: Json, spec: CodecSpec) -> Json:
    """Return the message with a valid role; the same message if it has one."""
    if spec.typed is not None:
        message = spec.typed(message)
        if not spec.roles or message.get("type", "message") != "message":
            return message
    role = message.get(spec.role_key)
    if isinstance(role, str) and role in spec.roles and not _is_misnamed(message, role):
        return message
    guess = _guess(message, str(role).lower(), spec)
    return message if role == guess else {**message, spec.role_key: guess}


def _is_misnamed(message: Json, role: str) -> bool:
    """Whether this has calls or thinking, as only responses have, or a call id, as only results have."""
    if "tool_calls" in message and message["tool_calls"] and "tool_call_id" not in message:
        return role != "assistant"
    if role in _SYSTEMS:
        return _has_response_part(message)
    return role == "function" and "tool_call_id" in message


def _guess(message: Json, role: str, spec: CodecSpec) -> str:
    """Derive the role of a message: from parts that only one role has, else from the given role."""
    has_tools = spec.has_tool_messages
    if has_tools and "tool_call_id" in message:
        return "tool"
    is_response = has_tools and any(message.get(field) for field in _RESPONSE_FIELDS)
    is_response = is_response or _has_response_part(message)
    if role in _SYSTEMS and spec.system_role and not is_response:
        return spec.system_role
    if _has_request_part(message):
        is_response = False
    elif not is_response:
        is_response = role in _ASSISTANTS
    return spec.response_role if is_response else spec.user_role


def _parts_of(message: Json) -> list[Any]:
    """Return the parts of a message; a single part becomes a list."""
    parts: Any = message.get("content", message.get("parts"))
    if isinstance(parts, list):
        return parts
    return [parts] if isinstance(parts, dict) else []


def _has_request_part(message: Json) -> bool:
    return any(
        isinstance(part, dict)
        and (
            type_of(part) in _REQUEST_BLOCKS
            or as_words(part.get("part_kind")) in _REQUEST_PARTS
            or part.keys() & _REQUEST_KEYS
        )
        for part in _parts_of(message)
    )


def _has_response_part(message: Json) -> bool:
    return any(
        isinstance(part, dict)
        and (
            type_of(part) in _RESPONSE_BLOCKS
            or as_words(part.get("part_kind")) in _RESPONSE_PARTS
            or part.keys() & _RESPONSE_KEYS
        )
        for part in _parts_of(message)
    )
