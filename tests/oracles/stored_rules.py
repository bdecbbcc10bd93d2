"""Refusals of the wires behind pydantic-ai and LangChain: each list is converted literally to chat messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

Json = dict[str, Any]
Value = Any

_LANGCHAIN = {
    "human": "user", "user": "user", "ai": "assistant", "assistant": "assistant", "tool": "tool", "system": "system",
    "developer": "system", "AIMessage": "assistant", "HumanMessage": "user", "ToolMessage": "tool",
    "SystemMessage": "system", "AIMessageChunk": "assistant", "HumanMessageChunk": "user",
}  # fmt: skip


def langchain_as_chat(messages: list[Any]) -> list[Json]:
    """Read LangChain's dicts into chat messages."""
    chat = []
    for message in messages:
        inner = message.get("data") or message.get("kwargs") or message
        named = message["id"][-1] if message.get("type") == "constructor" else message.get("type")
        role = _LANGCHAIN.get(str(named or message.get("role")), str(named))
        made: Json = {"role": role, "content": inner.get("content")}
        calls = [*(inner.get("tool_calls") or []), *(inner.get("invalid_tool_calls") or [])]
        if role == "assistant" and calls:
            made["tool_calls"] = [_listed(call) for call in calls]
        if role == "tool":
            made["tool_call_id"] = inner.get("tool_call_id")
        if isinstance(made["content"], list):
            texts = [{"type": "text", "text": c} if isinstance(c, str) else c for c in made["content"]]
            kept = [chunk for chunk in texts if _is_sent(chunk)]
            made["content"] = kept or ""
        chat.append(made)
    return chat


def _listed(call: Json) -> Json:
    """Read an entry of `tool_calls`; messages with a role may have it in OpenAI's shape."""
    inner = call.get("function")
    if isinstance(inner, dict):
        return _call(call.get("id"), inner.get("name"), inner.get("arguments"))
    return _call(call.get("id"), call.get("name"), call.get("args"))


def _is_sent(chunk: Value) -> bool:
    return not isinstance(chunk, dict) or chunk.get("type") not in ("tool_use", "tool_call")


def _call(call_id: Value, name: Value, arguments: Value) -> Json:
    text = arguments if isinstance(arguments, str) else json.dumps({} if arguments is None else arguments)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def langchain_faults(messages: list[Any]) -> Iterator[str]:
    """Yield the faults that langchain itself cannot load or send."""
    for at, message in enumerate(messages):
        inner = message.get("data") or message.get("kwargs") or message
        for call in inner.get("tool_calls") or []:
            is_openais = "function" in call and "role" in message
            if not is_openais and not isinstance(call.get("args"), dict):
                yield f"LC-ARGS {at}"
        if inner.get("invalid_tool_calls"):
            yield f"LC-INVALID {at}"
        listed = [*(inner.get("tool_calls") or []), *(inner.get("invalid_tool_calls") or [])]
        content = inner.get("content")
        for chunk in content if isinstance(content, list) else []:
            if isinstance(chunk, dict) and chunk.get("type") == "tool_use":
                if not any(
                    chunk.get("id") == call.get("id") or chunk.get("input") == call.get("args")
                    for call in listed
                ):
                    yield f"LC-UNLISTED {at}"
        if not isinstance(inner.get("content"), str | list):
            yield f"LC-CONTENT {at}"


def pydantic_ai_as_chat(messages: list[Any]) -> list[Json]:
    """Read pydantic-ai's JSON into chat messages, in the order in which its own models would send them."""
    chat: list[Json] = []
    for message in messages:
        parts = message.get("parts") or []
        if message.get("kind") == "response":
            calls = [part for part in parts if part["part_kind"] == "tool-call"]
            words = [part["content"] for part in parts if part["part_kind"] == "text" and part["content"]]
            made: Json = {"role": "assistant", "content": "\n".join(words) or None}
            if calls:
                made["tool_calls"] = [
                    _call(part.get("tool_call_id"), part.get("tool_name"), part.get("args") or {})
                    for part in calls
                ]
            if made["content"] or calls:
                chat.append(made)
            continue
        for part in parts:
            kind = part["part_kind"]
            content = part.get("content")
            if kind == "tool-return" or (kind == "retry-prompt" and part.get("tool_name")):
                text = content if isinstance(content, str) else json.dumps(content)
                chat.append({"role": "tool", "tool_call_id": part.get("tool_call_id"), "content": text})
            elif kind == "system-prompt":
                chat.append({"role": "system", "content": content})
            else:
                text = content if isinstance(content, str) else json.dumps(content)
                chat.append({"role": "user", "content": text})
    return chat


def pydantic_ai_faults(messages: list[Any]) -> Iterator[str]:
    """Yield the faults that no wire accepts and that chat messages do not show."""
    for at, message in enumerate(messages):
        parts = message.get("parts")
        if message.get("kind") not in ("request", "response") or not isinstance(parts, list) or not parts:
            yield f"PYD-EMPTY {at}"
            continue
        kinds = [part.get("part_kind") for part in parts]
        if message["kind"] == "request" and {"text", "thinking", "tool-call"} & set(kinds):
            yield f"PYD-ROLE {at}"
        asked = {"user-prompt", "system-prompt", "tool-return", "retry-prompt"}
        if message["kind"] == "response" and asked & set(kinds):
            yield f"PYD-ROLE {at}"
        if set(kinds) == {"thinking"}:
            yield f"PYD-THINKONLY {at}"
        for part in parts:
            if part.get("part_kind") == "retry-prompt" and not part.get("content"):
                yield f"PYD-RETRY {at}"
            if part.get("part_kind") == "tool-return" and "content" not in part:
                yield f"PYD-RETURN {at}"  # Its own types require the field, even if null.
            blank = isinstance(part.get("content"), str) and not part["content"].strip()
            if part.get("part_kind") in ("user-prompt", "text") and blank:
                yield f"PYD-BLANK {at}"
