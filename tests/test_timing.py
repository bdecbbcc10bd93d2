"""Deadlines and backoff as values."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.errors import UsageError
from midstream.timing import (
    MODEL_BACKOFF,
    RECONNECT_BACKOFF,
    RETRY_AFTER_MAX_S,
    Backoff,
    Deadline,
    StallBudgets,
    retry_after_s,
)

chances = st.floats(0.0, 1.0, exclude_max=True)


def test_a_model_is_asked_again_after_one_two_and_four_seconds() -> None:
    assert [MODEL_BACKOFF.wait_s(failures, chance=0.0) for failures in range(5)] == [0.0, 1.0, 2.0, 4.0, 4.0]


@given(st.integers(1, 10**9), chances)
def test_a_reconnect_never_waits_longer_than_half_a_minute(failures: int, chance: float) -> None:
    assert 0.0 < RECONNECT_BACKOFF.wait_s(failures, chance=chance) <= 30.0


@given(st.integers(1, 60), chances)
def test_chance_only_shortens_and_by_no_more_than_its_share(failures: int, chance: float) -> None:
    plain = Backoff(first_s=0.5, most_s=60.0).wait_s(failures, chance=chance)
    spread = Backoff(first_s=0.5, most_s=60.0, jitter=0.25).wait_s(failures, chance=chance)
    assert 0.75 * plain <= spread <= plain


def test_deadlines_are_ordered_by_their_instant() -> None:
    assert min(Deadline(2.0, "a heartbeat"), Deadline(1.0, "an ack")) == Deadline(1.0, "an ack")


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
@pytest.mark.parametrize("name", StallBudgets.__struct_fields__)
def test_a_budget_for_silence_is_positive(name: str, value: float) -> None:
    with pytest.raises(UsageError, match="positive"):
        StallBudgets(**{name: value})


@pytest.mark.parametrize("name", ["first_token_max_s", "between_tokens_max_s"])
def test_no_model_is_waited_for_without_end(name: str) -> None:
    with pytest.raises(UsageError, match="finite"):
        StallBudgets(**{name: math.inf})
    assert StallBudgets(first_token_s=math.inf).first_token_s == math.inf


@pytest.mark.parametrize(
    ("said", "wait_s"),
    [
        ("7", 7.0),
        (" 2.5 ", 2.5),
        ("0", 0.0),
        ("-1", 0.0),
        ("1e9", RETRY_AFTER_MAX_S),
        ("Sun, 06 Nov 1994 08:49:37 GMT", 37.0),
        ("Sunday, 06-Nov-94 08:49:37 GMT", 37.0),
        ("Sun Nov  6 08:49:37 1994", 37.0),
        ("Sun, 06 Nov 1994 08:48:00 GMT", 0.0),
        ("Sun, 06 Nov 2094 08:49:37 GMT", RETRY_AFTER_MAX_S),
        ("", None),
        ("nan", None),
        ("inf", None),
        ("soon", None),
        ("Sun, 06 Nov 99999 08:49:37 GMT", None),
    ],
)
def test_the_pause_a_server_asks_for_is_seconds_or_a_date_and_has_a_limit(
    said: str, wait_s: float | None
) -> None:
    assert retry_after_s(said, now=784_111_740.0) == wait_s  # 08:49:00 of that day


@given(st.text(max_size=40), st.floats(0.0, 1e12))
def test_whatever_a_server_says_the_pause_is_in_its_limit_or_none(said: str, now: float) -> None:
    wait_s = retry_after_s(said, now=now)
    assert wait_s is None or 0.0 <= wait_s <= RETRY_AFTER_MAX_S
