"""Instants and durations as text. Any number is accepted, because other programs may have written it."""

from __future__ import annotations

import math
from datetime import UTC, datetime

LONG_S = 1e9
"""Durations from this number of seconds on are written with an exponent."""


def time_of(at: float) -> str:
    """Return an instant, in seconds since 1970, as text in local time."""
    try:
        return datetime.fromtimestamp(at, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):  # outside of the calendar
        return "no date" if math.isnan(at) else "after all dates" if at > 0 else "before all dates"


def duration_of(seconds: float, *, digits: int = 1) -> str:
    """Return a duration in seconds with its unit, such as "1.5 s"."""
    is_long = not abs(seconds) < LONG_S  # also true for NaN
    return f"{seconds:.1e} s" if is_long else f"{seconds:.{digits}f} s"
