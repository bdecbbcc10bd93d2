"""Repaired histories in the AI SDK: its schema, its own checks, and the prompt of its mock model."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

import midstream.history.operations
from tests.oracles.accidents import drop_result
from tests.oracles.ai_sdk import lacking, validate
from tests.oracles.measures import broken
from tests.oracles.projection import as_chat
from tests.oracles.scripts import WRITERS, valid
from tests.oracles.verdicts import with_prompt
from tests.search import tried

QUESTIONS = tried(40)
"""Histories of each kind and format; all of one format are validated in one node process."""

pytestmark = pytest.mark.skipif(bool(lacking()), reason=lacking() or "it is all here")


def chat_with_prompt(form: str, messages: list[Any]) -> list[dict[str, Any]]:
    return as_chat(form, with_prompt(form, messages))


@pytest.mark.parametrize("form", WRITERS)
def test_the_ai_sdk_accepts_valid_and_repaired_histories_and_refuses_broken_ones(form: str) -> None:
    cases = [broken(form, Random(f"{form}/ai-sdk/{number}")) for number in range(QUESTIONS)]
    repaired = [_repair(form, messages) for _, messages, _ in cases]
    whole = [valid(form, Random(f"{form}/ai-sdk/valid/{number}")) for number in range(QUESTIONS)]
    lacking_results = []
    for number in range(QUESTIONS):
        chance = Random(f"{form}/ai-sdk/broken/{number}")
        messages = valid(form, chance)
        drop_result(form, messages, chance)
        lacking_results.append(messages)
    asked = [chat_with_prompt(form, messages) for messages in [*repaired, *whole, *lacking_results]]
    verdicts = validate(asked)
    of_repaired = verdicts[:QUESTIONS]
    refused = [
        (n, how, verdict)
        for n, ((_, _, how), verdict) in enumerate(zip(cases, of_repaired, strict=True))
        if verdict
    ]
    assert refused == []
    assert [verdict for verdict in verdicts[QUESTIONS : 2 * QUESTIONS] if verdict] == []
    raw = verdicts[2 * QUESTIONS :]
    was_broken = [_repair(form, messages) is not messages for messages in lacking_results]
    assert [bool(verdict) for verdict in raw] == was_broken
    assert any(was_broken)
    assert all("MissingToolResultsError" in verdict[0] for verdict in raw if verdict)


def _repair(form: str, messages: list[Any]) -> list[Any]:
    return midstream.history.operations.repair_by_name(messages, format=form).messages


def test_the_ai_sdk_refuses_an_unknown_role_and_an_unknown_result() -> None:
    user = {"role": "user", "content": "k1z"}
    typo = {"role": "human", "content": "k2z"}
    call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    null = {"role": "tool", "tool_call_id": "c1", "content": None}
    verdicts = validate([[user], [user, typo], [user, asked, null, user]])
    assert verdicts[0] == []
    assert [verdict[0].partition(":")[0] for verdict in verdicts[1:]] == ["message 1", "message 2"]
