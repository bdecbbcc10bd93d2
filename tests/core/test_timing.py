"""Deadlines and backoff as values."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.core.timing import MODEL_BACKOFF, RECONNECT_BACKOFF, Backoff, Deadline, StallBudgets
from midstream.errors import UsageError

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
