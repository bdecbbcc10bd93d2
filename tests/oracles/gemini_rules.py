"""Refusals of the Gemini API; see `claude_rules`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

Json = dict[str, Any]

_DATA = {
    "text", "inlineData", "fileData", "functionCall", "functionResponse", "executableCode", "codeExecutionResult",
    "inline_data", "file_data", "function_call", "function_response", "executable_code", "code_execution_result",
    "toolCall", "toolResponse",
}  # fmt: skip
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_.:-]{0,127}")


def gemini(messages: list[Any], profile: str = "gemini") -> Iterator[str]:
    """Yield the errors of generateContent for contents as sent."""
    if not messages or messages[-1].get("role", "user") != "user":
        yield "GEM-LAST"
    asked: list[Json] = []
    before = ""
    for at, message in enumerate(messages):
        role, parts = message.get("role", "user"), message.get("parts")
        if role not in ("user", "model"):
            yield f"GEM-ROLE {at}: {role!r}"
        if not isinstance(parts, list) or not parts:
            yield f"GEM-PARTS {at}"
            parts = []
        for part in parts:
            if not isinstance(part, dict) or not _DATA & part.keys():
                yield f"GEM-ONEOF {at}"
            elif (
                "text" in part
                and not part["text"]
                and not (part.keys() & {"thoughtSignature", "thought_signature"})
            ):
                yield f"GEM-ONEOF {at}: empty text"
            elif not isinstance(part.get("text", ""), str):
                yield f"GEM-ONEOF {at}: no text"
            elif not all(isinstance(part[key], dict) for key in _DATA & part.keys() - {"text"}):
                yield f"GEM-ONEOF {at}: no object"
        calls, answers = (
            _inner(parts, "functionCall", "function_call"),
            _inner(parts, "functionResponse", "function_response"),
        )
        for call in calls:
            if not isinstance(call.get("args", {}), dict) or not _NAME.fullmatch(str(call.get("name") or "")):
                yield f"GEM-CALL {at}"
        for answer in answers:
            if not isinstance(answer.get("response"), dict) or not _NAME.fullmatch(
                str(answer.get("name") or "")
            ):
                yield f"GEM-RESPONSE {at}"
        if role == "user" and any(isinstance(part, dict) and part.get("thought") for part in parts):
            yield f"GEM-ROLE {at}: thought"
        if (calls and role != "model") or (answers and role != "user"):
            yield f"GEM-ROLE {at}: part"
        if asked or answers:
            if len(asked) != len(answers):
                yield f"GEM-COUNT {at}: {len(asked)} calls, {len(answers)} responses"
            else:
                yield from (f"{fault} {at}" for fault in _matched(asked, answers))
        if calls and before != "user":
            yield f"GEM-CALLTURN {at}"
        asked, before = calls, role
    if asked:
        yield "GEM-COUNT end"
    if profile == "gemini-3":
        yield from _signatures(messages)


def _inner(parts: list[Any], *keys: str) -> list[Json]:
    return [
        part[key]
        for part in parts
        if isinstance(part, dict)
        for key in keys
        if isinstance(part.get(key), dict)
    ]


def _matched(asked: list[Json], answers: list[Json]) -> Iterator[str]:
    if sorted(str(call.get("name")) for call in asked) != sorted(
        str(answer.get("name")) for answer in answers
    ):
        yield "GEM-NAMES"
    ids = [str(call["id"]) for call in asked if call.get("id")]
    given = [str(answer["id"]) for answer in answers if answer.get("id")]
    if (set(given) - set(ids) and len(ids) == len(asked)) or len(set(given)) != len(given):
        yield "GEM-IDS"


def _signatures(messages: list[Any]) -> Iterator[str]:
    start = 0
    for at, message in enumerate(messages):
        is_user = message.get("role", "user") == "user"
        if is_user and any("text" in part for part in message.get("parts") or []):
            start = at
    for at in range(start, len(messages)):
        for part in messages[at].get("parts") or []:
            if "functionCall" in part or "function_call" in part:
                if not part.get("thoughtSignature") and not part.get("thought_signature"):
                    yield f"GEM-SIGNATURE {at}"
                break
