"""Times are shown for any number that another program wrote."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.cli.prompts import question_lines
from midstream.cli.terminal import PLAIN
from midstream.cli.times import duration_of, time_of
from midstream.session.calls import CHOICES, QuestionKind
from midstream.session.questions import Question
from tests.spec import spec


@spec("SEC-79")
@given(st.floats())
def test_every_number_has_a_text_of_one_short_line(number: float) -> None:
    for text in (time_of(number), duration_of(number), duration_of(number, digits=0)):
        assert 0 < len(text) <= 20
        assert text.isascii()
        assert "\n" not in text


def test_impossible_times_and_durations_have_a_text() -> None:
    assert [time_of(1e300), time_of(-1e300), time_of(float("nan"))] == [
        "after all dates",
        "before all dates",
        "no date",
    ]
    assert [duration_of(each) for each in (0.04, 1.5, 1e300)] == ["0.0 s", "1.5 s", "1.0e+300 s"]


@spec("SEC-79")
@pytest.mark.parametrize("at", [1e300, -1e300, float("inf"), 253_402_300_800.0])
def test_a_question_with_an_impossible_deadline_is_shown(at: float) -> None:
    kind = QuestionKind.APPROVAL
    asked = Question("s", 1, 1, "c", kind, "d", "pay", "{}", CHOICES[kind], at, expires_at=at)
    assert [*question_lines(asked, PLAIN, 80)][-1].strip().startswith("until ")
