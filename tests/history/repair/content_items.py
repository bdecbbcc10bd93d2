"""The content of a history: every text, result and call, read literally, as a multiset and in order.

Shares no code with `midstream.session`. Thinking is left out (it may be removed), and so is everything
without content: ids, roles, signatures, settings, images.
"""

# ruff: noqa: ANN401 - a history may hold anything
from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_-]{0,63}")
_ARGUMENTS = ("input", "args", "arguments")
_ANSWERS = ("toolResult", "functionResponse", "function_response")
_HOLDERS = ("content", "parts", "data", "message", "toolUse", "functionCall", "function_call", "function")
_LISTS = ("tool_calls", "invalid_tool_calls")


@dataclass(frozen=True)
class ContentItem:
    """One text, the text of one result, or one call with its arguments."""

    kind: str
    text: str


def content_items(messages: Any) -> list[ContentItem]:
    """Return all content, in order."""
    return [
        ContentItem(items.kind, text)
        for items in _items_of(messages, "words")
        if (text := _mended(items.text))
    ]


def lost_content(before: list[ContentItem], after: list[ContentItem]) -> Counter[str]:
    """Return the lost content: each item of the input needs a place of its own in the output.

    The same text comes first; where a result became marked text, or was joined with others, a part of a text:
    it is cut out of it, so that no other item can match there.
    """
    there = Counter(content.text for content in after)
    left: list[str] = []
    for content in before:
        if there[content.text]:
            there[content.text] -= 1
        else:
            left.append(content.text)
    rest = sorted((text for text, count in there.items() for _ in range(count)), key=len)
    lost: Counter[str] = Counter()
    for text in sorted(left, key=len, reverse=True):
        for place, holder in enumerate(rest):
            found = next((form for form in (text, _quoted(text)) if form in holder), None)
            if found is not None:
                rest[place] = holder.replace(found, "\0", 1)
                break
        else:
            lost[text] += 1
    return lost


def out_of_order(before: list[ContentItem], after: list[ContentItem]) -> list[str]:
    """Return the content whose order has changed; results are left out, they move to their calls."""
    count = Counter(content.text for content in before)
    places: list[tuple[tuple[int, int], str]] = []
    for content in before:
        if content.kind != "result" and count[content.text] == 1:
            spots = [
                (at, other.text.index(content.text))
                for at, other in enumerate(after)
                if content.text in other.text
            ]
            if len(spots) == 1:
                places.append((spots[0], content.text))
    return [text for (here, _), (there, text) in itertools.pairwise(places) if there < here]


def _items_of(value: Any, kind: str) -> Iterator[ContentItem]:
    if isinstance(value, str):
        yield _written_call(value) or ContentItem(kind, value)
    elif isinstance(value, list):
        for item in value:
            yield from _items_of(item, kind)
    elif isinstance(value, dict) and not _is_thought(value):
        if any(key in value for key in _ARGUMENTS) and ("name" in value or "tool_name" in value):
            yield _call(value)
            return
        listed = [counted for key in _LISTS for counted in _items_of(value.get(key) or [], kind)]
        answer = "result" if _is_result(value) else kind
        is_message = "role" in value or "tool_calls" in value
        for key, item in value.items():
            if key in _ANSWERS and isinstance(item, dict):
                yield from _texts_below(item.get("content", item.get("response")), "result")
            elif key in ("content", "output", "json") and answer == "result":
                yield from (
                    _items_of(item, answer)
                    if is_message and isinstance(item, list)
                    else _texts_below(item, answer)
                )
            elif key == "content" and listed and isinstance(item, list):
                yield from _unlisted(item, kind, listed)
            elif key == "text" or (key == "refusal" and isinstance(item, str)):
                yield from _items_of(item, kind)
            elif key in _HOLDERS:
                yield from _items_of(item, answer)
        if not isinstance(value.get("content"), list):
            yield from listed


def _unlisted(content: Any, kind: str, listed: list[ContentItem]) -> Iterator[ContentItem]:
    """Count a call once that LangChain has in the content and in `tool_calls`."""
    there = list(_items_of(content, kind))
    if not any(items.kind == "call" for items in Counter(there) - Counter(listed)):
        yield from (items for items in there if items.kind != "call")
        yield from listed  # It has them all, in order.
        return
    yield from there
    yield from (Counter(listed) - Counter(there)).elements()


def _texts_below(value: Any, kind: str) -> Iterator[ContentItem]:
    """Return the texts of a result of any shape, without those of its images."""
    if isinstance(value, str):
        yield ContentItem(kind, value)
    elif isinstance(value, list):
        for item in value:
            yield from _texts_below(item, kind)
    elif isinstance(value, dict):
        if value.get("type") in ("image", "image_url", "input_image", "document") or "image" in value:
            return
        for key, item in value.items():
            if key != "type":
                yield from _texts_below(item, kind)


def _is_result(value: Json) -> bool:
    named = (value.get("type"), value.get("role"), value.get("part_kind"))
    return "tool_call_id" in value or any(
        isinstance(name, str)
        and (
            name.endswith(("_output", "_result"))
            or name in ("tool", "function", "tool-return", "retry-prompt")
        )
        for name in named
    )


def _is_thought(value: Json) -> bool:
    return (
        value.get("type") in ("thinking", "redacted_thinking", "reasoning")
        or value.get("part_kind") == "thinking"
        or value.get("thought") is True
        or "reasoningContent" in value
    )


def _call(value: Json) -> ContentItem:
    """Return a call as one text; a name that no provider accepts is left out, since it is replaced."""
    name = value.get("tool_name", value.get("name"))
    arguments = next(value[key] for key in _ARGUMENTS if key in value)
    plain = name if isinstance(name, str) and _NAME.fullmatch(name) else ""
    return ContentItem("call", f"{plain}({_canonical(arguments)})")


def _written_call(text: str) -> ContentItem | None:
    """Return a call in the message of another role: repair can only write it there as JSON."""
    if not text.startswith('{"type": "tool_'):
        return None
    try:
        found = json.loads(text)
    except ValueError:
        return None
    is_call = "name" in found and any(key in found for key in _ARGUMENTS)
    return _call(found) if is_call else None


def _canonical(arguments: Any) -> str:
    for _ in range(4):
        if isinstance(arguments, str):
            try:
                found = json.loads(arguments) if arguments.strip() else {}
            except ValueError:
                return arguments
            if not isinstance(found, dict | str):
                return arguments if found is not None else "{}"
            arguments = found
        elif isinstance(arguments, dict) and arguments.keys() == {"_raw"}:
            arguments = arguments["_raw"]
            if not isinstance(arguments, str):
                return json.dumps(arguments)
            return arguments
    return json.dumps(arguments if arguments is not None else {}, sort_keys=True, ensure_ascii=False)


def _quoted(text: str) -> str:
    """Return a text in its JSON form."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _mended(text: str) -> str:
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").strip()
