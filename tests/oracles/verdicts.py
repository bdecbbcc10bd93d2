"""The independent validator: every rule of one format and profile, over a list with the next prompt at its end."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.oracles.claude_rules import anthropic, bedrock
from tests.oracles.gemini_rules import gemini
from tests.oracles.openai_rules import chat, responses
from tests.oracles.stored_rules import (
    langchain_as_chat,
    langchain_faults,
    pydantic_ai_as_chat,
    pydantic_ai_faults,
)

Json = dict[str, Any]
Value = Any

PROMPTS: dict[str, Json] = {
    "anthropic": {"role": "user", "content": "next"},
    "bedrock": {"role": "user", "content": [{"text": "next"}]},
    "gemini": {"role": "user", "parts": [{"text": "next"}]},
    "openai-chat": {"role": "user", "content": "next"},
    "mistral": {"role": "user", "content": "next"},
    "openai-responses": {"role": "user", "content": "next"},
    "pydantic-ai": {
        "kind": "request",
        "parts": [{"part_kind": "user-prompt", "content": "next", "timestamp": "2026-01-01T00:00:00Z"}],
    },
    "langchain": {"type": "human", "data": {"content": "next", "type": "human"}},
}
"""The user's next text, per format."""

_LONE = re.compile("[\ud800-\udfff]")


def with_prompt(form: str, messages: list[Any], profile: str = "") -> list[Any]:
    """Append the next prompt to a stored history; where roles must alternate it joins the last user turn."""
    prompt = PROMPTS[form]
    key = {"anthropic": "content", "bedrock": "content", "gemini": "parts"}.get(form)
    is_strict = form == "bedrock" or profile in ("vertex", "bedrock-claude", "bedrock-mistral", "portable")
    last = messages[-1] if messages else None
    if key is None or not is_strict or not isinstance(last, dict) or last.get("role") != "user":
        return [*messages, prompt]
    if not last.get(key):
        return [*messages, prompt]
    content = last[key] if isinstance(last[key], list) else [{"type": "text", "text": last[key]}]
    words = prompt[key] if isinstance(prompt[key], list) else [{"type": "text", "text": "next"}]
    return [*messages[:-1], {**last, key: [*content, *words]}]


def refusals(form: str, messages: list[Any], profile: str = "") -> list[str]:
    """Return all errors of the servers for a repaired list followed by the next prompt."""
    try:
        return _refusals(form, messages, profile)
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        return [f"SHAPE {type(error).__name__}: {error}"]  # Even the validator cannot read it.


def _refusals(form: str, messages: list[Any], profile: str) -> list[str]:
    found = [f"SHAPE {at}" for at, message in enumerate(messages) if not isinstance(message, dict)]
    if found:
        return found
    if profile not in ("bedrock-mistral", "minimax", "portable", "strict-template"):
        messages = with_prompt(form, messages, profile)
    match form:
        case "anthropic":
            found += anthropic(messages, profile or "anthropic")
        case "bedrock":
            found += bedrock(messages, profile or "bedrock-claude")
        case "gemini":
            found += gemini(messages, profile or "gemini")
        case "openai-chat" | "mistral":
            found += chat(messages, profile or form)
        case "openai-responses":
            found += responses(messages)
        case "pydantic-ai":
            found += [*pydantic_ai_faults(messages), *chat(pydantic_ai_as_chat(messages), "stored")]
        case _:
            found += [*langchain_faults(messages), *chat(langchain_as_chat(messages), "stored")]
    if _LONE.search(json.dumps(messages, ensure_ascii=False)):
        found.append("X-UTF8")
    return found


def doubts(form: str, messages: list[Any]) -> list[str]:
    """Return the faults that some servers of a format refuse and others accept: a repair may leave or change them."""
    found: list[str] = []
    leading: Value = next((m for m in messages if _role_of(form, m) not in ("system", "developer")), {})
    if _role_of(form, leading) == "assistant":
        found.append("starts with a response")
    for at, message in enumerate(messages):
        given = message.get("data", message)
        content = given.get("content", given.get("parts"))
        if _role_of(form, message) in ("user", "assistant", "system") and (
            not content or (isinstance(content, str) and content.isspace())
        ):
            found.append(f"says nothing {at}")
        if form == "gemini" and isinstance(content, list):
            answers = ["functionResponse" in part for part in content]
            if True in answers and False in answers[: len(answers) - answers[::-1].index(True)]:
                found.append(f"words before responses {at}")
        if _role_of(form, message) in ("system", "developer") and at:
            found.append(f"system in mid-list {at}")
        parts = content if isinstance(content, list) else []
        if at and any(isinstance(part, dict) and part.get("part_kind") == "system-prompt" for part in parts):
            found.append(f"system in mid-list {at}")
        if form == "gemini" and "role" not in message:
            found.append(f"no role {at}")
        if isinstance(content, list) and any(_is_nothing(part) for part in content):
            found.append(f"a part that says nothing {at}")
        if isinstance(content, list) and all(
            isinstance(part, dict) and part.get("type") == "thinking" for part in content
        ):
            found.append(f"thinks only {at}")
    if form in ("pydantic-ai", "langchain"):
        as_chat = pydantic_ai_as_chat(messages) if form == "pydantic-ai" else langchain_as_chat(messages)
        ids = [call["id"] for message in as_chat for call in message.get("tool_calls", [])]
        if len(set(ids)) != len(ids):
            found.append("an id that a later turn uses again")
        if not all(isinstance(each, str) and re.fullmatch("[a-zA-Z0-9_-]{1,40}", each) for each in ids):
            found.append("an id that some servers refuse")
    if form == "openai-responses" and list(chat(responses_as_chat(messages), "stored")):
        found.append("outputs are not next to their calls")
    return found


def _is_nothing(part: Value) -> bool:
    if not isinstance(part, dict):
        return isinstance(part, str) and not part.strip()
    content = part.get("content", part.get("text", "x"))
    has_words = part.get("part_kind") == "user-prompt" and "content" not in part
    return has_words or (isinstance(content, str) and not content.strip())


def _role_of(form: str, message: Value) -> str:
    if form == "openai-responses" and "role" not in message:
        kind = str(message.get("type"))
        return "tool" if kind.endswith("_output") else "assistant"
    named = message.get("role") or message.get("kind") or message.get("type")
    return {
        "model": "assistant",
        "response": "assistant",
        "ai": "assistant",
        "request": "user",
        "human": "user",
    }.get(str(named), str(named))


def responses_as_chat(items: list[Any]) -> list[Json]:
    """Convert Responses items, literally, to chat messages: calls in a row are one response."""
    made: list[Json] = []
    for item in items:
        kind = str(item.get("type", "message"))
        if kind.endswith("_call") and "call_id" in item:
            name = item.get("name") or kind
            call = {"id": item["call_id"], "type": "function", "function": {"name": name, "arguments": "{}"}}
            call["function"]["arguments"] = item.get("arguments", "{}")
            if made and made[-1]["role"] == "assistant" and made[-1].get("tool_calls"):
                made[-1]["tool_calls"].append(call)
            else:
                made.append({"role": "assistant", "content": None, "tool_calls": [call]})
        elif kind.endswith("_call_output"):
            made.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": "output"})
        elif kind == "message":
            words = item.get("content") or ""
            text = words if isinstance(words, str) else "".join(str(chunk.get("text", "")) for chunk in words)
            made.append({"role": item.get("role"), "content": text or "(nothing)"})
    return made
