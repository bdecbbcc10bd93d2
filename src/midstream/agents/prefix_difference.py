"""The first difference of two requests: the place at which a provider's cached prefix ends, and the cause.

Requests are compared as providers read them: the model, the tools, the system prompt, then the messages. Spaces between
members, the order of the request's own fields, and cache marks are no differences, because they are not part of a
prompt. The result contains no text of the conversation, only places and kinds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import AnyStr

import msgspec
from msgspec import Struct

from midstream.errors import UsageError
from midstream.history.codecs.codec_spec import Json, Value

AROUND_CHARS = 40
"""Characters on each side of a difference that are examined to find its kind."""


class PrefixCause(StrEnum):
    """Reason why the prefix became invalid."""

    MODEL = "model"
    """Another model, which has a cache of its own."""
    TOOLS_ORDER = "tools_order"
    """The same tools in another order."""
    TOOLS = "tools"
    """A tool was added, removed or changed."""
    KEY_ORDER = "key_order"
    """The same values with their members in another order."""
    ENCODING = "encoding"
    """The same text in another form, such as a string and a block."""
    CLOCK = "clock"
    """A date or a time has changed."""
    ID = "id"
    """An id or a random token has changed."""
    PATH = "path"
    """Another path of a file or a folder."""
    MOVED = "moved"
    """The content at this place is now further down, such as a reminder after the newest message."""
    SHORTENED = "shortened"
    """The end is missing: a message was removed, or the conversation was compacted."""
    WORDS = "words"
    """Other text."""


_WORDS = {
    PrefixCause.MODEL: "another model was used",
    PrefixCause.TOOLS_ORDER: "the tools came in another order",
    PrefixCause.TOOLS: "the tools changed",
    PrefixCause.KEY_ORDER: "the same value was written with its members in another order",
    PrefixCause.ENCODING: "the same text was encoded in another form",
    PrefixCause.CLOCK: "a date or time changed",
    PrefixCause.ID: "an id changed",
    PrefixCause.PATH: "a path changed",
    PrefixCause.MOVED: "the content at this place moved further down",
    PrefixCause.SHORTENED: "the conversation is shorter than before",
    PrefixCause.WORDS: "the text changed",
}


class Difference(Struct, frozen=True):
    """Place of the first difference of two requests.

    Args:
        byte: Bytes of the common prefix, of the JSON without spaces, in the order in which providers read.
        total: Bytes of the earlier request, counted likewise: the greatest possible cache read.
        field: The place, such as `system` or `messages[3].content[0].text`.
        cause: The cause, as far as it can be derived.
        before, after: The kinds of the old and the new value: `date`, `time`, `uuid`, `id`, `number`, `path`, `text`,
            `switch`, `list`, `object`, `nothing`.
    """

    byte: int
    total: int
    field: str
    cause: PrefixCause
    before: str
    after: str

    @property
    def words(self) -> str:
        """Return a line about it, without text of the conversation."""
        kinds = self.before if self.before == self.after else f"{self.before} to {self.after}"
        return f"{_WORDS[self.cause]} at {self.field} ({kinds}), after byte {self.byte} of {self.total}"


def first_difference(before: bytes, after: bytes) -> Difference | None:
    """Return the end of the common prefix of `before` and `after`, or None if `after` begins with all of `before`.

    Args:
        before, after: The bodies of two requests, of OpenAI's chat completions or responses or Anthropic's messages.

    Raises:
        UsageError: One of them is not a JSON object.
    """
    was, now = _request_of(before), _request_of(after)
    there = list(_pieces(now))
    place, kept = 0, 0
    total = sum(len(_encode(value)) for _, value in _pieces(was))
    for place, (field, value) in enumerate(_pieces(was)):
        other_field, other = there[place] if place < len(there) else ("", None)
        if other_field == field and _encode(value) == _encode(other):
            kept += len(_encode(value))
            continue
        if other_field != field:
            # One request has more of the earlier fields, or the conversation became shorter.
            return _of_missing(field, other_field, kept, total, was, now)
        byte = kept + _common(_encode(value), _encode(other))
        return _of_values(field, value, other, byte, total, now)
    return None


def _request_of(body: bytes) -> Json:
    try:
        request = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise UsageError(f"a request is a JSON object: {error}") from error
    if not isinstance(request, dict):
        raise UsageError("a request is a JSON object")
    return {key: _without_marks(value) for key, value in request.items()}


_LISTS = ("messages", "input", "contents")
_BEFORE = ("model", "tools", "system", "instructions", "systemInstruction")


def _pieces(request: Json) -> Iterator[tuple[str, Value]]:
    """Yield a request's fields in the order in which providers read them, lists entry by entry."""
    for name in (*_BEFORE, *_LISTS):
        value = request.get(name)
        if name in _LISTS and isinstance(value, list):
            yield from ((f"{name}[{place}]", each) for place, each in enumerate(value))
        elif value:
            yield name, value


def _without_marks(value: Value) -> Value:
    if isinstance(value, list):
        return [_without_marks(each) for each in value]
    if isinstance(value, dict):
        return {key: _without_marks(each) for key, each in value.items() if key != "cache_control"}
    return value


def _of_missing(field: str, other: str, kept: int, total: int, was: Json, now: Json) -> Difference:
    if other and _rank(other) < _rank(field):
        cause = PrefixCause.TOOLS if other == "tools" else PrefixCause.WORDS
        return Difference(kept, total, other, cause, "nothing", _kind(now.get(other)))
    cause = PrefixCause.TOOLS if field == "tools" else PrefixCause.WORDS
    cause = PrefixCause.SHORTENED if _rank(field) == len(_BEFORE) else cause
    return Difference(kept, total, field, cause, _kind(_at(was, field)), "nothing")


def _rank(field: str) -> int:
    name = field.partition("[")[0]
    return _BEFORE.index(name) if name in _BEFORE else len(_BEFORE)


def _at(request: Json, field: str) -> Value:
    name, _, place = field.partition("[")
    return request[name][int(place[:-1])] if place else request[name]


def _of_values(field: str, was: Value, is_now: Value, byte: int, total: int, now: Json) -> Difference:
    path, one, other = _narrow(field, was, is_now)
    cause = _cause_of(field, was, is_now, one, other)
    before, after = _kind(one), _kind(other)
    if cause is None and isinstance(one, str) and isinstance(other, str):
        before, after = _kinds_of_texts(one, other)
        cause = _OF_KINDS.get(before) if before == after else None
    if cause is None:
        has_moved = _has_moved(one, now, field) or _has_moved(was, now, field)
        cause = PrefixCause.MOVED if has_moved else PrefixCause.WORDS
    return Difference(byte, total, path, cause, before, after)


def _cause_of(field: str, was: Value, is_now: Value, one: Value, other: Value) -> PrefixCause | None:
    if field == "model":
        return PrefixCause.MODEL
    if _encode_sorted(one) == _encode_sorted(other):
        return PrefixCause.KEY_ORDER
    if field == "tools":
        is_shuffled = isinstance(was, list) and isinstance(is_now, list) and _bag(was) == _bag(is_now)
        return PrefixCause.TOOLS_ORDER if is_shuffled else PrefixCause.TOOLS
    is_same = any(_flat(a) and _flat(a) == _flat(b) for a, b in ((one, other), (was, is_now)))
    return PrefixCause.ENCODING if is_same else None


def _bag(values: list[Value]) -> list[bytes]:
    return sorted(map(_encode_sorted, values))


def _narrow(path: str, one: Value, other: Value) -> tuple[str, Value, Value]:
    """Return the innermost place with the first difference, and its values."""
    while True:
        if isinstance(one, dict) and isinstance(other, dict) and list(one) == list(other):
            key = next(key for key in one if _encode(one[key]) != _encode(other[key]))
            path, one, other = f"{path}.{key}", one[key], other[key]
        elif isinstance(one, list) and isinstance(other, list):
            pairs = enumerate(zip(one, other, strict=False))
            place = next((at for at, (a, b) in pairs if _encode(a) != _encode(b)), min(len(one), len(other)))
            path = f"{path}[{place}]"
            one, other = one[place : place + 1], other[place : place + 1]
            if not (one and other):
                return path, one[0] if one else None, other[0] if other else None
            one, other = one[0], other[0]
        else:
            return path, one, other


def _later(now: Json, field: str) -> Iterator[tuple[str, Value]]:
    pieces = _pieces(now)
    for name, _ in pieces:
        if name == field:
            break
    return pieces


def _has_moved(what: Value, now: Json, field: str) -> bool:
    """Whether its longest text is further down."""
    text = max(_texts(what), key=len, default="")
    if len(text) < AROUND_CHARS:
        return False  # a short text may occur twice
    return any(text in each for _, value in _later(now, field) for each in _texts(value))


def _texts(value: Value) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)


def _flat(value: Value) -> str:
    """Return the text of a content in any form; "" if it has more than text."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        if "role" in value and "content" in value:
            inner = _flat(value["content"])
            return f"{value['role']}\n{inner}" if inner else ""
        return str(value["text"]) if set(value) <= {"type", "text"} and "text" in value else ""
    if isinstance(value, list):
        parts = [_flat(each) for each in value]
        return "".join(parts) if all(parts) else ""
    return ""


# --- the kind of a difference ------------------------------------------------------------------------------------

_MONTHS = "Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec"
_KINDS: Mapping[str, re.Pattern[str]] = {
    "uuid": re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", re.IGNORECASE),
    "date": re.compile(
        r"\b\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2}(?:\.\d+)?)?)?(?:Z\b)?|\b\d{1,2}[/.]\d{1,2}[/.]\d{2,4}\b"
        rf"|\b(?:\d{{1,2}}\.? )?(?:{_MONTHS})[a-z]*\.?(?: \d{{1,2}})?(?:,? \d{{4}})?\b"
        r"|\b(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?\b"
    ),
    "time": re.compile(r"\b\d{1,2}:\d{2}(?::\d{2})?(?: ?[AP]M\b)?|\b1[5-9]\d{8}(?:\.\d+|\d{3})?\b"),
    "path": re.compile(r"(?:[A-Za-z]:)?[/\\][\w.~-]+(?:[/\\][\w.~-]*)+"),
    "id": re.compile(r"\b(?=[\w-]*\d)[A-Za-z]{0,8}[_-]?[0-9A-Za-z]{12,}\b"),
    "number": re.compile(r"\b\d+(?:\.\d+)?\b"),
}
_OF_KINDS = {
    "date": PrefixCause.CLOCK,
    "time": PrefixCause.CLOCK,
    "uuid": PrefixCause.ID,
    "id": PrefixCause.ID,
    "path": PrefixCause.PATH,
}


_GROUPS = (("date", "time"), ("uuid", "id"), ("path",))
"""Kinds that may contain other ones: a date may have its day of the week and the hour."""


def _kinds_of_texts(one: str, other: str) -> tuple[str, str]:
    for group in _GROUPS:
        if _mask(one, group) == _mask(other, group):
            return group[0], group[0]
    start = _common(one, other)
    ending = _common(one[start:][::-1], other[start:][::-1])
    return _kind_within(one, start, len(one) - ending), _kind_within(other, start, len(other) - ending)


def _mask(text: str, kinds: tuple[str, ...]) -> str:
    for kind in kinds:
        text = _KINDS[kind].sub("\0", text)
    return text


def _kind_within(text: str, start: int, end: int) -> str:
    """Return the kind of the part with the characters from `start` to `end`."""
    from_, to = max(start - AROUND_CHARS, 0), min(end, start + AROUND_CHARS) + AROUND_CHARS
    window = text[from_:to]
    for kind, pattern in _KINDS.items():
        for found in pattern.finditer(window):
            if found.start() + from_ <= start and end <= found.end() + from_:
                return kind
    return "text" if text else "nothing"


def _kind(value: Value) -> str:
    match value:
        case None:
            return "nothing"
        case str():
            return next((kind for kind, pattern in _KINDS.items() if pattern.fullmatch(value)), "text")
        case bool():
            return "switch"
        case int() | float():
            return "number"
        case list():
            return "list"
        case _:
            return "object"


# --- bytes -------------------------------------------------------------------------------------------------------


def _encode(value: Value) -> bytes:
    return msgspec.json.encode(value)


def _encode_sorted(value: Value) -> bytes:
    return msgspec.json.encode(value, order="sorted")


def _common(one: AnyStr, other: AnyStr) -> int:
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
