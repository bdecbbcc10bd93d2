"""Repairs before the AI SDK: its schema, its own checks, and the prompt that its mock model receives."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

import midstream.history.operations
from tests.oracles.accidents import drop_result
from tests.oracles.ai_sdk import judged, lacking
from tests.oracles.measures import broken
from tests.oracles.projection import as_chat
from tests.oracles.scripts import WRITERS, valid
from tests.oracles.verdicts import with_prompt

QUESTIONS = 40
"""Histories a format; all of one format are asked in one node process."""

pytestmark = pytest.mark.skipif(bool(lacking()), reason=lacking() or "it is all here")


def shown(form: str, messages: list[Any]) -> list[dict[str, Any]]:
    return as_chat(form, with_prompt(form, messages))


@pytest.mark.parametrize("form", WRITERS)
def test_the_ai_sdk_takes_what_is_repaired_and_its_model_receives_every_word(form: str) -> None:
    cases = [broken(form, Random(f"{form}/ai-sdk/{number}")) for number in range(QUESTIONS)]
    repaired = [
        midstream.history.operations.repair_by_name(messages, format=form).messages
        for _, messages, _ in cases
    ]
    verdicts = judged([shown(form, messages) for messages in repaired])
    refused = [
        (n, how, said) for n, ((_, _, how), said) in enumerate(zip(cases, verdicts, strict=True)) if said
    ]
    assert refused == []


@pytest.mark.parametrize("form", WRITERS)
def test_the_ai_sdk_takes_valid_histories(form: str) -> None:
    histories = [valid(form, Random(f"{form}/ai-sdk/valid/{number}")) for number in range(QUESTIONS)]
    assert [said for said in judged([shown(form, messages) for messages in histories]) if said] == []


@pytest.mark.parametrize("form", WRITERS)
def test_the_ai_sdk_refuses_what_was_not_repaired(form: str) -> None:
    histories = []
    for number in range(QUESTIONS):
        chance = Random(f"{form}/ai-sdk/broken/{number}")
        messages = valid(form, chance)
        drop_result(form, messages, chance)
        histories.append(messages)
    raw = judged([shown(form, messages) for messages in histories])
    repaired = [
        midstream.history.operations.repair_by_name(messages, format=form).messages for messages in histories
    ]
    was_broken = [made is not messages for made, messages in zip(repaired, histories, strict=True)]
    assert [bool(said) for said in raw] == was_broken
    assert any(was_broken)
    assert all("MissingToolResultsError" in said[0] for said in raw if said)


def test_the_ai_sdk_refuses_a_role_and_a_result_it_does_not_know() -> None:
    user = {"role": "user", "content": "k1z"}
    typo = {"role": "human", "content": "k2z"}
    call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    null = {"role": "tool", "tool_call_id": "c1", "content": None}
    verdicts = judged([[user], [user, typo], [user, asked, null, user]])
    assert verdicts[0] == []
    assert [said[0].partition(":")[0] for said in verdicts[1:]] == ["message 1", "message 2"]
