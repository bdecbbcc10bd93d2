"""Deadlines and limits of silence, as values."""

from __future__ import annotations

import math

import pytest

from midstream.errors import UsageError
from midstream.timing import Deadline, StallBudgets


def test_deadlines_are_ordered_by_their_instant() -> None:
    assert min(Deadline(2.0, "a heartbeat"), Deadline(1.0, "an ack")) == Deadline(1.0, "an ack")


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
@pytest.mark.parametrize("name", StallBudgets.__struct_fields__)
def test_a_silence_budget_must_be_positive(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=f"`{name}` is {value}; expected more than 0"):
        StallBudgets(**{name: value})


@pytest.mark.parametrize("name", ["first_token_max_s", "between_tokens_max_s"])
def test_the_maximum_wait_for_a_model_must_be_finite(name: str) -> None:
    with pytest.raises(UsageError, match="and at most 31622400 seconds"):
        StallBudgets(**{name: math.inf})
    assert StallBudgets(first_token_s=math.inf).first_token_s == math.inf
