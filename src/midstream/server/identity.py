"""Who a connection is for, by the headers of its request: what an `open` says, or leaves out (STREAM-51, STREAM-110).

A header that is empty says nothing; one that is there twice says one thing, or is refused.
"""

from __future__ import annotations

import re

from msgspec import Struct
from starlette.requests import HTTPConnection

from midstream.core.frames import COALESCE_S_MAX, EventId, Open, SnapshotWhen
from midstream.core.opening import KEY_CHARS_MAX, NUMBER_MAX, check_cancel_after, check_word
from midstream.errors import MalformedFrameError, UsageError

_QUOTED = re.compile(r'"(?:[ !#-\[\]-~]|\\["\\])*"')
"""A string of RFC 9651, section 3.3.3, as `Idempotency-Key` is defined; the bare word of before is as good."""


class Speaker(Struct, frozen=True):
    """Who sent a frame up by a request of its own (STREAM-39, STREAM-40).

    Args:
        stream: The stream key; "" for a reader.
        secret: The stream's secret; "" where none is shown.
        connection: What the client calls the connection that the request is part of; "" where it does not say.
        number: How it counts that connection; 0 where it does not say.
        cancel_after_s: For how long the stream's client may be gone until its turn is stopped; None for ever.
    """

    stream: str
    secret: str
    connection: str
    number: int
    cancel_after_s: float | None

    def __repr__(self) -> str:
        return f"Speaker(stream={self.stream!r}, connection={self.connection!r})"


def speaker_of(request: HTTPConnection) -> Speaker:
    """Return who a request's headers say that it is of, whatever its frame makes of it.

    Raises:
        MalformedFrameError: One of them is too long or not what it should be.
    """
    number = _number(request, "x-idempotency-connection")
    return Speaker(*stream_of(request), connection_name_of(request), number, cancel_after_of(request))


def stream_of(request: HTTPConnection) -> tuple[str, str]:
    """Return the stream key and secret of a request's headers, each "" where it is missing.

    Raises:
        MalformedFrameError: One of them is of another form, or two headers name two keys.
    """
    ours, standard = _header(request, "x-idempotency-key"), _standard_key_of(request)
    if ours and standard and ours != standard:
        raise MalformedFrameError("`x-idempotency-key` and `idempotency-key` name two keys")
    key = ours or standard
    check_word(key)
    return key, secrets_of(request)[0]


def secrets_of(request: HTTPConnection) -> tuple[str, str]:
    """Return the secret of a request's headers, and what it was before it was changed; each "" where it is missing.

    Raises:
        MalformedFrameError: One of them is of another form.
    """
    secret = _header(request, "x-idempotent-encryption-key")
    old_secret = _header(request, "x-idempotent-encryption-key-old")
    check_word(secret)
    check_word(old_secret)
    return secret, old_secret


def open_of(request: HTTPConnection) -> Open:
    """Return what the headers of a request say in the place of an `open`.

    Raises:
        MalformedFrameError: A header has another form.
        UsageError: `?snapshots=` or `?coalesce_ms=` has.
    """
    key, secret = stream_of(request)
    snapshots = request.query_params.get("snapshots", SnapshotWhen.GONE)
    if snapshots not in [*SnapshotWhen]:
        raise UsageError(f"`snapshots` is one of {', '.join(SnapshotWhen)}")
    return Open(
        key,
        secret,
        event_id_of(request),
        _number(request, "x-idempotency-next-seqno"),
        _number(request, "x-idempotency-connection"),
        cancel_after_of(request),
        snapshots=SnapshotWhen(snapshots),
        coalesce_s=_coalesce_s_of(request),
        old_secret=secrets_of(request)[1],
    )


def connection_name_of(request: HTTPConnection) -> str:
    """Return what a client calls the connection that a request is part of; "" where it does not say.

    Raises:
        MalformedFrameError: It is too long.
    """
    name = _header(request, "x-midstream-connection")
    if len(name) > KEY_CHARS_MAX:
        raise MalformedFrameError(f"the name of a connection has {KEY_CHARS_MAX} characters at most")
    return name


def cancel_after_of(request: HTTPConnection) -> float | None:
    """Return for how long the client of a stream may be gone until its turn is stopped; None for ever.

    Raises:
        MalformedFrameError: It is no such number of seconds.
    """
    text = _header(request, "x-idempotency-cancel-after")
    if not text:
        return None
    if not (text.isascii() and text.isdecimal()):
        raise MalformedFrameError("the header `x-idempotency-cancel-after` is a whole number of seconds")
    seconds = float(text)
    check_cancel_after(seconds)
    return seconds


def event_id_of(request: HTTPConnection) -> str | None:
    """Return the event that a client has.

    A browser that reconnects sends the header beside the address it first used, so the header counts first.

    Raises:
        MalformedFrameError: One of them, also one that does not count, is no event id.
    """
    places = (
        _header(request, "last-event-id"),
        _header(request, "x-idempotency-event-id"),
        request.query_params.get("after"),
    )
    named = [place for place in places if place]
    for each in named:
        EventId.parse(each)
    return named[0] if named else None


def _standard_key_of(request: HTTPConnection) -> str:
    """Return the key of the standard header, of which both forms are about."""
    text = _header(request, "idempotency-key")
    if not text.startswith('"'):
        return text
    if not _QUOTED.fullmatch(text):
        raise MalformedFrameError('the header `idempotency-key` is a string such as "8e03…", or a bare word')
    return re.sub(r"\\(.)", r"\1", text[1:-1])


def _coalesce_s_of(request: HTTPConnection) -> float:
    text, most_ms = request.query_params.get("coalesce_ms", "0"), round(1000 * COALESCE_S_MAX)
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(most_ms))
    if not is_number or int(text) > most_ms:
        raise UsageError(f"`coalesce_ms` is a number from 0 to {most_ms}")
    return int(text) / 1000


def _number(request: HTTPConnection, name: str) -> int:
    text = _header(request, name) or "0"
    if (
        not (text.isascii() and text.isdecimal() and len(text) <= len(str(NUMBER_MAX)))
        or int(text) > NUMBER_MAX
    ):
        raise MalformedFrameError(f"the header `{name}` is a number from 0 to {NUMBER_MAX}")
    return int(text)


def _header(request: HTTPConnection, name: str) -> str:
    """Return what a header says; "" where it is missing or says nothing.

    Raises:
        MalformedFrameError: It is there twice and says two things: who is in between may pass on either.
    """
    # Not every parser takes off the space behind a value, which is no part of it (RFC 9110, section 5.5).
    said = {value.strip(" \t") for value in request.headers.getlist(name)} - {""}
    if len(said) > 1:
        raise MalformedFrameError(f"the header `{name}` is there twice and says two things")
    return said.pop() if said else ""
