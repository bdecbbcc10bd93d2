"""The work of a repair grows with the history and no faster (HISTORY-9): counted in lines of code, never
timed.

The work of C code inside one line (copying a list, searching one) is not counted here; `bench/growth.py`
times it.
"""

from __future__ import annotations

from typing import Any

import pytest

from bench.growth import BAR, FORMATS, SHAPES, history
from midstream.history.operations import repair_by_name as repair
from tests.lines import lines_run
from tests.spec import spec

MESSAGES = 50


def lines_of(messages: list[Any], form: str, profile: str | None = None) -> int:
    """Return the number of lines of the package that one repair runs."""
    with lines_run() as lines:
        repair(messages, format=form, profile=profile)
    return lines.count


@spec("HISTORY-9")
@pytest.mark.parametrize("profile", [None, "portable"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMATS)
def test_twice_the_messages_are_twice_the_work(form: str, shape: str, profile: str | None) -> None:
    half = lines_of(history(form, shape, MESSAGES), form, profile)
    whole = lines_of(history(form, shape, 2 * MESSAGES), form, profile)
    assert half > MESSAGES
    assert whole / half < BAR


@spec("HISTORY-9", "HISTORY-27")
@pytest.mark.parametrize("form", FORMATS)
def test_results_after_their_placeholders_are_no_more_work(form: str) -> None:
    def late(count: int) -> list[Any]:
        stored = repair(history(form, "parallel calls", count), format=form).messages
        return [*stored, *history(form, "orphans", count)]

    assert lines_of(late(2 * MESSAGES), form) / lines_of(late(MESSAGES), form) < BAR
