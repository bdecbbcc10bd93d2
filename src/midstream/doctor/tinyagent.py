"""Messages of tinyagent, in which newer versions of tunacode save sessions.

A response's calls are blocks `{"type": "tool_call", "id", "name", "arguments"}`, a result is a message of its own
(`role: tool_result`). They are checked and repaired as Chat Completions messages, the format in which they are sent,
and converted back. Unchanged messages are the same objects.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from midstream.doctor.shapes import Json
from midstream.history.codecs.codec_spec import as_json, as_words
from midstream.history.operations import repair_by_name as repair
from midstream.history.repair.report import Edit, Repaired

NAME = "tinyagent"
CHAT = "openai-chat"
RULES = "neutral"
"""The rules for any model, because tunacode's user selects it."""

_FROM = "_from"
"""Number of the original message, chunk or call; a repair keeps unknown keys."""


def repair_messages(messages: list[Any], profile: str | None) -> Repaired:
    """Repair the messages of a session; see `midstream.history.operations.repair`."""
    crossing = _Crossing()
    chat = [crossing.there(message) for message in messages]
    done = repair(chat, format=CHAT, profile=profile or RULES)
    if not done.is_changed:
        return replace(done, messages=messages)
    same = {id(made): message for made, message in zip(chat, messages, strict=True)}
    back = [same[id(each)] if id(each) in same else crossing.back(each) for each in done.messages]
    return replace(done, messages=_name_results(back), edits=(*done.edits, *_lost_thoughts(messages, back)))


class _Crossing:
    """The conversion to Chat Completions and back."""

    def __init__(self) -> None:
        self._origins: list[Any] = []

    def there(self, message: Any) -> Any:  # noqa: ANN401 - any JSON of the file
        """Return a message in the form of a request, without thoughts, which are not sent."""
        if not isinstance(message, dict):
            return message
        role, content = message.get("role"), message.get("content")
        blocks = [each for each in content if each is not None] if isinstance(content, list) else []
        body: Any = [self._chunk(block) for block in blocks if _type(block) not in ("tool_call", "thinking")]
        if isinstance(content, str):
            body = content
        if role == "tool_result":
            result = {"role": "tool", "tool_call_id": message.get("tool_call_id"), "content": body}
            return self._mark(result, message)
        if role != "assistant":
            return self._mark({"role": role, "content": body}, message)
        calls = [self._call(block) for block in blocks if _type(block) == "tool_call"]
        response = {"role": role, "content": body or None, **({"tool_calls": calls} if calls else {})}
        return self._mark(response, message)

    def _chunk(self, block: Any) -> Any:  # noqa: ANN401 - any JSON of the file
        return self._mark(_chunk(block), block) if isinstance(block, dict) else block

    def _call(self, block: Json) -> Json:
        return self._mark(_call(block), block)

    def _mark(self, made: Json, origin: Json) -> Json:
        self._origins.append(origin)
        return {**made, _FROM: len(self._origins) - 1}

    def _origin(self, made: Json) -> tuple[Json, Json]:
        """Return the original value (nothing for a new one), and the value without its mark."""
        number = made.get(_FROM)
        origin = self._origins[number] if isinstance(number, int) else {}
        return origin, {key: value for key, value in made.items() if key != _FROM}

    def back(self, message: Any) -> Any:  # noqa: ANN401 - any JSON of the file
        """Return a repaired message in tinyagent's form."""
        if not isinstance(message, dict):
            return message
        source, plain = self._origin(message)
        content = plain.get("content")
        body: Any = "" if content == "" else []  # empty content keeps its type
        if isinstance(content, str) and content:
            body = [{"type": "text", "text": content}]
        elif isinstance(content, list):
            body = [self._block(chunk) for chunk in content]
        match plain.get("role"):
            case "tool":
                new: Json = (
                    {} if source else {"tool_name": plain.get("name"), "details": {}, "is_error": True}
                )
                id_ = plain.get("tool_call_id")
                return {**source, **new, "role": "tool_result", "tool_call_id": id_, "content": body}
            case "assistant":
                calls = [self._call_back(call) for call in plain.get("tool_calls") or []]
                return {**source, "role": "assistant", "content": [*_thoughts(source), *body, *calls]}
            case role:
                return {**source, "role": role, "content": body}

    def _block(self, chunk: Any) -> Any:  # noqa: ANN401 - any JSON of the file
        if not isinstance(chunk, dict):
            return chunk
        source, plain = self._origin(chunk)
        if source and _chunk(source) == plain:
            return source
        return {**source, "text": plain["text"]} if _type(source) == "text" and "text" in plain else plain

    def _call_back(self, call: Json) -> Json:
        source, plain = self._origin(call)
        if source and _call(source) == plain:
            return source
        function = plain.get("function") or {}
        named = {"id": plain.get("id"), "name": function.get("name")}
        return {**source, "type": "tool_call", **named, "arguments": _object(function.get("arguments"))}


def _type(block: object) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    return kind if isinstance(kind, str) else ""


def _chunk(block: Json) -> Json:
    match _type(block):
        case "text":
            return {"type": "text", "text": "" if block.get("text") is None else block["text"]}
        case "image":
            return {"type": "image_url", "image_url": {"url": block.get("url")}}
        case _:
            return block


def _call(block: Json) -> Json:
    arguments = block.get("arguments", {})
    text = arguments if isinstance(arguments, str) else as_json(arguments)
    function = {"name": block.get("name"), "arguments": text}
    return {"id": block.get("id"), "type": "function", "function": function}


def _object(text: object) -> Json:
    """Parse arguments that were already repaired."""
    found = json.loads(text) if isinstance(text, str) else text
    return found if isinstance(found, dict) else {}


def _thoughts(message: Any) -> list[Json]:  # noqa: ANN401 - any JSON of the file
    content = message.get("content") if isinstance(message, dict) else None
    return [block for block in content if _type(block) == "thinking"] if isinstance(content, list) else []


def _name_results(messages: list[Any]) -> list[Any]:
    """Give new results the names of their tools."""
    names: dict[str, Any] = {}
    done = []
    for message in messages:
        if isinstance(message, dict):
            content = message.get("content")
            for block in content if isinstance(content, list) else ():
                if _type(block) == "tool_call":
                    names[str(block.get("id"))] = block.get("name")
            if message.get("role") == "tool_result" and message.get("tool_name", 0) in (None, ""):
                name = names.get(str(message.get("tool_call_id")))
                message = {**message, "tool_name": name}
        done.append(message)
    return done


def _lost_thoughts(before: list[Any], after: list[Any]) -> Iterator[Edit]:
    """Yield edits for removed responses with only thoughts, which are not sent."""
    kept = {id(thought) for message in after for thought in _thoughts(message)}
    for at, message in enumerate(before):
        for thought in _thoughts(message):
            if id(thought) not in kept:
                yield Edit("thinking-last", at, "dropped", lost=as_words(thought.get("thinking")))
