"""Stream of a connection, by the headers of its request: what an `open` has, or leaves out (STREAM-51, STREAM-110).

An empty header counts as missing; one that is there twice has one value, or is refused.
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
from midstream.protocol.open_fields import check_word
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
"""A string of RFC 9651, section 3.3.3, as `Idempotency-Key` is defined; the bare word of before is as good."""


class FrameSender(Struct, frozen=True, rename=_NAMES):
    """Sender of a frame that came in a request of its own (STREAM-39, STREAM-40): headers, by their names.

    Args:
        stream: The stream key; "" for a reader.
        secret: The stream's secret; "" where none is shown.
        old_secret: What that was before it was changed; "" where it was not.
        connection: The client's name of the connection that the request is part of; "" where it gives none.
        number: Its number of that connection; 0 where it gives none.
        cancel_after_s: Seconds that the client may be gone before its turn is stopped; without it, for ever.
    """

    stream: Word = ""
    secret: Word = ""
    old_secret: Word = ""
    connection: Annotated[str, Meta(max_length=KEY_CHARS_MAX)] = ""
    number: Number = 0
    cancel_after_s: Annotated[int, Meta(ge=0, le=int(CANCEL_AFTER_S_MAX))] | UnsetType = UNSET

    def __repr__(self) -> str:
        return f"Speaker(stream={self.stream!r}, connection={self.connection!r})"


_SenderT = TypeVar("_SenderT", bound=FrameSender)


class FollowerHeaders(FrameSender, frozen=True, rename=_NAMES):
    """The headers of a request that follows a session: those of its stream, and the last event its client has."""

    last_event_id: EventIdText | UnsetType = UNSET
    event_id: EventIdText | UnsetType = UNSET
    next_seqno: Number = 0


class FollowQuery(Struct, frozen=True):
    """The last event of a client, when it takes a snapshot, and the milliseconds events may be held back."""

    after: EventIdText | UnsetType = UNSET
    snapshots: SnapshotWhen = SnapshotWhen.GONE
    coalesce_ms: Annotated[int, Meta(ge=0, le=int(1000 * COALESCE_S_MAX))] = 0


class _Headers:
    """Headers of a request, by name."""

    def __init__(self, request: HTTPConnection) -> None:
        self._told = request.scope["headers"]
        self._by_name: dict[bytes, bytes] = dict(self._told)
        self._is_each_once = len(self._by_name) == len(self._told)

    def __getitem__(self, name: bytes) -> str:
        """Return the value of a header; "" where it is missing or empty.

        Raises:
            MalformedFrameError: It is there twice with two values: a proxy may pass on either.
        """
        # Not every parser takes off the space behind a value, which is no part of it (RFC 9110, section 5.5).
        if self._is_each_once:
            return self._by_name.get(name, b"").strip(b" \t").decode("latin-1")
        said = {value.strip(b" \t") for each, value in self._told if each == name} - {b""}
        if len(said) > 1:
            raise MalformedFrameError(f"the header `{name.decode()}` occurs twice with different values")
        return said.pop().decode("latin-1") if said else ""


def sender_of(request: HTTPConnection) -> FrameSender:
    """Return the sender in a request's headers, independent of its frame.

    Raises:
        MalformedFrameError: One of them is too long or not what it should be.
    """
    return _decode(request, FrameSender)


def open_of(request: HTTPConnection) -> Open:
    """Return the fields of an `open` in the headers of a request.

    Raises:
        MalformedFrameError: A header has another form, or two headers have different values.
        UsageError: The query has another form.
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
    """Return the secret of a request's headers, and what it was before it was changed; each "" where it is missing.

    Raises:
        MalformedFrameError: A header has another form.
    """
    sender = sender_of(request)
    return sender.secret, sender.old_secret


def connection_name_of(request: HTTPConnection) -> str:
    """Return the client's name of the connection that a request is part of; "" where it gives none.

    Raises:
        MalformedFrameError: A header has another form.
    """
    return sender_of(request).connection


def _decode(request: HTTPConnection, kind: type[_SenderT]) -> _SenderT:
    """Decode the headers that a type names; one that is empty counts as missing.

    Raises:
        MalformedFrameError: One of them has another form.
    """
    headers = _Headers(request)
    found = {name: text for name in kind.__struct_encode_fields__ if (text := headers[name.encode()])}
    try:
        decoded = msgspec.convert({**found, _KEY: _key_in(headers)}, kind, strict=False)
    except msgspec.ValidationError as error:
        raise MalformedFrameError(f"a header of this request has another form: {error}") from error
    for word in (decoded.stream, decoded.secret, decoded.old_secret):
        check_word(word)
    return decoded


def _key_in(headers: _Headers) -> str:
    ours, standard = headers[_KEY.encode()], _standard_key_in(headers)
    if ours and standard and ours != standard:
        raise MalformedFrameError("`x-idempotency-key` and `idempotency-key` have different values")
    return ours or standard


def _standard_key_in(headers: _Headers) -> str:
    """Return the key of the standard header, of which both forms are about."""
    text = headers[b"idempotency-key"]
    if not text.startswith('"'):
        return text
    if not _QUOTED.fullmatch(text):
        raise MalformedFrameError('the header `idempotency-key` is a string such as "8e03…", or a bare word')
    return re.sub(r"\\(.)", r"\1", text[1:-1])


def _event_id_of(*places: str | UnsetType) -> str | None:
    """Return the event that a client has; one that is none is refused, also where it does not count.

    A browser that reconnects sends the header beside the address it first used, so the header counts first.
    """
    named = [place for place in places if isinstance(place, str) and place]
    for each in named:
        EventId.parse(each)
    return named[0] if named else None
