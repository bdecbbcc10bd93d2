from __future__ import annotations

from typing import get_args, get_type_hints

import pytest

import midstream
from midstream.errors import HistoryRefusedError, InvalidHistoryError, UsageError
from midstream.history import profiles
from midstream.history.codecs import format_registry
from midstream.history.operations import FormatName, ProfileName, repair_by_name
from tests.history.repair.format_histories import FORMATS
from tests.history.repair.reported import response, result, thought, use, user

BROKEN = [user("q"), response(use("a")), user("w")]


def test_a_finding_has_the_position_and_the_rule() -> None:
    assert [(finding.code, finding.at, finding.rule) for finding in midstream.check(BROKEN)] == [
        ("dangling-call", 1, "Every tool call has a result, directly after it.")
    ]
    assert midstream.check(midstream.repair(BROKEN).messages) == []


def test_strict_raises_with_the_findings_and_changes_nothing() -> None:
    with pytest.raises(HistoryRefusedError, match="message 1: dangling-call") as refused:
        midstream.repair(BROKEN, mode="strict")
    assert list(refused.value.findings) == midstream.check(BROKEN)
    good = [user("q")]
    assert midstream.repair(good, mode="strict").messages is good


def test_thinking_is_advised_off_when_the_loop_lost_its_first_thought() -> None:
    history = [user("q"), response(use("a")), user([result("a")])]
    assert midstream.repair(history, thinking=True).advice.thinking is False
    assert midstream.repair(history, thinking=True).messages is history
    assert midstream.repair(history).advice.thinking is None
    thoughtful = [user("q"), response(thought(), use("a")), user([result("a")])]
    assert midstream.repair(thoughtful, thinking=True).advice.thinking is None


def test_bedrock_is_advised_to_declare_the_tools() -> None:
    call = {"toolUse": {"toolUseId": "a", "name": "run", "input": {}}}
    answer = {"toolResult": {"toolUseId": "a", "content": [{"text": "x"}]}}
    done = midstream.repair([user([{"text": "q"}]), response(call), user([answer])], format="bedrock")
    assert done.advice.tools is True


def test_outcomes_given_by_the_caller_decide_the_text_for_the_model() -> None:
    done = midstream.repair(BROKEN, outcomes={"a": "denied"})
    assert done.messages[2]["content"][0]["content"] == "The user did not approve this tool call."


@pytest.mark.parametrize("outcome", ["deny", "not_started", "", 5])
def test_an_unknown_outcome_is_refused_and_does_not_become_the_text_of_a_result(outcome: object) -> None:
    with pytest.raises(
        UsageError, match=r"unknown outcome .* known: unknown, interrupted, denied, not-started"
    ):
        midstream.repair(BROKEN, outcomes={"a": outcome})  # type: ignore[dict-item]


@pytest.mark.parametrize("odd", [None, "hi", {}, (), 1])
def test_a_value_that_is_no_list_is_refused(odd: object) -> None:
    with pytest.raises(InvalidHistoryError, match="list of messages"):
        midstream.repair(odd)  # type: ignore[arg-type]
    with pytest.raises(InvalidHistoryError, match="list of messages"):
        midstream.convert(odd, source="anthropic", target="gemini")  # type: ignore[arg-type]


def test_formats_have_common_aliases() -> None:
    for name in (*FORMATS, "openai", "responses", "pydantic_ai", "google", "langgraph"):
        assert repair_by_name([], format=name).messages == []
    with pytest.raises(UsageError, match="openai-chat"):
        midstream.repair([], format="nobody")  # type: ignore[arg-type]


def test_the_literal_types_have_every_name_of_a_format_and_of_a_profile_and_no_other() -> None:
    assert sorted(get_args(FormatName)) == sorted({*format_registry.FORMATS, *format_registry._ALIASES})
    assert sorted(get_args(ProfileName)) == sorted({*profiles.PROFILES, *profiles._ALIASES})
    for function, parameters in (
        (midstream.repair, {"format": FormatName | None, "profile": ProfileName | None}),
        (midstream.check, {"format": FormatName | None, "profile": ProfileName | None}),
        (midstream.convert, {"source": FormatName, "target": FormatName}),
    ):
        hints = get_type_hints(function)
        assert {name: hints[name] for name in parameters} == parameters
    for name in get_args(FormatName):
        assert format_registry.find_format(name).name in format_registry.FORMATS
    for name in get_args(ProfileName):
        assert profiles.find_profile(name).name in profiles.PROFILES
