"""Roles: who speaks where a message names nobody, or somebody its provider does not know."""

from __future__ import annotations

from typing import Any

from midstream.core.formats.parts import Json, as_words, type_of

_SPEAKERS = frozenset({"user", "assistant", "system"})
_KNOWN: dict[str, frozenset[str]] = {
    "anthropic": _SPEAKERS,
    "bedrock": _SPEAKERS,
    "gemini": frozenset({"user", "model", "system"}),
    "openai-chat": _SPEAKERS | {"developer", "tool", "function"},
    "mistral": _SPEAKERS | {"tool", "function"},
    "openai-responses": _SPEAKERS | {"developer"},
    "pydantic-ai": frozenset({"request", "response"}),
}
"""What each provider takes; LangChain's types are many and say what they are."""

_ASSISTANTS = frozenset({"assistant", "ai", "model", "bot", "agent", "response", "aimessage"})
_SYSTEMS = frozenset({"system", "developer", "systemmessage"})
_REPLY_FIELDS = ("tool_calls", "function_call", "reasoning_content", "refusal")
_REPLY_BLOCKS = frozenset({"tool_use", "thinking", "redacted_thinking", "server_tool_use", "output_text"})
_REPLY_KEYS = frozenset({"toolUse", "reasoningContent", "functionCall", "function_call"})
_REPLY_PARTS = frozenset({"text", "thinking", "tool-call", "builtin-tool-call", "builtin-tool-return"})


_REQUEST_BLOCKS = frozenset({"tool_result", "input_text", "input_image", "input_file"})
_REQUEST_KEYS = frozenset({"toolResult", "functionResponse", "function_response"})
_REQUEST_PARTS = frozenset({"user-prompt", "system-prompt", "tool-return", "retry-prompt"})


def with_known_role(message: Json, form: str) -> Json:
    """Return the message with a role its provider knows; the same message where it has one."""
    if form == "langchain":
        return _with_type(message)
    known = _KNOWN[form]
    if form == "openai-responses":
        message = _item(message)
        if message.get("type", "message") != "message":
            return message
    key = "kind" if form == "pydantic-ai" else "role"
    role = message.get(key)
    if isinstance(role, str) and role in known and not _is_misnamed(message, role):
        return message
    guess = _guess(message, str(role).lower(), form)
    return message if role == guess else {**message, key: guess}


def _item(message: Json) -> Json:
    """Return the item with a type, by the keys that only one type has."""
    if isinstance(message.get("type"), str):
        return message
    if "role" in message:
        return message if "type" not in message else {**message, "type": "message"}
    if "output" in message:
        return {**message, "type": "function_call_output"}
    if "arguments" in message:
        return {**message, "type": "function_call"}
    if "summary" in message or "encrypted_content" in message:
        return {**message, "type": "reasoning"}
    if "content" in message:
        return {**message, "type": "message"}
    return {"type": "message", "role": "user", "content": as_words(message)}


_LANGCHAIN_KEYS = ("role", "lc", "kwargs")
_LANGCHAIN_TYPES = frozenset(
    {"human", "ai", "tool", "system", "function", "chat", "remove", "developer", "user", "assistant"}
    | {"HumanMessageChunk", "AIMessageChunk", "ToolMessageChunk", "SystemMessageChunk", "constructor"}
    | {"not_implemented"}
)


def _with_type(message: Json) -> Json:
    """Return a LangChain message with a type, by its own data or by what only one type has."""
    kind = message.get("type")
    is_known = isinstance(kind, str) and kind in _LANGCHAIN_TYPES
    if not is_known and "lc" in message and isinstance(message.get("kwargs"), dict):
        return {**message, "type": "constructor"}
    if is_known or any(key in message for key in _LANGCHAIN_KEYS):
        return message
    data = message.get("data")
    inner: Json = data if isinstance(data, dict) else message
    named = inner.get("type")
    if named not in ("human", "ai", "tool", "system"):
        named = "tool" if "tool_call_id" in inner else "ai" if "tool_calls" in inner else "human"
    return {**message, "type": named}


def _is_misnamed(message: Json, role: str) -> bool:
    """Whether this asks for tools or thinks, as only replies do, or answers a call by its id, as only tools do."""
    if message.get("tool_calls") and "tool_call_id" not in message:
        return role != "assistant"
    if role in _SYSTEMS:
        return _has_reply_part(message)
    return role == "function" and "tool_call_id" in message


def _guess(message: Json, role: str, form: str) -> str:
    """Say who must have said this: by what only one side can say, else by what the role resembles."""
    is_flat_chat = "tool" in _KNOWN[form]
    if is_flat_chat and "tool_call_id" in message:
        return "tool"
    is_reply = is_flat_chat and any(message.get(field) for field in _REPLY_FIELDS)
    is_reply = is_reply or _has_reply_part(message)
    if role in _SYSTEMS and form != "pydantic-ai" and not is_reply:
        return "system"
    if _has_request_part(message):
        is_reply = False
    elif not is_reply:
        is_reply = role in _ASSISTANTS
    if form == "pydantic-ai":
        return "response" if is_reply else "request"
    if form == "gemini":
        return "model" if is_reply else "user"
    return "assistant" if is_reply else "user"


def _has_request_part(message: Json) -> bool:
    parts: Any = message.get("content", message.get("parts"))
    return isinstance(parts, list) and any(
        isinstance(part, dict)
        and (
            type_of(part) in _REQUEST_BLOCKS
            or as_words(part.get("part_kind")) in _REQUEST_PARTS
            or part.keys() & _REQUEST_KEYS
        )
        for part in parts
    )


def _has_reply_part(message: Json) -> bool:
    parts: Any = message.get("content", message.get("parts"))
    return isinstance(parts, list) and any(
        isinstance(part, dict)
        and (
            type_of(part) in _REPLY_BLOCKS
            or as_words(part.get("part_kind")) in _REPLY_PARTS
            or part.keys() & _REPLY_KEYS
        )
        for part in parts
    )
