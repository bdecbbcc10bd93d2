"""Recorded journals lead to the recorded state, history, events, pending work and provider messages."""

from __future__ import annotations

import json

import pytest

from tests.golden import journal_adapter
from tests.golden.golden_histories import text_of
from tests.golden.golden_journals import FULL, SOURCES, Json, journals_of, outcomes_of, summary_of

SHOWN_MAX = 3
"""Limit of differing journals that are printed; the number of all of them is printed, too."""
RECORDS_MIN = {"scripts": 500, "lives": 4000, "simulation": 3000}


@pytest.mark.parametrize(
    "source", [each if each == FULL else pytest.param(each, marks=pytest.mark.slow) for each in SOURCES]
)
def test_journals_have_their_recorded_outcome(source: str) -> None:
    differing, records = [], 0
    for (name, journal), expected in zip(journals_of(source), outcomes_of(source), strict=True):
        records += len(journal)
        outcome = json.loads(text_of(journal_adapter.outcome(journal)))
        actual = {"name": name, **outcome} if source == FULL else summary_of(name, outcome)
        if actual != expected:
            differing.append(_difference(journal, expected, actual, outcome))
    assert records > RECORDS_MIN[source]
    assert not differing, f"{len(differing)} journals differ:\n" + "\n".join(differing[:SHOWN_MAX])


def test_every_kind_of_record_and_of_nested_value_is_recorded() -> None:
    held: set[str] = set()
    for source in SOURCES:
        for _, journal in journals_of(source):
            held |= journal_adapter.kinds_of(journal)
    assert sorted(journal_adapter.possible_kinds() - held) == []


def test_a_renamed_tag_or_field_is_translated_only_at_its_path() -> None:
    names = {"turn_ended": "turn_over", "turn_ended.status": "how", "response_completed.body.parts": "pieces"}
    ended = '{"type":"turn_ended","turn":1,"status":"completed","at":2.0}'
    text = '{"type":"response_completed","body":{"parts":[{"type":"text","parts":1}]},"parts":0}'
    assert journal_adapter.renamed(ended, names) == '{"type":"turn_over","turn":1,"how":"completed","at":2.0}'
    assert journal_adapter.renamed(text, names) == (
        '{"type":"response_completed","body":{"pieces":[{"type":"text","parts":1}]},"parts":0}'
    )
    assert journal_adapter.renamed('{"cut', names) == '{"cut'


def _difference(journal: journal_adapter.Journal, expected: Json, actual: Json, outcome: Json) -> str:
    lines = [f"journal {expected['name']!r}"]
    steps = zip(expected["steps"], actual["steps"], strict=True)
    at = next((number for number, (recorded, now) in enumerate(steps) if recorded != now), None)
    if at is not None:
        lines += [
            f"  record {at + 1}: {journal[at][1]}",
            f"  expected: {text_of(expected['steps'][at])}",
            f"  actual:   {text_of(outcome['steps'][at])}",
        ]
    for part in sorted(actual.keys() - {"steps"}):
        if actual[part] != expected[part]:
            lines += [
                f"  expected {part}: {text_of(expected[part])}",
                f"  actual {part}:   {text_of(actual[part])}",
            ]
    return "\n".join(lines)
