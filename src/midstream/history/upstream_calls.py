"""Calls that the upstream runs itself: their start, their end, and a description as text.

They are executed elsewhere, so they are never pending work here.
"""

from __future__ import annotations

from typing import Literal

from msgspec.structs import replace

from midstream.history.messages import UPSTREAM_CHARS_MAX, UPSTREAM_CUT, Outcome, UpstreamCall, storable

Words = tuple[Literal["text", "thinking"], str] | UpstreamCall
"""Kind and text of a part of a response; or the state of an upstream call."""


NAME_CHARS_MAX = 256
"""Characters of a tool's name that are stored."""

_ENDED = {
    Outcome.OK: "it ended well",
    Outcome.ERROR: "it failed",
    Outcome.CANCELLED: "it was cancelled",
    Outcome.DENIED: "a person declined it, it never ran",
    Outcome.UNKNOWN: "nobody knows how it ended",
    None: "it runs",
}


def start_call(call_id: str, name: str, arguments: str) -> UpstreamCall:
    """Return a call that the upstream has begun."""
    kept = storable(name)[:NAME_CHARS_MAX]
    return UpstreamCall(storable(call_id)[:NAME_CHARS_MAX], kept, _shorten(arguments) or "{}")


def end_call(call: UpstreamCall, content: str, outcome: Outcome) -> UpstreamCall:
    """Return the call with its outcome."""
    return replace(call, content=_shorten(content), outcome=outcome)


def close_call(call: UpstreamCall) -> UpstreamCall:
    """Return a call of a finished response: an open one gets an unknown outcome, with the reason."""
    return call if call.outcome is not None else end_call(call, UPSTREAM_CUT, Outcome.UNKNOWN)


def words_of(call: UpstreamCall) -> str:
    """Describe a call as text, for formats without a part for it, and clients without tools."""
    name = " ".join(call.name.split()) or "a tool"
    heading = f"[ran elsewhere: {name} {call.arguments}; {_ENDED[call.outcome]}]"
    return f"{heading}\n{call.content}" if call.content else heading


def _shorten(text: str) -> str:
    text = storable(text)
    if len(text) <= UPSTREAM_CHARS_MAX:
        return text
    return f"{text[:UPSTREAM_CHARS_MAX]}\n[+{len(text) - UPSTREAM_CHARS_MAX} characters]"
