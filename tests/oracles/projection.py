"""Literal conversion of every format to chat messages, for validators that only support chat."""

from __future__ import annotations

import json
from typing import Any

from tests.oracles.stored_rules import langchain_as_chat, pydantic_ai_as_chat
from tests.oracles.verdicts import responses_as_chat

Json = dict[str, Any]
Value = Any

_WITHOUT_ID = "(a call of Gemini's)"
"""Gemini's calls need no id; in chat they get one that every provider accepts."""


def as_chat(form: str, messages: list[Any]) -> list[Json]:
    """Convert a list of any format to chat messages with texts only; nothing is moved or repaired."""
    if form in ("openai-chat", "mistral"):
        return [_plain(message) for message in messages if message.get("role") != "function"]
    if form == "openai-responses":
        return responses_as_chat(messages)
    if form == "langchain":
        return [_plain(message) for message in langchain_as_chat(messages)]
    if form == "pydantic-ai":
        return pydantic_ai_as_chat(messages)
    chat: list[Json] = []
    for at, message in enumerate(messages):
        content = message.get("content", message.get("parts"))
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        read = [_read_part(part) for part in parts]
        if message.get("role") in ("assistant", "model"):
            chat.append(_response(read, at))
        else:
            asked = chat[-1].get("tool_calls", []) if chat and form == "gemini" else []
            chat += _user(read, {call["id"]: call["function"]["name"] for call in asked})
    return chat


def _read_part(part: Json) -> tuple[str, Any]:
    """Read one part: its kind, and its text, call or result."""
    if isinstance(call := part.get("functionCall"), dict):
        return "call", _call(call.get("id") or _WITHOUT_ID, call.get("name"), call.get("args") or {})
    if isinstance(answer := part.get("functionResponse"), dict):
        return "result", (
            answer.get("id") or ("name", answer.get("name")),
            json.dumps(answer.get("response")),
        )
    if isinstance(use := part.get("toolUse"), dict):
        return "call", _call(use.get("toolUseId"), use.get("name"), use.get("input"))
    if isinstance(result := part.get("toolResult"), dict):
        return "result", (result.get("toolUseId"), json.dumps(result.get("content")))
    if part.get("type") == "tool_use":
        return "call", _call(part.get("id"), part.get("name"), part.get("input"))
    if part.get("type") == "tool_result":
        return "result", (part.get("tool_use_id"), json.dumps(part.get("content")))
    if (
        part.get("type") in ("thinking", "redacted_thinking")
        or "reasoningContent" in part
        or part.get("thought")
    ):
        return "thought", ""
    return "words", part["text"] if isinstance(part.get("text"), str) else "(something)"


def _call(call_id: Value, name: Value, arguments: Value) -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def _response(read: list[tuple[str, Any]], at: int) -> Json:
    words = "\n".join(content for kind, content in read if kind == "words")
    made: Json = {"role": "assistant", "content": words or None}
    calls = [call for kind, call in read if kind == "call"]
    if calls:
        for place, call in enumerate(calls):
            if call["id"] is _WITHOUT_ID:
                call["id"] = f"g{at:05}{place:03}"
        made["tool_calls"] = calls
    return made


def _user(read: list[tuple[str, Any]], asked: dict[Any, Any]) -> list[Json]:
    made: list[Json] = []
    given = {content[0] for kind, content in read if kind == "result" and isinstance(content[0], str)}
    open_calls = {call_id: name for call_id, name in asked.items() if call_id not in given}
    for kind, content in read:
        if kind == "result":
            call_id, words = content
            if isinstance(call_id, tuple):  # Gemini: by name, in order.
                call_id = next(
                    (each for each, name in open_calls.items() if name == call_id[1]), f"no {call_id[1]}"
                )
                open_calls.pop(call_id, None)
            made.append({"role": "tool", "tool_call_id": call_id, "content": words})
        elif made and made[-1]["role"] == "user":
            made[-1]["content"] += "\n" + content
        else:
            made.append({"role": "user", "content": content})
    return made


def _plain(message: Json) -> Json:
    """Return a chat message with its chunks put into one text."""
    content = message.get("content")
    made = {
        key: message[key]
        for key in ("role", "tool_calls", "tool_call_id", "name")
        if message.get(key) is not None
    }
    if isinstance(content, list):
        content = (
            "\n".join(chunk.get("text") or "(something)" for chunk in content if isinstance(chunk, dict))
            or None
        )
    made["content"] = content
    if made["role"] == "developer":
        made["role"] = "system"
    for call in made.get("tool_calls", []):
        if isinstance(call.get("function", {}).get("arguments"), dict):
            return _plain({**message, "tool_calls": [_texted(each) for each in message["tool_calls"]]})
    return made


def _texted(call: Json) -> Json:
    inner = call["function"]
    arguments = inner["arguments"]
    return {
        **call,
        "function": {
            **inner,
            "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
        },
    }
