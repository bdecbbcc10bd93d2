"""Checks of numbers that an application passes. A bool and NaN are no numbers here."""

from __future__ import annotations

import math
from numbers import Integral, Real

from midstream.errors import UsageError

SHOWN_CHARS_MAX = 40
"""Characters of a wrong value in a message."""
WAIT_S_MAX = 366 * 24 * 3600.0
"""Seconds of the longest time limit that can be set for a call or for a person's answer."""


def require_seconds(
    name: str,
    value: object,
    *,
    least: float = 0.0,
    most: float = WAIT_S_MAX,
    is_positive: bool = False,
    error: type[UsageError] = UsageError,
) -> None:
    """Require a number of seconds.

    Args:
        name: Name of the argument.
        value: Value of the argument.
        least, most: Range of the value; `most` is infinite if a limit may be endless.
        is_positive: Whether 0 is refused.
        error: Class of the error.

    Raises:
        UsageError: The value is something else, or out of range.
    """
    require_number(name, value, "seconds", least=least, most=most, is_positive=is_positive, error=error)


def require_count(
    name: str,
    value: object,
    *,
    least: int = 0,
    most: int | None = None,
    error: type[UsageError] = UsageError,
) -> None:
    """Require an integer from `least` to `most`; the other arguments are as of `require_seconds`.

    Raises:
        UsageError: The value is something else, or out of range.
    """
    number = None if isinstance(value, bool) or not isinstance(value, Integral) else int(value)
    if number is None or number < least or (most is not None and number > most):
        raise error(f"`{name}` is {_shown(value)}; expected an integer, {_range(f'{least}', most)}")


def require_number(
    name: str,
    value: object,
    unit: str,
    *,
    least: float = 0.0,
    most: float = math.inf,
    is_positive: bool = False,
    error: type[UsageError] = UsageError,
) -> None:
    """Require a number of a unit, such as "MiB"; the other arguments are as of `require_seconds`.

    Raises:
        UsageError: The value is something else, or out of range.
    """
    number = _number_of(value)
    if not least <= number <= most or (is_positive and number == 0):
        low = "more than 0" if is_positive else f"{least:g}"
        raise error(f"`{name}` is {_shown(value)}; expected {_range(low, most)} {unit}")


def _number_of(value: object) -> float:
    """Return a number; NaN for anything else, and for an integer that is too large."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def _range(low: str, most: float | None) -> str:
    if most is None or most == math.inf:
        return low if low.startswith("more") else f"{low} or more"
    return f"{low} and at most {most:.12g}" if low.startswith("more") else f"{low} to {most:.12g}"


def _shown(value: object) -> str:
    """Return a value for a message, shortened."""
    try:
        shown = repr(value)
    except ValueError:  # of an integer with thousands of digits
        shown = f"a very large {type(value).__name__}"
    return shown if len(shown) <= SHOWN_CHARS_MAX else f"{shown[:SHOWN_CHARS_MAX]}…"
