from __future__ import annotations

import math

import pytest

from midstream.errors import UsageError
from midstream.models.http_limits import HttpLimits
from midstream.timing import StallBudgets


def test_the_default_limits_are_as_documented() -> None:
    limits = HttpLimits()
    assert (limits.connect_s, limits.acquire_s) == (10.0, 5.0)
    assert limits.silences(None) == (120.0, 120.0)


def test_the_limits_never_cut_silence_that_the_budgets_of_an_agent_allow() -> None:
    budgets = StallBudgets(first_token_max_s=900.0, between_tokens_max_s=700.0, upstream_tool_max_s=600.0)
    assert HttpLimits().silences(budgets) == (900.0, 700.0)
    assert HttpLimits().silences(StallBudgets()) == (120.0, 600.0)
    assert HttpLimits(first_byte_s=5.0, between_bytes_s=3.0).silences(budgets) == (5.0, 3.0)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize("name", ["connect_s", "first_byte_s", "between_bytes_s", "acquire_s"])
def test_an_invalid_limit_is_refused(name: str, seconds: float) -> None:
    with pytest.raises(UsageError, match=name):
        HttpLimits(**{name: seconds})
