"""Repaired histories before validators that share no code with the repair, and before other people's."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

import midstream.history.operations
from tests.oracles.accidents import ACCIDENTS, ODD
from tests.oracles.foreign import PACKAGES, SPEAKS_FOR, missing, objections
from tests.oracles.measures import Score, broken, lost_words, score
from tests.oracles.scripts import WRITERS, valid
from tests.oracles.verdicts import refusals

CASES = sorted((Path(__file__).parent / "cases").glob("*.json"))
REPAIRS = 60
"""Generated histories per format here; the scorecard takes the requested number."""
QUESTIONS = 12
"""Histories per format for each foreign validator."""


def measured(form: str, number: int) -> Score:
    chance = Random(f"{form}/test/{number}")
    whole, messages, how = broken(form, chance, accidents=ODD if number % 3 == 0 else ACCIDENTS)
    made = score(form, messages, midstream.history.operations.repair, whole=whole)
    made.how = [f"{number}", *how]
    return made


@pytest.mark.parametrize("form", WRITERS)
def test_valid_histories_are_accepted_and_left_unchanged(form: str) -> None:
    for number in range(REPAIRS):
        messages = valid(form, Random(f"{form}/valid/{number}"))
        assert refusals(form, messages) == []
        assert midstream.history.operations.repair_by_name(messages, format=form).messages is messages


@pytest.mark.parametrize("form", WRITERS)
def test_no_repaired_history_breaks_a_rule_or_loses_content(form: str) -> None:
    scores = [measured(form, number) for number in range(REPAIRS)]
    assert [(made.how, made.refused, made.lost, made.faults) for made in scores if made.refused] == []
    assert [(made.how, made.lost) for made in scores if made.lost] == []
    assert [(made.how, made.faults) for made in scores if made.faults] == []
    kept = sum(made.verbatim[0] for made in scores) / sum(made.verbatim[1] for made in scores)
    assert kept >= 0.8


@pytest.mark.parametrize("form", WRITERS)
@pytest.mark.parametrize("oracle", PACKAGES)
def test_independent_validators_accept_repaired_histories(oracle: str, form: str) -> None:
    if lacking := missing(oracle):
        pytest.skip(f"{lacking} is not installed")
    profile = SPEAKS_FOR.get(oracle)
    for number in range(QUESTIONS):
        chance = Random(f"{form}/{oracle}/{number}")
        _, messages, how = broken(form, chance)
        whole = valid(form, chance)
        if not midstream.history.operations.check_by_name(whole, profile, format=form):
            assert objections(oracle, form, whole) == []
        done = midstream.history.operations.repair_by_name(messages, format=form, profile=profile)
        assert (number, how, objections(oracle, form, done.messages)) == (number, how, [])
        assert (number, how, lost_words(messages, [done.messages, done.system])) == (number, how, [])


@pytest.mark.parametrize("oracle", SPEAKS_FOR)
def test_mistral_accepts_no_system_message_after_a_response_and_its_text_stays_in_place(
    oracle: str,
) -> None:
    if lacking := missing(oracle):
        pytest.skip(f"{lacking} is not installed")
    inside = [
        {"role": "user", "content": "k1z"},
        {"role": "assistant", "content": "k2z"},
        {"role": "system", "content": "k3z"},
    ]
    assert "Unexpected role 'system' after role 'assistant'" in objections(oracle, "mistral", inside)[0]
    done = midstream.history.operations.repair_by_name(inside, format="mistral", profile=SPEAKS_FOR[oracle])
    assert done.messages == [*inside[:2], {"role": "user", "content": "[system message] k3z"}]
    assert [edit.code for edit in done.edits] == ["system-in-list"]
    assert objections(oracle, "mistral", done.messages) == []


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_a_reported_defect_stays_repaired(path: Path) -> None:
    case: dict[str, Any] = json.loads(path.read_text())
    form, messages, profile = case["format"], case["messages"], case.get("profile")
    repaired = midstream.history.operations.repair_by_name(messages, format=form, profile=profile)
    assert refusals(form, repaired.messages, profile or "") == []
    assert lost_words(messages, [repaired.messages, repaired.system]) == []
    assert repaired.messages[: case["intact"]] == messages[: case["intact"]]
    assert repaired.edits
    again = midstream.history.operations.repair_by_name(
        repaired.messages, format=form, profile=profile, system=repaired.system
    )
    assert again.messages is repaired.messages
