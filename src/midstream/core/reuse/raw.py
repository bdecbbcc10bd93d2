"""The raw way: what a resent body begins with is known by one hash over its bytes, and only the rest is parsed.

A host sends its whole conversation again each turn. `parsed` returns what parsing the whole would, without the messages
that were parsed before.

Why it is exact: where the bytes before an array, closed with `]}`, are an object, the array is a value of the
outermost object. Where its bytes up to the end of a message are those of another array, so are the messages. After such
a message, which is an object, a parser of JSON has nothing in hand: what it makes of the rest depends on the rest
alone. The rest is therefore parsed behind a number that stands for the known messages. It stands nowhere in the
rest, so whoever finds it has found this array, and no other one of the same name. In every other case the whole is
parsed.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

HEADS_MAX = 4
"""Places tried as the beginning of the array: a schema of a tool may have a key of that name too."""

_FIRST_STAND_IN = 1_000_000_007
_BLANKS = b" \t\r\n"
_END_OF_MESSAGE = ord("}")


class Known(Struct, frozen=True):
    """The beginning of an array of messages that was parsed before.

    Args:
        digest: SHA-256 of its bytes, from the bracket up to the end of the last known message.
        length: How many bytes these are.
        count: How many messages.
    """

    digest: bytes
    length: int
    count: int


class Parsed(Struct, frozen=True):
    """A body.

    Args:
        body: What it says; of the array of messages only those that are not known.
        known: The longest known beginning of that array, or None: then it is whole in `body`.
        now: What to know of this body the next time; None where it has no such array that ends with an object.
    """

    body: dict[str, Any]
    known: Known | None
    now: Known | None


def parsed(raw: bytes, field: str = "messages", known: Sequence[Known] = ()) -> Parsed:
    """Parse the body of a request.

    Args:
        field: The key of the array of messages.
        known: What earlier bodies began with, in any order; one hash serves all.

    Raises:
        msgspec.DecodeError: It is not a JSON object.
    """
    if known and (head := _head(raw, field)) is not None:
        said, start = head
        if (found := _longest(raw, start, known)) is not None:
            beginning, hasher = found
            rest = raw[start + beginning.length :]
            if (result := _with_rest(said, field, beginning, hasher, rest)) is not None:
                return result
    return _whole(raw, field)


def _head(raw: bytes, field: str) -> tuple[dict[str, Any], int] | None:
    """Return what the outermost object says before its array, and where the array begins, or None if in doubt."""
    opening = re.compile(re.escape(json.dumps(field).encode()) + rb"[ \t\r\n]*:[ \t\r\n]*\[")
    for match in itertools.islice(opening.finditer(raw), HEADS_MAX):
        said = _object(raw[: match.end()] + b"]}")
        if said is not None:
            return said, match.end() - 1
    return None


def _longest(raw: bytes, start: int, known: Sequence[Known]) -> tuple[Known, hashlib._Hash] | None:
    """Return the longest of `known` that the array begins with, and the hash so far, in one pass."""
    view = memoryview(raw)
    hasher = hashlib.sha256()
    found: tuple[Known, hashlib._Hash] | None = None
    done = 0
    for beginning in sorted(known, key=lambda one: one.length):
        end = start + beginning.length
        if end > len(raw):
            break
        hasher.update(view[start + done : end])
        done = beginning.length
        if hasher.digest() == beginning.digest:
            found = beginning, hasher.copy()
    return found


def _with_rest(
    said: dict[str, Any], field: str, known: Known, hasher: hashlib._Hash, rest: bytes
) -> Parsed | None:
    """Return the body whose array begins with what is known and goes on with `rest`, or None if in doubt."""
    stand_in = next(
        mark for number in itertools.count(_FIRST_STAND_IN) if (mark := b"%d" % number) not in rest
    )
    opening = b"[" + stand_in
    written = b"{" + json.dumps(field).encode() + b":" + opening + rest
    body = _object(written)
    if body is None:
        return None
    messages = body[field]
    if not isinstance(messages, list) or not messages or type(messages[0]) is not int:
        return None
    if messages[0] != int(stand_in):
        return None
    body[field] = messages[1:]
    now = known
    end = _end_of_messages(_array(written, field))
    if end is not None and len(messages) > 1:
        hasher.update(rest[: end - len(opening)])
        length = known.length + end - len(opening)
        now = Known(hasher.digest(), length, known.count + len(messages) - 1)
    return Parsed(said | body, known, now)


def _whole(raw: bytes, field: str) -> Parsed:
    try:
        body = msgspec.json.decode(raw)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(f"not readable as JSON: {type(error).__name__}") from error
    if not isinstance(body, dict):
        raise msgspec.DecodeError(f"an object was expected, not a {type(body).__name__}")
    messages = body.get(field)
    now = None
    if isinstance(messages, list) and messages:
        array = _array(raw, field)
        end = _end_of_messages(array)
        if end is not None:
            now = Known(hashlib.sha256(array[:end]).digest(), end, len(messages))
    return Parsed(body, None, now)


def _object(raw: bytes) -> dict[str, Any] | None:
    try:
        said = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return said if isinstance(said, dict) else None


def _array(raw: bytes, field: str) -> memoryview:
    """Return the written array of an object that was parsed: finding it again costs a tenth of parsing."""
    return memoryview(msgspec.json.decode(raw, type=dict[str, msgspec.Raw])[field])


def _end_of_messages(array: memoryview) -> int | None:
    """Return where the last message of a written array ends, or None where it is not an object."""
    end = len(array) - 1  # before the bracket
    while end and array[end - 1] in _BLANKS:
        end -= 1
    return end if array[end - 1] == _END_OF_MESSAGE else None
