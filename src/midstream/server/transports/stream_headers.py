"""Stream of a connection, by the headers of its request: what an `open` has, or leaves out (STREAM-51, STREAM-110).

An empty header counts as missing; one that is there twice has one value, or is refused.
"""

from __future__ import annotations

import re

from msgspec import Struct
from starlette.requests import HTTPConnection

from midstream.errors import MalformedFrameError, UsageError
from midstream.protocol.frames import COALESCE_S_MAX, EventId, Open, SnapshotWhen
from midstream.protocol.open_fields import KEY_CHARS_MAX, NUMBER_MAX, check_cancel_after, check_word

_QUOTED = re.compile(r'"(?:[ !#-\[\]-~]|\\["\\])*"')
"""A string of RFC 9651, section 3.3.3, as `Idempotency-Key` is defined; the bare word of before is as good."""


class FrameSender(Struct, frozen=True):
    """Sender of a frame that came in a request of its own (STREAM-39, STREAM-40).

    Args:
        stream: The stream key; "" for a reader.
        secret: The stream's secret; "" where none is shown.
        old_secret: What that was before it was changed; "" where it was not.
        connection: The client's name of the connection that the request is part of; "" where it gives none.
        number: Its number of that connection; 0 where it gives none.
        cancel_after_s: For how long the stream's client may be gone until its turn is stopped; None for ever.
    """

    stream: str
    secret: str
    old_secret: str
    connection: str
    number: int
    cancel_after_s: float | None

    def __repr__(self) -> str:
        return f"Speaker(stream={self.stream!r}, connection={self.connection!r})"


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
    headers = _Headers(request)
    return FrameSender(
        _key_in(headers),
        *_secrets_in(headers),
        _connection_name_in(headers),
        _number_in(headers, b"x-idempotency-connection"),
        _cancel_after_in(headers),
    )


def open_of(request: HTTPConnection) -> Open:
    """Return the fields of an `open` in the headers of a request.

    Raises:
        MalformedFrameError: A header has another form, or two headers have different values.
        UsageError: `?snapshots=` or `?coalesce_ms=` has.
    """
    headers = _Headers(request)
    key, (secret, old_secret) = _key_in(headers), _secrets_in(headers)
    snapshots = request.query_params.get("snapshots", SnapshotWhen.GONE)
    if snapshots not in [*SnapshotWhen]:
        raise UsageError(f"`snapshots` is one of {', '.join(SnapshotWhen)}")
    return Open(
        key,
        secret,
        _event_id_in(headers, request),
        _number_in(headers, b"x-idempotency-next-seqno"),
        _number_in(headers, b"x-idempotency-connection"),
        _cancel_after_in(headers),
        snapshots=SnapshotWhen(snapshots),
        coalesce_s=_coalesce_s_of(request),
        old_secret=old_secret,
    )


def secrets_of(request: HTTPConnection) -> tuple[str, str]:
    """Return the secret of a request's headers, and what it was before it was changed; each "" where it is missing.

    Raises:
        MalformedFrameError: One of them is of another form.
    """
    return _secrets_in(_Headers(request))


def connection_name_of(request: HTTPConnection) -> str:
    """Return the client's name of the connection that a request is part of; "" where it gives none.

    Raises:
        MalformedFrameError: It is too long.
    """
    return _connection_name_in(_Headers(request))


def _key_in(headers: _Headers) -> str:
    ours, standard = headers[b"x-idempotency-key"], _standard_key_in(headers)
    if ours and standard and ours != standard:
        raise MalformedFrameError("`x-idempotency-key` and `idempotency-key` have different values")
    key = ours or standard
    check_word(key)
    return key


def _standard_key_in(headers: _Headers) -> str:
    """Return the key of the standard header, of which both forms are about."""
    text = headers[b"idempotency-key"]
    if not text.startswith('"'):
        return text
    if not _QUOTED.fullmatch(text):
        raise MalformedFrameError('the header `idempotency-key` is a string such as "8e03…", or a bare word')
    return re.sub(r"\\(.)", r"\1", text[1:-1])


def _secrets_in(headers: _Headers) -> tuple[str, str]:
    secret, old_secret = headers[b"x-idempotent-encryption-key"], headers[b"x-idempotent-encryption-key-old"]
    check_word(secret)
    check_word(old_secret)
    return secret, old_secret


def _connection_name_in(headers: _Headers) -> str:
    name = headers[b"x-midstream-connection"]
    if len(name) > KEY_CHARS_MAX:
        raise MalformedFrameError(f"the name of a connection has {KEY_CHARS_MAX} characters at most")
    return name


def _cancel_after_in(headers: _Headers) -> float | None:
    """Return for how long the client of a stream may be gone until its turn is stopped; None for ever."""
    text = headers[b"x-idempotency-cancel-after"]
    if not text:
        return None
    if not (text.isascii() and text.isdecimal()):
        raise MalformedFrameError("the header `x-idempotency-cancel-after` is a whole number of seconds")
    seconds = float(text)
    check_cancel_after(seconds)
    return seconds


def _event_id_in(headers: _Headers, request: HTTPConnection) -> str | None:
    """Return the event that a client has; one that is none is refused, also where it does not count.

    A browser that reconnects sends the header beside the address it first used, so the header counts first.
    """
    places = (
        headers[b"last-event-id"],
        headers[b"x-idempotency-event-id"],
        request.query_params.get("after"),
    )
    named = [place for place in places if place]
    for each in named:
        EventId.parse(each)
    return named[0] if named else None


def _number_in(headers: _Headers, name: bytes) -> int:
    text = headers[name]
    if not text:
        return 0
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(NUMBER_MAX))
    if not is_number or int(text) > NUMBER_MAX:
        raise MalformedFrameError(f"the header `{name.decode()}` is a number from 0 to {NUMBER_MAX}")
    return int(text)


def _coalesce_s_of(request: HTTPConnection) -> float:
    text, most_ms = request.query_params.get("coalesce_ms", "0"), round(1000 * COALESCE_S_MAX)
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(most_ms))
    if not is_number or int(text) > most_ms:
        raise UsageError(f"`coalesce_ms` is a number from 0 to {most_ms}")
    return int(text) / 1000
