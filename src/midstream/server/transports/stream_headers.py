"""The fields of an `open` from the headers of a request (STREAM-51, STREAM-110).

An empty header counts as missing. A repeated header is refused, unless its values are equal.
"""

from __future__ import annotations

import re
from typing import Annotated, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.requests import HTTPConnection

from midstream.errors import MalformedFrameError
from midstream.protocol.frames import (
    CANCEL_AFTER_S_MAX,
    COALESCE_S_MAX,
    KEY_CHARS_MAX,
    EventId,
    EventIdText,
    Number,
    Open,
    SnapshotWhen,
    Word,
)
from midstream.protocol.open_frame import check_word
from midstream.server.api.request_bodies import decode_query, optional

_KEY = "x-idempotency-key"
_NAMES = {
    "stream": _KEY,
    "secret": "x-idempotent-encryption-key",
    "old_secret": "x-idempotent-encryption-key-old",
    "connection": "x-midstream-connection",
    "number": "x-idempotency-connection",
    "cancel_after_s": "x-idempotency-cancel-after",
    "last_event_id": "last-event-id",
    "event_id": "x-idempotency-event-id",
    "next_seqno": "x-idempotency-next-seqno",
}
_QUOTED = re.compile(r'"(?:[ !#-\[\]-~]|\\["\\])*"')
"""A string of RFC 9651, section 3.3.3, the form of `Idempotency-Key`; a bare word, its older form, is accepted too."""


class FrameSender(Struct, frozen=True, rename=_NAMES):
    """Headers that identify the sender of a frame in a separate request (STREAM-39, STREAM-40).

    Args:
        stream: The stream key; "" for a reader.
        secret: The stream's secret; "" if missing.
        old_secret: The secret before its change; "" if it was not changed.
        connection: The client's name of the request's connection; "" without one.
        number: The client's number of that connection; 0 without one.
        cancel_after_s: Seconds without a connection after which the turn is stopped; never by default.
    """

    stream: Word = ""
    secret: Word = ""
    old_secret: Word = ""
    connection: Annotated[str, Meta(max_length=KEY_CHARS_MAX)] = ""
    number: Number = 0
    cancel_after_s: Annotated[int, Meta(ge=0, le=int(CANCEL_AFTER_S_MAX))] | UnsetType = UNSET

    def __repr__(self) -> str:
        return f"FrameSender(stream={self.stream!r}, connection={self.connection!r})"


_SenderT = TypeVar("_SenderT", bound=FrameSender)


class FollowerHeaders(FrameSender, frozen=True, rename=_NAMES):
    """Headers of a request that follows a session, with the client's last event."""

    last_event_id: EventIdText | UnsetType = UNSET
    event_id: EventIdText | UnsetType = UNSET
    next_seqno: Number = 0


class FollowQuery(Struct, frozen=True):
    """Query: the last event of the client, when to send snapshots, and the milliseconds of coalescing."""

    after: EventIdText | UnsetType = UNSET
    snapshots: SnapshotWhen = SnapshotWhen.GONE
    coalesce_ms: Annotated[int, Meta(ge=0, le=int(1000 * COALESCE_S_MAX))] = 0


class _Headers:
    """Headers of a request by name."""

    def __init__(self, request: HTTPConnection) -> None:
        self._pairs = request.scope["headers"]
        self._by_name: dict[bytes, bytes] = dict(self._pairs)
        self._is_each_once = len(self._by_name) == len(self._pairs)

    def __getitem__(self, name: bytes) -> str:
        """Return the value of a header; "" if it is missing or empty.

        Raises:
            MalformedFrameError: The header has two values; a proxy may pass on either.
        """
        # Not every parser strips trailing space, which is not part of the value (RFC 9110, section 5.5).
        if self._is_each_once:
            return self._by_name.get(name, b"").strip(b" \t").decode("latin-1")
        values = {value.strip(b" \t") for each, value in self._pairs if each == name} - {b""}
        if len(values) > 1:
            raise MalformedFrameError(f"the header `{name.decode()}` occurs twice with different values")
        return values.pop().decode("latin-1") if values else ""


def sender_of(request: HTTPConnection) -> FrameSender:
    """Return the sender from a request's headers.

    Raises:
        MalformedFrameError: A header is too long or invalid.
    """
    return _decode(request, FrameSender)


def open_of(request: HTTPConnection) -> Open:
    """Return the fields of an `open` from the headers of a request.

    Raises:
        MalformedFrameError: A header is invalid, or two headers have different values.
        UsageError: The query is invalid.
    """
    headers, query = _decode(request, FollowerHeaders), decode_query(request, FollowQuery)
    return Open(
        headers.stream,
        headers.secret,
        _event_id_of(headers.last_event_id, headers.event_id, query.after),
        headers.next_seqno,
        headers.number,
        optional(headers.cancel_after_s),
        snapshots=query.snapshots,
        coalesce_s=query.coalesce_ms / 1000,
        old_secret=headers.old_secret,
    )


def secrets_of(request: HTTPConnection) -> tuple[str, str]:
    """Return the secret from a request's headers, and the secret before its change; each "" if missing.

    Raises:
        MalformedFrameError: A header is invalid.
    """
    sender = sender_of(request)
    return sender.secret, sender.old_secret


def connection_name_of(request: HTTPConnection) -> str:
    """Return the client's name of a request's connection; "" without one.

    Raises:
        MalformedFrameError: A header is invalid.
    """
    return sender_of(request).connection


def _decode(request: HTTPConnection, kind: type[_SenderT]) -> _SenderT:
    """Decode the headers of a type; an empty header counts as missing.

    Raises:
        MalformedFrameError: A header is invalid.
    """
    headers = _Headers(request)
    found = {name: text for name in kind.__struct_encode_fields__ if (text := headers[name.encode()])}
    try:
        decoded = msgspec.convert({**found, _KEY: _key_in(headers)}, kind, strict=False)
    except msgspec.ValidationError as error:
        raise MalformedFrameError(f"a header of this request is invalid: {error}") from error
    for word in (decoded.stream, decoded.secret, decoded.old_secret):
        check_word(word)
    return decoded


def _key_in(headers: _Headers) -> str:
    ours, standard = headers[_KEY.encode()], _standard_key_in(headers)
    if ours and standard and ours != standard:
        raise MalformedFrameError("`x-idempotency-key` and `idempotency-key` have different values")
    return ours or standard


def _standard_key_in(headers: _Headers) -> str:
    """Return the key from the standard header, in its older or its newer form."""
    text = headers[b"idempotency-key"]
    if not text.startswith('"'):
        return text
    if not _QUOTED.fullmatch(text):
        raise MalformedFrameError(
            'the header `idempotency-key` must be a string such as "8e03…", or a bare word'
        )
    return re.sub(r"\\(.)", r"\1", text[1:-1])


def _event_id_of(*places: str | UnsetType) -> str | None:
    """Return the first event id that is present; check all of them.

    A reconnecting browser sends the header with the URL of its first request, so the header takes precedence.
    """
    named = [place for place in places if isinstance(place, str) and place]
    for each in named:
        EventId.parse(each)
    return named[0] if named else None
