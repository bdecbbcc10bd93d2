"""Wire format of Durable Streams: requests, offsets, cursors and server-sent events, as values.

An offset is the number of units before it: bytes, or messages if the content type is `application/json`. So the offsets
of a fork and its source are equal up to the fork, and offsets sort numerically.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec
from msgspec import Struct

from midstream.dialects.request_fields import bad_field
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
"""Greatest exact integer in JavaScript, and the limit of the protocol."""
CURSOR_EPOCH_S = 1_728_432_000
"""The protocol counts the intervals of cursors from 9 October 2024, in seconds since 1970."""
CURSOR_INTERVAL_S = 20
CURSOR_JITTER_MAX = 180
"""Greatest number of intervals by which the cursor of an up-to-date client is advanced: one hour."""

_NUMBER = re.compile(r"0|[1-9][0-9]{0,15}", re.ASCII)
_OFFSET = re.compile(r"0{16}_([0-9]{16})", re.ASCII)
_TIME = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(?:\.\d{1,6})?\d*(?:[Zz]|[+-]\d\d:\d\d)", re.ASCII)
_LINE_END = re.compile(rb"\r\n|\r|\n")
_messages = msgspec.json.Decoder(list[msgspec.Raw]).decode

Headers = Mapping[str, str]
"""Headers of a request with case-insensitive names, such as Starlette's."""


class Producer(Struct, frozen=True):
    """Name, epoch and sequence number of an idempotent producer's request."""

    name: str
    epoch: int
    seq: int


class PlainStreamSettings(Struct, frozen=True, omit_defaults=True):
    """Settings of a stream, which a repeated request to create it must match.

    Args:
        content_type: Content type of the first request.
        ttl_s: Seconds from the last read or write to the expiry; None for no limit.
        expires_at: Time of expiry from the first request; "" for never.
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
        """Whether its units are messages instead of bytes."""
        return self.media_type == JSON_TYPE

    @property
    def is_text(self) -> bool:
        """Whether server-sent events contain its bytes as text."""
        return self.is_json or self.media_type.startswith("text/")

    def matches(self, other: PlainStreamSettings) -> bool:
        """Return whether both settings are equal; times are compared as instants."""
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
        """Return the time of expiry of a stream that was last used at `used_at`; None for never."""
        if self.ttl_s is not None:
            return used_at + self.ttl_s
        return self.expires_at_s

    def has_expired(self, *, used_at: float, now: float) -> bool:
        """Return whether a stream that was last used at `used_at` has expired."""
        ends_at = self.ends_at(used_at)
        return ends_at is not None and now >= ends_at


class StreamFork(Struct, frozen=True):
    """Source of a fork, and the place in it.

    Args:
        source: Path of the source in the request.
        units: Offset up to which the source is inherited; None for all.
        further: Inherited units of the append after that offset.
    """

    source: str
    units: int | None = None
    further: int = 0


def media_type(content_type: str) -> str:
    """Return a content type without its parameters, in lower case."""
    return content_type.partition(";")[0].strip().lower()


# --- requests


def read_settings(headers: Headers) -> PlainStreamSettings:
    """Return the settings in a request to create a stream.

    Raises:
        BadFieldError: A lifetime is malformed, or both lifetimes are given.
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
    """Return the fork in a request to create a stream, or None.

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
    """Return the producer of a request, or None.

    Raises:
        BadFieldError: A header is malformed, or one of the three is missing.
    """
    name, epoch, seq = (headers.get(each) for each in (PRODUCER_ID, PRODUCER_EPOCH, PRODUCER_SEQ))
    if name is None and epoch is None and seq is None:
        return None
    if not name or epoch is None or seq is None:
        raise bad_field(
            PRODUCER_ID,
            f"`{PRODUCER_ID}`, `{PRODUCER_EPOCH}` and `{PRODUCER_SEQ}` must be sent together, and not be empty",
        )
    return Producer(name, _integer(PRODUCER_EPOCH, epoch), _integer(PRODUCER_SEQ, seq))


def asks_to_close(headers: Headers) -> bool:
    """Return whether a request closes the stream."""
    return headers.get(CLOSED, "").lower() == "true"


def read_messages(body: bytes, *, may_be_empty: bool) -> tuple[bytes, int]:
    """Return the JSON messages of a body, joined by commas, and their number.

    The elements of an array are separate messages.

    Args:
        may_be_empty: Whether a body without a message is valid, for a request that creates a stream.

    Raises:
        BadFieldError: The body is not JSON, nested too deeply, or without a message.
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
    """Return the elements of a JSON array as bytes."""
    return [bytes(each) for each in _messages(array)]


def cut(body: bytes, *, first: int, end: int | None, is_json: bool) -> bytes:
    """Return the units of an append from `first` to before `end`; JSON messages stay joined by commas."""
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
            name, f"`{name}` must be a whole number from 0 to 2^53-1 in plain digits; got {value[:40]!r}"
        )
    return int(value)


def _instant(value: str) -> float:
    problem = bad_field(
        EXPIRES_AT, f"`{EXPIRES_AT}` must be a time in the form of RFC 3339; got {value[:40]!r}"
    )
    if not _TIME.fullmatch(value):
        raise problem
    try:
        return datetime.fromisoformat(value.upper()).timestamp()
    except (ValueError, OverflowError) as error:
        raise problem from error


# --- offsets and cursors


def offset_at(units: int) -> str:
    """Return the offset after a number of units."""
    return f"{0:016d}_{units:016d}"


def units_at(offset: str) -> int:
    """Return the number of units before an offset of this server, or before `-1`.

    Raises:
        BadFieldError: The offset is invalid.
    """
    if offset == "-1":
        return 0
    found = _OFFSET.fullmatch(offset)
    if found is None:
        raise bad_field(
            "offset", f"{offset[:40]!r} is not an offset of this server; send one from an answer, or -1"
        )
    return int(found[1])


def next_cursor(sent: str | None, *, now: float, chance: float) -> str:
    """Return the cursor of a response, which is always greater than the client's.

    Caches between the server and readers join requests with equal cursors. The cursor of an up-to-date client is
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
    """Return the event with these appends; bytes of other than text types are in base64."""
    body = body_of(parts, is_json=settings.is_json)
    if not settings.is_text:
        body = base64.b64encode(body)
    lines = b"".join(b"data:" + line + b"\n" for line in _LINE_END.split(body))
    return b"event: data\n" + lines + b"\n"


def control_event(*, offset: str, cursor: str, is_up_to_date: bool, is_closed: bool) -> bytes:
    """Return the control event that follows each data event; for a closed stream it is the last event."""
    control: dict[str, Any] = {"streamNextOffset": offset}
    if is_closed:
        control["streamClosed"] = True
    else:
        control["streamCursor"] = cursor
    if is_up_to_date:
        control["upToDate"] = True
    return b"event: control\ndata:" + msgspec.json.encode(control) + b"\n\n"
