"""The fields of an `open`, from its frame and from the headers of its request."""

from __future__ import annotations

from msgspec.structs import replace

from midstream.errors import MalformedFrameError
from midstream.protocol.frames import KEY_CHARS_MAX, Open

_IN_HEADERS = ("stream", "secret", "event_id", "next_seqno", "connection", "cancel_after_s", "old_secret")


def merge_open_fields(headers: Open, frame: Open) -> Open:
    """Return the fields of a request, some from its headers and the others from its `open` (STREAM-110).

    Raises:
        MalformedFrameError: They contradict each other.
    """
    nothing, filled = Open(), {}
    for name in _IN_HEADERS:
        in_headers, in_frame, default = (getattr(each, name) for each in (headers, frame, nothing))
        if in_headers in (default, in_frame):
            continue
        if in_frame != default:
            raise MalformedFrameError(f"the headers and the `open` have different values of `{name}`")
        filled[name] = in_headers
    return replace(frame, **filled) if filled else frame


def check_open(frame: Open) -> None:
    """Check the fields of an `open` beyond their types: the characters of key and secrets, and a stream's secret.

    Raises:
        MalformedFrameError: A field is not valid.
    """
    for word in (frame.stream, frame.secret, frame.old_secret):
        check_word(word)
    if frame.stream and not frame.secret:
        raise MalformedFrameError("a stream needs a secret")


def check_word(word: str) -> None:
    """Check that a stream key or a secret, which may be empty, has the form that each transport can carry (STREAM-2).

    Raises:
        MalformedFrameError: It is too long, or has other characters or a space at an end.
    """
    is_carried = word.isascii() and word.isprintable() and word == word.strip(" ")
    if len(word) > KEY_CHARS_MAX or not is_carried:
        raise MalformedFrameError(
            f"stream keys and secrets are 1 to {KEY_CHARS_MAX} printable ASCII characters"
        )
