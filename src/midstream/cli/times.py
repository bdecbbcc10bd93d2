"""Instants and durations as a person reads them. Every number has a text: some are written by other programs."""

from __future__ import annotations

import math
from datetime import UTC, datetime

LONG_S = 1e9
"""Seconds from which on a duration is written with an exponent."""


def time_of(at: float) -> str:
    """Return an instant, in seconds since 1970, as a person of this machine reads it."""
    try:
        return datetime.fromtimestamp(at, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):  # no calendar has it
        return "no date" if math.isnan(at) else "after all dates" if at > 0 else "before all dates"


def duration_of(seconds: float, *, digits: int = 1) -> str:
    """Return a duration in seconds with its unit, such as "1.5 s"."""
    is_long = not abs(seconds) < LONG_S  # also where it is no number
    return f"{seconds:.1e} s" if is_long else f"{seconds:.{digits}f} s"
