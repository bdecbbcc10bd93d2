"""Number of examples of properties: the same ones every time, or new random ones.

`make test` and `make check` try the same examples on every run, drawn from each test itself: a run that fails
there fails again. So they find nothing new, and a quarter of the usual number is enough. `make check` tries
half of these. `make search` draws new ones, `TIMES` the usual number; each finding becomes an example that
is always tried.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import Any, Final

import pytest
from _pytest.mark import ParameterSet

TIMES: Final = int(os.environ.get("MIDSTREAM_SEARCH") or 1)
"""Multiple of the usual number of examples; a random search where the variable is set."""
IS_QUICK: Final = bool(os.environ.get("MIDSTREAM_QUICK"))
"""Whether this is `make check`, which tries a part of the examples of `make test`."""
PART: Final = 4
"""`make test` tries one example of so many."""
FEW: Final = 5
"""Number of examples that is never reduced: most of the cost of such a test is its first one."""
PROFILE: Final = "search" if os.environ.get("MIDSTREAM_SEARCH") else "midstream"
"""The active settings of `tests/conftest.py`."""


def tried(usual: int) -> int:
    """Return how many examples, or seeds, this run tries of the usual number."""
    if PROFILE == "search":
        return usual * TIMES
    return max(min(usual, FEW), usual // (2 * PART if IS_QUICK else PART))


def with_slow(cases: Iterable[Any], slow: Collection[Any], long: Collection[Any] = ()) -> list[ParameterSet]:
    """Return the cases of one parameter, those in `slow` left to `make test`, and those in `long` to `make long`."""

    def marks(case: Any) -> list[pytest.MarkDecorator]:  # noqa: ANN401 - as pytest has it
        return [pytest.mark.long] if case in long else [pytest.mark.slow] if case in slow else []

    return [pytest.param(each, marks=marks(each)) for each in cases]


def with_long(cases: Iterable[Any], representatives: int) -> list[ParameterSet]:
    """Return the cases of a test, of which all after the first ones are left to `make long`.

    Args:
        cases: Each is the value of one parameter, or a tuple of the values of several.
    """
    rows = [each if isinstance(each, tuple) else (each,) for each in cases]
    return [
        *(pytest.param(*row) for row in rows[:representatives]),
        *(pytest.param(*row, marks=pytest.mark.long) for row in rows[representatives:]),
    ]


EXAMPLES: Final = tried(100)
"""Number of examples of a test without a number of its own."""
