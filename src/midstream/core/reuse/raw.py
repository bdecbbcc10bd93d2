"""The raw way: what a resent body begins with is known by one hash over its bytes, and only the rest is parsed.

A host sends its whole conversation again each turn. `parsed` returns what parsing the whole would, without the messages
that were parsed before.

Why it is exact: where the bytes before an array, closed with `]}`, are an object, the array is a value of the
outermost object; no backslash stands before its key, so the key is no part of a longer one. Where its bytes up to the
end of a message are those of another array, so are the messages. After such a message, which is an object, a parser of
JSON has nothing in hand: what it makes of the rest depends on the rest alone. The rest is therefore parsed behind a
number that stands for the known messages. It stands nowhere in the rest, so whoever finds it has found this array, and
no other one of the same name. In every other case the whole is parsed.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

HEADS_MAX = 4
"""Places tried as the beginning of the array: a schema of a tool may have a key of that name too."""
ENDS_MAX = 12
"""Messages at the end of an array after each of which a beginning ends that can be known. Hosts that mark the last few
for their provider's cache send these with other bytes in the next turn."""

_FIRST_STAND_IN = 1_000_000_007
_BLANKS = b" \t\r\n"
_OPENS, _CLOSES, _GOES_ON = (ord(character) for character in "{},")

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_items = msgspec.json.Decoder(list[msgspec.Raw]).decode


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
        fields: What it says, each value as its bytes; of the array of messages only those that are not known.
        known: The longest known beginning of that array, or None: then it is whole in `fields`.
        now: What can be known of this body the next time, the whole array last; empty where it has no such array
            that ends with an object.
        digest: A digest of the whole body: equal for equal bodies, however they were read, and for no others.
    """

    fields: Mapping[str, msgspec.Raw]
    known: Known | None
    now: tuple[Known, ...]
    digest: bytes


def parsed(raw: bytes, field: str = "messages", known: Sequence[Known] = ()) -> Parsed:
    """Parse the body of a request, as far as the values of its fields.

    Args:
        field: The key of the array of messages.
        known: What earlier bodies began with, in any order; one hash serves all.

    Raises:
        msgspec.DecodeError: It is not a JSON object.
    """
    head = _head(raw, field)
    if known and head is not None:
        said, start = head
        if (found := _longest(raw, start, known)) is not None:
            beginning, hasher = found
            if (result := _with_rest(raw, field, said, start, beginning, hasher)) is not None:
                return result
    return _whole(raw, field, -1 if head is None else head[1])


def unknown(raw: bytes) -> Parsed:
    """Parse a body of which nothing is known nor will be, as `parsed` does; its digest is another one.

    Raises:
        msgspec.DecodeError: It is not a JSON object.
    """
    return _whole(raw, "", -1)


def _head(raw: bytes, field: str) -> tuple[dict[str, msgspec.Raw], int] | None:
    """Return what the outermost object says before its array, and where the array begins, or None if in doubt."""
    opening = re.compile(rb"(?<!\\)" + re.escape(json.dumps(field).encode()) + rb"[ \t\r\n]*:[ \t\r\n]*\[")
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
    raw: bytes,
    field: str,
    said: dict[str, msgspec.Raw],
    start: int,
    known: Known,
    hasher: hashlib._Hash,
) -> Parsed | None:
    """Return the body whose array begins with what is known, or None if in doubt."""
    rest = raw[start + known.length :]
    stand_in = next(
        mark for number in itertools.count(_FIRST_STAND_IN) if (mark := b"%d" % number) not in rest
    )
    opening = b"[" + stand_in
    fields = _object(b"{" + json.dumps(field).encode() + b":" + opening + rest)
    if fields is None:
        return None
    array = bytes(fields[field])
    behind = array[len(opening) :].lstrip(_BLANKS)
    if not array.startswith(opening) or behind[:1] not in (b",", b"]"):
        return None
    fields[field] = msgspec.Raw(b"[" + behind.removeprefix(b","))
    messages = _items(array)[1:]
    ends = [end - len(opening) for end in _ends(array, messages)]
    if messages and not ends:
        return None
    now = _known(rest, ends, known, len(messages), hasher) or (known,)
    end = now[-1].length
    return Parsed({**said, **fields}, known, now, _digest(raw, start, now[-1], start + end))


def _whole(raw: bytes, field: str, start: int) -> Parsed:
    try:
        fields = _fields(raw)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(f"not readable as JSON: {type(error).__name__}") from error
    array = bytes(fields[field]) if start >= 0 and field in fields else b""
    if not (array.startswith(b"[") and raw.startswith(array, start)):
        return Parsed(fields, None, (), _digest(raw, 0, None, 0))
    messages = _items(array)
    now = _known(array, _ends(array, messages), Known(b"", 0, 0), len(messages), hashlib.sha256())
    if not now:
        return Parsed(fields, None, (), _digest(raw, 0, None, 0))
    return Parsed(fields, None, now, _digest(raw, start, now[-1], start + now[-1].length))


def _object(raw: bytes) -> dict[str, msgspec.Raw] | None:
    try:
        return _fields(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _ends(array: bytes, messages: Sequence[msgspec.Raw]) -> list[int]:
    """Return where the last messages of a written array end, the last one first, as long as they are objects."""
    ends: list[int] = []
    end = _end_of_blanks(array, len(array) - 1)  # before the bracket
    for message in itertools.islice(reversed(messages), ENDS_MAX):
        view = memoryview(message)
        if view[0] != _OPENS:
            break
        assert array[end - 1] == _CLOSES
        ends.append(end)
        comma = _end_of_blanks(array, end - view.nbytes)
        if array[comma - 1] != _GOES_ON:
            break  # the first one
        end = _end_of_blanks(array, comma - 1)
    return ends


def _end_of_blanks(array: bytes, end: int) -> int:
    """Return where that ends which stands before the blanks before `end`."""
    while array[end - 1] in _BLANKS:
        end -= 1
    return end


def _known(
    written: bytes, ends: Sequence[int], known: Known, count: int, hasher: hashlib._Hash
) -> tuple[Known, ...]:
    """Return what can be known: `known` and what of `written` behind it ends at each of `ends`, by one pass."""
    view = memoryview(written)
    found: list[Known] = []
    done = 0
    for behind, end in reversed(list(enumerate(ends))):
        hasher.update(view[done:end])
        done = end
        found.append(Known(hasher.digest(), known.length + end, known.count + count - behind))
    return tuple(found)


def _digest(raw: bytes, start: int, known: Known | None, end: int) -> bytes:
    """Return the digest of a body of which the bytes from `start` to `end` are hashed already."""
    whole = hashlib.sha256()
    if known is not None:
        whole.update(b"%d:%d:" % (start, end - start))
        whole.update(raw[:start])
        whole.update(known.digest)
    whole.update(memoryview(raw)[end:])
    return whole.digest()
