"""Fields of an `open`, in its frame and in the headers of its request."""

from __future__ import annotations

from msgspec.structs import replace

from midstream.errors import MalformedFrameError
from midstream.protocol.frames import COALESCE_S_MAX, Open

CANCEL_AFTER_S_MAX = 3600.0
"""Seconds a turn may be left alone where its client wants it stopped after some."""
KEY_CHARS_MAX = 256
"""Characters of a stream key or of a secret."""
NUMBER_MAX = 2**53
"""The last number JavaScript counts to."""
_IN_HEADERS = ("stream", "secret", "event_id", "next_seqno", "connection", "cancel_after_s", "old_secret")


def opened_by(headers: Open, frame: Open) -> Open:
    """Return the fields of a request, some from its headers and the others from its `open` (STREAM-110).

    Raises:
        MalformedFrameError: They contradict each other.
    """
    nothing, filled = Open(), {}
    for name in _IN_HEADERS:
        told, said, unsaid = (getattr(each, name) for each in (headers, frame, nothing))
        if told in (unsaid, said):
            continue
        if said != unsaid:
            raise MalformedFrameError(f"the headers and the `open` have different values of `{name}`")
        filled[name] = told
    return replace(frame, **filled) if filled else frame


def check_open(frame: Open) -> None:
    """Let pass an `open` whose members have their form and their bounds.

    Raises:
        MalformedFrameError: One has not.
    """
    if frame.version < 1:
        raise MalformedFrameError("versions begin with 1")
    if not (0 <= frame.next_seqno <= NUMBER_MAX and 0 <= frame.connection <= NUMBER_MAX):
        raise MalformedFrameError(f"sequence and connection numbers go from 0 to {NUMBER_MAX}")
    for word in (frame.stream, frame.secret, frame.old_secret):
        check_word(word)
    if not 0 <= frame.coalesce_s <= COALESCE_S_MAX:
        raise MalformedFrameError(f"events are held back for 0 to {COALESCE_S_MAX} s")
    if frame.stream and not frame.secret:
        raise MalformedFrameError("a stream needs a secret")
    check_cancel_after(frame.cancel_after_s)


def check_word(word: str) -> None:
    """Let pass a stream key or a secret, or nothing: what each transport carries alike (STREAM-2).

    Raises:
        MalformedFrameError: It is too long, has other characters than those, or a space at an end.
    """
    is_carried = word.isascii() and word.isprintable() and word == word.strip(" ")
    if len(word) > KEY_CHARS_MAX or not is_carried:
        raise MalformedFrameError(
            f"stream keys and secrets are 1 to {KEY_CHARS_MAX} printable ASCII characters"
        )


def check_cancel_after(cancel_after_s: float | None) -> None:
    """Let pass for how long a client may be gone (STREAM-55).

    Raises:
        MalformedFrameError: It is out of bounds.
    """
    if cancel_after_s is not None and not 0 <= cancel_after_s <= CANCEL_AFTER_S_MAX:
        raise MalformedFrameError(
            f"a turn is stopped after 0 to {CANCEL_AFTER_S_MAX:g} seconds alone, or never"
        )
