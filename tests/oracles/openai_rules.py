"""Refusals of Chat Completions (and compatible servers), Mistral and Responses; see `claude_rules`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

Json = dict[str, Any]
Value = Any

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NINE = frozenset({"mistral-v3", "strict-template", "portable"})
_TEMPLATE = frozenset({"strict-template", "portable"})


def chat(messages: list[Any], profile: str = "openai-chat") -> Iterator[str]:
    """Yield the errors of a server of this profile for a list as sent."""
    expected: list[Any] = []
    functions = 0  # Deprecated calls that wait for a message of role "function".
    seen: set[Any] = set()
    for at, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role == "tool":
            if message.get("tool_call_id") in expected:
                expected.remove(message.get("tool_call_id"))
            else:
                yield f"OAI-ORPHAN {at}: {message.get('tool_call_id')!r}"
            if not isinstance(content, str) and not _chunks(content):
                yield f"OAI-NULL {at}"
            elif profile == "openai-chat" and not _is_text(content):
                yield f"OAI-TOOLTEXT {at}"
            if message.get("name") is not None and not _NAME.fullmatch(str(message["name"])):
                yield f"OAI-NAME {at}"
            continue
        if role == "function":
            functions -= 1
            if functions < 0 or not isinstance(content, str) or not message.get("name"):
                yield f"OAI-ORPHAN {at}: function"
            continue
        if expected or functions > 0:
            yield f"OAI-PAIR before {at}: {expected}"
        expected, functions = [], 0
        if role == "assistant":
            calls = message.get("tool_calls")
            yield from (f"{fault} {at}" for fault in _response(message, profile))
            calls = [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
            expected = [call.get("id") for call in calls]
            functions = 1 if message.get("function_call") else 0
            if profile in ("deepseek", "portable") and seen & set(map(str, expected)):
                yield f"OAI-UNIQUE {at}: over the list"
            seen |= set(map(str, expected))
        elif role not in ("user", "system", "developer"):
            yield f"OAI-ROLE {at}: {role!r}"
        elif not isinstance(content, str) and not _chunks(content):
            yield f"OAI-NULL {at}"
    if expected or functions > 0:
        yield f"OAI-PAIR end: {expected}"
    if profile in _TEMPLATE:
        yield from _template(messages)


def _chunks(content: Value) -> bool:
    return (
        isinstance(content, list)
        and bool(content)
        and all(
            isinstance(chunk, dict)
            and isinstance(chunk.get("type"), str)
            and (chunk["type"] != "text" or isinstance(chunk.get("text"), str))
            for chunk in content
        )
    )


def _is_text(content: Value) -> bool:
    return isinstance(content, str) or all(chunk["type"] == "text" for chunk in content)


def _files(content: Value) -> list[str]:
    kinds = [str(chunk.get("type")) for chunk in content] if isinstance(content, list) else []
    return [kind for kind in kinds if kind in ("image_url", "input_audio", "file")]


def _response(message: Json, profile: str) -> Iterator[str]:
    calls, content = message.get("tool_calls"), message.get("content")
    if "tool_calls" in message and (not isinstance(calls, list) or not calls):
        yield "OAI-EMPTYCALLS"
        calls = []
    if content is not None and not isinstance(content, str) and not _chunks(content):
        yield "OAI-SHAPE content"
    elif profile in ("openai-chat", "mistral") and _files(content):
        yield f"OAI-ROLE {_files(content)} of an assistant"
    if not content and not calls and not message.get("function_call") and not message.get("refusal"):
        if not message.get("audio"):
            yield "OAI-HOLLOW"
    ids = [call.get("id") if isinstance(call, dict) else None for call in calls or []]
    if len(set(map(str, ids))) != len(ids):
        yield "OAI-UNIQUE"
    for call in calls or []:
        yield from _call(call, profile)
    if message.get("function_call"):
        yield from _arguments(message["function_call"], profile)


def _call(call: Value, profile: str) -> Iterator[str]:
    if not isinstance(call, dict):
        yield "OAI-SHAPE call"
        return
    call_id = call.get("id")
    if not isinstance(call_id, str) or not call_id:
        yield f"OAI-ID {call_id!r}"
    elif profile == "openai-chat" and len(call_id) > 40:
        yield "OAI-IDLEN"
    elif profile in _NINE and not re.fullmatch("[a-zA-Z0-9]{9}", call_id):
        yield "MIS-ID"
    if profile == "openai-chat" and call.get("type") not in ("function", "custom"):
        yield f"OAI-TYPE {call.get('type')!r}"
    if "custom" not in call:
        yield from _arguments(call.get("function"), profile)


def _arguments(function: Value, profile: str) -> Iterator[str]:
    if not isinstance(function, dict) or not _NAME.fullmatch(str(function.get("name") or "")):
        yield "OAI-NAME call"
        return
    arguments = function.get("arguments")
    if profile.startswith("mistral") and isinstance(arguments, dict):
        return
    try:
        is_object = isinstance(arguments, str) and isinstance(json.loads(arguments), dict)
    except ValueError:
        is_object = False
    if not is_object:
        yield "OAI-ARGS"


def _template(messages: list[Any]) -> Iterator[str]:
    expected = "user"
    for at, message in enumerate(messages):
        role = message.get("role")
        if role in ("system", "developer"):
            if at:
                yield f"OAI-SYSTEM {at}"
        elif role == "user" or (role == "assistant" and not message.get("tool_calls")):
            if role != expected:
                yield f"OAI-ALTERNATE {at}"
            expected = "assistant" if role == "user" else "user"


def responses(messages: list[Any]) -> Iterator[str]:
    """Yield the errors of the Responses API for input items as sent."""
    calls: dict[str, str] = {}
    outputs: set[str] = set()
    ids: set[str] = set()
    for at, item in enumerate(messages):
        kind = item.get("type", "message" if "role" in item else None)
        if not isinstance(kind, str):
            yield f"RSP-SHAPE {at}"
            continue
        item_id = item.get("id")
        if item_id is not None and kind != "item_reference":
            prefix = {"function_call": "fc_", "reasoning": "rs_"}.get(kind, "")
            if kind == "message" and item.get("role") == "assistant":
                prefix = "msg_"
            if not isinstance(item_id, str) or len(item_id) > 64 or not item_id.startswith(prefix):
                yield f"RSP-ID {at}: {item_id!r}"
            elif item_id in ids:
                yield f"RSP-DUPID {at}: {item_id}"
            ids.add(str(item_id))
        if kind == "reasoning":
            after = messages[at + 1] if at + 1 < len(messages) else {}
            if (
                after.get("role", "assistant") != "assistant"
                or str(after.get("type")).endswith("_output")
                or not after
            ):
                yield f"RSP-REASONFOLLOW {at}"
        elif kind.endswith("_call") and "call_id" in item:
            yield from (f"{fault} {at}" for fault in _item_call(item, calls))
            calls[str(item.get("call_id"))] = kind
        elif kind.endswith("_call_output"):
            call_id = item.get("call_id")
            if call_id in outputs:
                yield f"RSP-DUPOUT {at}: {call_id}"
            elif call_id not in calls or calls[call_id] + "_output" != kind:
                yield f"RSP-ORPHAN {at}: {call_id!r}"
            outputs.add(str(call_id))
            if not isinstance(item.get("output"), str | list) and kind == "function_call_output":
                yield f"RSP-OUTPUT {at}"
        elif kind == "message":
            yield from (f"{fault} {at}" for fault in _item_message(item))
    if missing := set(calls) - outputs:
        yield f"RSP-PAIR {sorted(missing)}"


def _item_call(item: Json, calls: dict[str, str]) -> Iterator[str]:
    call_id = item.get("call_id")
    if not isinstance(call_id, str) or not call_id or len(call_id) > 64:
        yield f"RSP-CALLID {call_id!r}"
    elif call_id in calls:
        yield f"RSP-UNIQUE {call_id}"
    if item["type"] == "function_call":
        yield from _arguments(item, "responses")


def _item_message(item: Json) -> Iterator[str]:
    content, role = item.get("content"), item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        yield f"RSP-ROLE {role!r}"
    if isinstance(content, list):
        wanted = (
            ("output_text", "refusal") if role == "assistant" else ("input_text", "input_image", "input_file")
        )
        for chunk in content:
            kind = chunk.get("type") if isinstance(chunk, dict) else None
            if kind not in wanted and kind in ("output_text", "input_text", "refusal", None):
                yield f"RSP-CONTENT {kind!r} of {role}"
            elif kind in ("output_text", "input_text") and not isinstance(chunk.get("text"), str):
                yield "RSP-CONTENT text"
    elif not isinstance(content, str):
        yield "RSP-CONTENT missing"
    if role == "assistant" and not content:
        yield "RSP-CONTENT empty"


def reasoning_faults(before: list[Any], after: list[Any]) -> Iterator[str]:
    """RSP-NEEDSREASON: an item that kept its id after the reasoning paired with it was lost."""
    there = {item.get("id") for item in after if item.get("type") == "reasoning"}
    kept = {item.get("id") for item in after if item.get("id") and item.get("type") != "reasoning"}
    for item, follower in pairwise(before):
        if item.get("type") == "reasoning" and item.get("id") not in there and follower.get("id") in kept:
            if follower.get("type") in ("function_call", "message"):
                yield f"RSP-NEEDSREASON {follower.get('id')}"
