"""The whole repair through its public function: reported histories, and the properties of any history."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from midstream.history.operations import repair_by_name as repair
from midstream.history.profiles import PROFILES
from tests.history.repair.format_histories import FORMATS, broken, markers, prompt, valid
from tests.history.repair.oracles import installed, pydantic_ai_wires
from tests.history.repair.reported import CASES, ReportedCase, response, result, text, use, user
from tests.history.repair.rules import refusals
from tests.search import tried
from tests.spec import spec

# Profiles with rules for a format in `rules.py`.
PROFILED = [
    ("anthropic", "bedrock-claude"),
    ("anthropic", "vertex"),
    ("anthropic", "minimax"),
    ("anthropic", "portable"),
    ("anthropic", "strict-template"),
    ("openai-chat", "deepseek"),
    ("openai-chat", "kimi"),
    ("openai-chat", "strict-template"),
    ("openai-chat", "portable"),
    ("openai-responses", "portable"),
    ("openai-responses", "strict-template"),
    ("mistral", "mistral-v3"),
    ("gemini", "gemini-3"),
    ("gemini", "portable"),
    ("gemini", "strict-template"),
    ("bedrock", "bedrock-mistral"),
    ("bedrock", "portable"),
    ("bedrock", "strict-template"),
    ("pydantic-ai", "mistral"),
    ("pydantic-ai", "portable"),
    ("pydantic-ai", "strict-template"),
    ("langchain", "strict-template"),
    *((form, None) for form in FORMATS),
]
seeds = st.integers(0, 2**32)
searched = settings(max_examples=tried(60), suppress_health_check=[HealthCheck.too_slow])


@spec("HISTORY-1", "HISTORY-5", "HISTORY-6")
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.form}: {case.name}")
def test_a_reported_history_is_made_valid_without_loss(case: ReportedCase) -> None:
    before = copy.deepcopy(case.messages)
    done = repair(case.messages, format=case.form, profile=case.profile, system=case.system)

    assert case.messages == before
    assert refusals(case.form, done.messages, case.profile) == []
    assert markers(before) <= markers([done.messages, done.system])
    assert {edit.code for edit in done.edits} >= set(case.codes)
    assert done.edits != ()

    again = repair(done.messages, format=case.form, profile=case.profile, system=done.system)
    assert again.edits == ()
    assert again.messages is done.messages


@spec("HISTORY-1", "HISTORY-3", "HISTORY-4", "HISTORY-6")
@pytest.mark.parametrize(("form", "profile"), PROFILED)
@searched
@given(seed=seeds)
def test_any_broken_history_becomes_valid_and_stays_so(form: str, profile: str | None, seed: int) -> None:
    messages = broken(form, Random(seed))
    before = json.dumps(messages)
    done = repair(messages, format=form, profile=profile)

    assert json.dumps(messages) == before
    assert refusals(form, done.messages, profile) == []
    assert markers(json.loads(before)) <= markers([done.messages, done.system])
    again = repair(done.messages, format=form, profile=profile, system=done.system)
    assert again.edits == ()
    assert again.messages is done.messages
    assert repair(json.loads(before), format=form, profile=profile).messages == done.messages


@spec("HISTORY-2")
@pytest.mark.parametrize("form", FORMATS)
@searched
@given(seed=seeds)
def test_a_valid_history_is_returned_as_the_same_object(form: str, seed: int) -> None:
    messages = valid(form, Random(seed))
    assert refusals(form, messages) == []
    assert repair(messages, format=form).messages is messages


@spec("HISTORY-8")
@pytest.mark.parametrize("form", FORMATS)
@searched
@given(seed=seeds)
def test_repairing_commutes_with_appending(form: str, seed: int) -> None:
    messages = broken(form, Random(seed))
    following = prompt(form)
    stored = repair(messages, format=form)
    later = repair([*stored.messages, following], format=form, system=stored.system)
    assert later.messages == repair([*messages, following], format=form).messages


@spec("HISTORY-5")
@pytest.mark.parametrize("form", FORMATS)
@searched
@given(seed=seeds)
def test_a_message_without_a_needed_change_is_the_same_object(form: str, seed: int) -> None:
    messages = broken(form, Random(seed))
    done = repair(messages, format=form)
    kept = {id(message) for message in done.messages}
    changed = {edit.at for edit in done.edits}
    touched = [at for at, message in enumerate(messages) if id(message) not in kept]
    assert len(touched) <= 3 * len(changed) + 3


@spec("HISTORY-1")
@pytest.mark.parametrize("form", FORMATS)
def test_independent_validators_accept_repaired_histories(form: str) -> None:
    judges = installed(form)
    if not judges:
        pytest.skip(f"no validator for {form} is installed (mistral-common, langgraph, an SDK)")
    refused: list[Any] = []
    for seed in range(tried(60)):
        messages = repair(broken(form, Random(seed)), format=form).messages
        refused += [
            (name, seed, word) for name, judge in judges.items() if messages and (word := judge(messages))
        ]
    assert refused == []


def test_every_profile_repairs_every_format() -> None:
    for name in PROFILES:
        for form in FORMATS:
            done = repair(broken(form, Random(7)), format=form, profile=name)
            assert repair(done.messages, format=form, profile=name, system=done.system).edits == ()


def test_an_empty_history_needs_no_repair() -> None:
    nothing: list[Any] = []
    assert repair(nothing).messages is nothing


def test_pydantic_ais_own_mapping_is_accepted_by_every_wire_format() -> None:
    """Its messages, mapped to a provider's by its own model classes, are checked by that provider's rules."""
    wires = pydantic_ai_wires()
    if not wires:
        pytest.skip("pydantic-ai with openai or anthropic is not installed")
    for seed in range(tried(60)):
        messages = repair(broken("pydantic-ai", Random(seed)), format="pydantic-ai").messages
        for form, wire in wires.items():
            assert refusals(form, wire([*messages, prompt("pydantic-ai")])) == []


def test_text_after_the_last_results_does_not_end_a_loop_that_lost_its_thinking() -> None:
    loop = [user("q"), response(use("a")), user([result("a")])]
    for more in ([], [user("w")], [user("w"), user("v")]):
        assert repair([*loop, *more], thinking=True).advice.thinking is False
    assert repair([*loop, response(text("a")), user("w")], thinking=True).advice.thinking is None
