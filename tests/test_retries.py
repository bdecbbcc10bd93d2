"""Every retry rule: pauses between attempts, the pauses that servers request, and the JavaScript constants."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.retries import (
    AGENT_REPEAT_AFTER_S,
    ATTEMPT_PAUSE_MAX_S,
    MODEL_BACKOFF,
    RECONNECT_BACKOFF,
    RETRY_AFTER_MAX_S,
    Backoff,
    pause_s,
    retry_after_s,
)
from midstream.timing import StallBudgets
from tools import retries_js

chances = st.floats(0.0, 1.0, exclude_max=True)


def test_a_model_is_retried_after_one_two_and_four_seconds() -> None:
    assert [MODEL_BACKOFF.wait_s(failures, chance=0.0) for failures in range(5)] == [0.0, 1.0, 2.0, 4.0, 4.0]


@given(st.integers(1, 10**9), chances)
def test_a_reconnect_never_waits_longer_than_half_a_minute(failures: int, chance: float) -> None:
    assert 0.0 < RECONNECT_BACKOFF.wait_s(failures, chance=chance) <= 30.0


@given(st.integers(1, 60), chances)
def test_jitter_only_shortens_a_pause_and_by_no_more_than_its_share(failures: int, chance: float) -> None:
    plain = Backoff(first_s=0.5, most_s=60.0).wait_s(failures, chance=chance)
    spread = Backoff(first_s=0.5, most_s=60.0, jitter=0.25).wait_s(failures, chance=chance)
    assert 0.75 * plain <= spread <= plain


@pytest.mark.parametrize(
    ("header", "wait_s"),
    [
        ("7", 7.0),
        (" 2.5 ", 2.5),
        ("0", 0.0),
        ("-1", 0.0),
        ("1e9", 1e9),
        ("Sun, 06 Nov 1994 08:49:37 GMT", 37.0),
        ("Sunday, 06-Nov-94 08:49:37 GMT", 37.0),
        ("Sun Nov  6 08:49:37 1994", 37.0),
        ("Sun, 06 Nov 1994 08:48:00 GMT", 0.0),
        ("Sun, 06 Nov 2094 08:49:37 GMT", 3155760037.0),
        ("", None),
        ("nan", None),
        ("inf", None),
        ("soon", None),
        ("Sun, 06 Nov 99999 08:49:37 GMT", None),
    ],
)
def test_a_requested_pause_is_seconds_or_a_date(header: str, wait_s: float | None) -> None:
    assert retry_after_s(header, now=784_111_740.0) == wait_s  # 08:49:00 of that day.


@given(st.text(max_size=40), st.floats(0.0, 1e12))
def test_any_retry_after_header_gives_a_pause_within_the_limit(header: str, now: float) -> None:
    wait_s = retry_after_s(header, now=now)
    assert wait_s is None or wait_s >= 0.0
    assert 0.0 <= pause_s(wait_s) <= RETRY_AFTER_MAX_S


def test_the_pauses_within_an_attempt_of_a_pool_leave_time_for_its_answer() -> None:
    assert len(AGENT_REPEAT_AFTER_S) * ATTEMPT_PAUSE_MAX_S <= StallBudgets().first_token_max_s / 2


def test_the_constants_of_the_javascript_client_are_those_of_python() -> None:
    assert retries_js.TARGET.read_text(encoding="utf-8") == retries_js.text()
