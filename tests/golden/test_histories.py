"""20,000 damaged histories of 8 formats are repaired, checked and converted as recorded."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.golden import adapter
from tests.golden.golden_histories import (
    CASES_PER_FORMAT,
    FORMATS,
    digests_of,
    examples_path,
    inputs_of,
    summary_of,
    text_of,
)
from tests.search import with_long

PARTS = 4
"""`make test` tries one case of so many, `make long` the others."""
SHOWN_MAX = 3
"""Limit of differing cases that are printed in full; the number of all of them is printed, too."""


def _difference(number: int, case: Any, expected: Any, actual: Any, outcome: Any) -> str:  # noqa: ANN401 - JSON
    return "\n".join(
        (
            f"case {number} of {case['format']}, profile {case['profile']}, options {text_of(case['options'])}",
            f"  input:    {text_of(case['messages'])}",
            f"  expected: {text_of(expected)}",
            f"  actual:   {text_of(actual)}",
            f"  outcome:  {text_of(outcome)}",
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("first", with_long(range(PARTS), 1))
@pytest.mark.parametrize("form", FORMATS)
def test_histories_have_their_recorded_outcome(form: str, first: int) -> None:
    expected = digests_of(form)
    differing, count = [], 0
    for number, case in enumerate(inputs_of(form)):
        count += 1
        if number % PARTS != first:
            continue
        outcome = adapter.repaired(case)
        actual = json.loads(text_of(summary_of(case, outcome)))
        if actual != expected[number]:
            differing.append(_difference(number, case, expected[number], actual, outcome))
    assert (count, len(expected)) == (CASES_PER_FORMAT, CASES_PER_FORMAT)
    assert not differing, f"{len(differing)} cases differ:\n" + "\n".join(differing[:SHOWN_MAX])


@pytest.mark.parametrize("form", FORMATS)
def test_examples_have_their_recorded_outcome_in_full(form: str) -> None:
    examples = json.loads(examples_path(form).read_text(encoding="ascii"))
    assert len(examples) == 20
    for example in examples:
        outcome = json.loads(text_of(adapter.repaired(example["case"])))
        assert outcome == example["outcome"], f"example {example['number']} of {form}"
