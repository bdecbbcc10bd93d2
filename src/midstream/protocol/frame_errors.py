"""The typed errors that `error` frames stand for."""

from __future__ import annotations

from collections.abc import Iterator

from midstream.errors import MidstreamError, ProtocolError, SeqnoGapError, UnavailableError
from midstream.protocol.frames import Error

KEEPS_CHECKPOINT = frozenset(
    (
        "access",
        "connection_lost",
        "events_lost",
        "internal",
        "record_undecodable",
        "stream_fenced",
        "unauthorized",
    )
)
"""Ends after which the stream may still be resumed: log in, wait, restore, leave it to the newer connection, update."""


def error_of(frame: Error) -> MidstreamError:
    """Return the typed error that an `error` frame stands for.

    An unknown code keeps its text, and its `retry` decides the class (STREAM-28).
    """
    kind = _ERRORS.get(frame.code)
    if kind is SeqnoGapError:
        return SeqnoGapError(frame.message, expected=frame.expected or 0)
    if kind is None:
        kind = UnavailableError if frame.retry in {"later", "now"} else ProtocolError
        message = f"the server refused with {frame.code!r}: {frame.message}"
        return kind(message, retry_after_s=frame.retry_after_s)
    return kind(frame.message, retry_after_s=frame.retry_after_s)


def _kinds(kind: type[MidstreamError]) -> Iterator[tuple[str, type[MidstreamError]]]:
    yield kind.code, kind
    for narrower in kind.__subclasses__():
        yield from _kinds(narrower)


# Whoever makes a narrower kind of an error for its own use, without a code of its own, does not take its place.
_ERRORS = dict(reversed([*_kinds(MidstreamError)]))
