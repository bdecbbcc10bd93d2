"""The typed errors for `error` frames."""

from __future__ import annotations

from collections.abc import Iterator

from midstream.errors import MidstreamError, ProtocolError, SeqnoGapError, UnavailableError
from midstream.protocol.frames import Error

KEEPS_CHECKPOINT = frozenset(
    (
        "access",
        "agent_mismatch",
        "connection_lost",
        "events_lost",
        "internal",
        "key_missing",
        "record_undecodable",
        "session_locked",
        "store_damaged",
        "stream_fenced",
        "unauthorized",
    )
)
"""Errors after which the stream can be resumed: elsewhere, after a wait, or when a person has changed something."""


def error_of(frame: Error) -> MidstreamError:
    """Return the typed error for an `error` frame.

    For an unknown code, `retry` decides the class, and the text is kept (STREAM-28).
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


# A subclass without a code of its own must not replace the class of the code.
_ERRORS = dict(reversed([*_kinds(MidstreamError)]))
