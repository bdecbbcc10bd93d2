"""Durable Streams on the wire: requests, offsets, cursors and server-sent events, as values.

An offset is the number of units before it: bytes, or messages where the content type is `application/json`. So offsets
of a fork and of its source are the same up to the fork, and each sorts as its number does.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec
from msgspec import Struct

from midstream.dialects.fields import bad_field
from midstream.json_depth import TOO_DEEP, is_text_too_deep

JSON_TYPE = "application/json"
DEFAULT_TYPE = "application/octet-stream"

NEXT_OFFSET = "Stream-Next-Offset"
UP_TO_DATE = "Stream-Up-To-Date"
CURSOR = "Stream-Cursor"
CLOSED = "Stream-Closed"
TTL = "Stream-TTL"
EXPIRES_AT = "Stream-Expires-At"
SEQUENCE = "Stream-Seq"
FORKED_FROM = "Stream-Forked-From"
FORK_OFFSET = "Stream-Fork-Offset"
FORK_SUB_OFFSET = "Stream-Fork-Sub-Offset"
DATA_ENCODING = "Stream-SSE-Data-Encoding"
PRODUCER_ID = "Producer-Id"
PRODUCER_EPOCH = "Producer-Epoch"
PRODUCER_SEQ = "Producer-Seq"
EXPECTED_SEQ = "Producer-Expected-Seq"
RECEIVED_SEQ = "Producer-Received-Seq"

INTEGER_MAX = 2**53 - 1
"""Greatest integer that clients in JavaScript hold exactly; the protocol allows no greater one."""
CURSOR_EPOCH_S = 1_728_432_000
"""The protocol counts the intervals of cursors from 9 October 2024, in seconds since 1970."""
CURSOR_INTERVAL_S = 20
CURSOR_JITTER_MAX = 180
"""Most intervals by which the cursor of a client that is not behind is advanced: an hour."""

_NUMBER = re.compile(r"0|[1-9][0-9]{0,15}", re.ASCII)
_OFFSET = re.compile(r"0{16}_([0-9]{16})", re.ASCII)
_TIME = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(?:\.\d{1,6})?\d*(?:[Zz]|[+-]\d\d:\d\d)", re.ASCII)
_LINE_END = re.compile(rb"\r\n|\r|\n")
_messages = msgspec.json.Decoder(list[msgspec.Raw]).decode

Headers = Mapping[str, str]
"""Headers of a request, whose names are found in any case, as those of starlette are."""


class Producer(Struct, frozen=True):
    """The place of a request among those of one idempotent producer."""

    name: str
    epoch: int
    seq: int


class PlainStreamSettings(Struct, frozen=True, omit_defaults=True):
    """Settings that a stream was made with, and that a repeated request to make it must match.

    Args:
        content_type: As the first request had it.
        ttl_s: Seconds from the last read or write until it expires; None for no such limit.
        expires_at: When it expires, as the first request had it; "" for never.
    """

    content_type: str = DEFAULT_TYPE
    ttl_s: int | None = None
    expires_at: str = ""

    @property
    def media_type(self) -> str:
        """The content type without its parameters, in lower case."""
        return media_type(self.content_type)

    @property
    def is_json(self) -> bool:
        """Whether its units are messages, not bytes."""
        return self.media_type == JSON_TYPE

    @property
    def is_text(self) -> bool:
        """Whether server-sent events carry its bytes as they are."""
        return self.is_json or self.media_type.startswith("text/")

    def matches(self, other: PlainStreamSettings) -> bool:
        """Whether both describe the same stream; times are compared as instants."""
        return (self.media_type, self.ttl_s, self.expires_at_s) == (
            other.media_type,
            other.ttl_s,
            other.expires_at_s,
        )

    @property
    def expires_at_s(self) -> float | None:
        """`expires_at` in seconds since 1970."""
        return _instant(self.expires_at) if self.expires_at else None

    def ends_at(self, used_at: float) -> float | None:
        """Return when a stream that was last read or written at `used_at` is gone; None for never."""
        if self.ttl_s is not None:
            return used_at + self.ttl_s
        return self.expires_at_s

    def has_expired(self, *, used_at: float, now: float) -> bool:
        """Whether a stream that was last read or written at `used_at` is gone by `now`."""
        ends_at = self.ends_at(used_at)
        return ends_at is not None and now >= ends_at


class StreamFork(Struct, frozen=True):
    """Place at which a stream continues another one.

    Args:
        source: The path of the other stream, as the request names it.
        units: The offset up to which it is inherited; None for all of it.
        further: Units of the append behind that offset which are inherited as well.
    """

    source: str
    units: int | None = None
    further: int = 0


def media_type(content_type: str) -> str:
    """Return a content type without its parameters, in lower case."""
    return content_type.partition(";")[0].strip().lower()


# --- requests


def read_settings(headers: Headers) -> PlainStreamSettings:
    """Return the settings in a request to make a stream.

    Raises:
        BadFieldError: A lifetime is malformed, or there are two.
    """
    ttl, expires_at = headers.get(TTL), headers.get(EXPIRES_AT)
    if ttl is not None and expires_at is not None:
        raise bad_field(EXPIRES_AT, f"`{TTL}` and `{EXPIRES_AT}` exclude each other; send one of them")
    if expires_at is not None:
        _instant(expires_at)
    return PlainStreamSettings(
        content_type=headers.get("Content-Type") or DEFAULT_TYPE,
        ttl_s=None if ttl is None else _integer(TTL, ttl),
        expires_at=expires_at or "",
    )


def read_fork(headers: Headers) -> StreamFork | None:
    """Return what a request to make a stream inherits, or None where it inherits nothing.

    Raises:
        BadFieldError: A header is malformed, or lacks another one that it needs.
    """
    source = headers.get(FORKED_FROM)
    offset, further = headers.get(FORK_OFFSET), headers.get(FORK_SUB_OFFSET)
    if source is None:
        for name, value in ((FORK_OFFSET, offset), (FORK_SUB_OFFSET, further)):
            if value is not None:
                raise bad_field(name, f"`{name}` needs `{FORKED_FROM}`")
        return None
    more = 0 if further is None else _integer(FORK_SUB_OFFSET, further)
    if more and offset is None:
        raise bad_field(FORK_SUB_OFFSET, f"`{FORK_SUB_OFFSET}` needs `{FORK_OFFSET}`")
    return StreamFork(source, None if offset is None else units_at(offset), more)


def read_producer(headers: Headers) -> Producer | None:
    """Return the producer of a request, or None where it names none.

    Raises:
        BadFieldError: A header is malformed, or one of the three is missing.
    """
    name, epoch, seq = (headers.get(each) for each in (PRODUCER_ID, PRODUCER_EPOCH, PRODUCER_SEQ))
    if name is None and epoch is None and seq is None:
        return None
    if not name or epoch is None or seq is None:
        raise bad_field(
            PRODUCER_ID,
            f"`{PRODUCER_ID}`, `{PRODUCER_EPOCH}` and `{PRODUCER_SEQ}` are sent together, none empty",
        )
    return Producer(name, _integer(PRODUCER_EPOCH, epoch), _integer(PRODUCER_SEQ, seq))


def asks_to_close(headers: Headers) -> bool:
    """Whether a request closes the stream."""
    return headers.get(CLOSED, "").lower() == "true"


def read_messages(body: bytes, *, may_be_empty: bool) -> tuple[bytes, int]:
    """Return the JSON messages of a body, joined by commas, and how many they are.

    One level of an array is taken away, so that a client sends several messages at once.

    Args:
        may_be_empty: Whether a body without a message is valid: it makes a stream and does not append.

    Raises:
        BadFieldError: It is no JSON, nested too deeply, or without a message.
    """
    if is_text_too_deep(body):
        raise bad_field("", f"the body is {TOO_DEEP}")
    try:
        msgspec.json.decode(body)
        messages = split_messages(body) if body.lstrip()[:1] == b"[" else [body.strip()]
    except (msgspec.DecodeError, UnicodeError) as error:
        raise bad_field("", f"the body is not JSON: {error}") from error
    if not messages and not may_be_empty:
        raise bad_field("", "the array has no messages; send at least one")
    return b",".join(messages), len(messages)


def split_messages(array: bytes) -> list[bytes]:
    """Return the elements of a JSON array, each as its bytes."""
    return [bytes(each) for each in _messages(array)]


def cut(body: bytes, *, first: int, end: int | None, is_json: bool) -> bytes:
    """Return the units of an append from `first` to before `end`; the messages of JSON stay joined by commas."""
    if not is_json:
        return body[first:end]
    if first == 0 and end is None:
        return body
    return b",".join(split_messages(b"[" + body + b"]")[first:end])


def body_of(parts: Sequence[bytes], *, is_json: bool) -> bytes:
    """Return the body of a response with these appends."""
    return b"[" + b",".join(parts) + b"]" if is_json else b"".join(parts)


def _integer(name: str, value: str) -> int:
    if not _NUMBER.fullmatch(value) or int(value) > INTEGER_MAX:
        raise bad_field(
            name, f"`{name}` is a whole number from 0 to 2^53-1 in plain digits; got {value[:40]!r}"
        )
    return int(value)


def _instant(value: str) -> float:
    problem = bad_field(EXPIRES_AT, f"`{EXPIRES_AT}` is a time as in RFC 3339; got {value[:40]!r}")
    if not _TIME.fullmatch(value):
        raise problem
    try:
        return datetime.fromisoformat(value.upper()).timestamp()
    except (ValueError, OverflowError) as error:
        raise problem from error


# --- offsets and cursors


def offset_at(units: int) -> str:
    """Return the offset behind so many units."""
    return f"{0:016d}_{units:016d}"


def units_at(offset: str) -> int:
    """Return how many units are before an offset that this server gave, or before `-1`.

    Raises:
        BadFieldError: It is no such offset.
    """
    if offset == "-1":
        return 0
    found = _OFFSET.fullmatch(offset)
    if found is None:
        raise bad_field(
            "offset", f"{offset[:40]!r} is no offset of this server; send one that it returned, or -1"
        )
    return int(found[1])


def next_cursor(sent: str | None, *, now: float, chance: float) -> str:
    """Return the cursor of a response, which is always above the one that the client sent.

    Caches between the server and its readers join requests with the same cursor. A client that is not behind is
    advanced by a random number of intervals, so that it does not get the same cached response again.

    Args:
        chance: A random number from 0 to below 1.
    """
    current = int((now - CURSOR_EPOCH_S) // CURSOR_INTERVAL_S)
    if sent is None or not _NUMBER.fullmatch(sent) or int(sent) < current:
        return str(current)
    return str(int(sent) + 1 + int(chance * CURSOR_JITTER_MAX))


# --- server-sent events


def data_event(parts: Sequence[bytes], settings: PlainStreamSettings) -> bytes:
    """Return the event with these appends; bytes that are no text are in base64."""
    body = body_of(parts, is_json=settings.is_json)
    if not settings.is_text:
        body = base64.b64encode(body)
    lines = b"".join(b"data:" + line + b"\n" for line in _LINE_END.split(body))
    return b"event: data\n" + lines + b"\n"


def control_event(*, offset: str, cursor: str, is_up_to_date: bool, is_closed: bool) -> bytes:
    """Return the event that follows each event with data; after that of a closed stream nothing comes."""
    control: dict[str, Any] = {"streamNextOffset": offset}
    if is_closed:
        control["streamClosed"] = True
    else:
        control["streamCursor"] = cursor
    if is_up_to_date:
        control["upToDate"] = True
    return b"event: control\ndata:" + msgspec.json.encode(control) + b"\n\n"
