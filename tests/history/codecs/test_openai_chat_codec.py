from __future__ import annotations

from random import Random
from typing import Any

import pytest

from midstream.history.codecs.format_registry import find_format
from midstream.history.operations import repair
from tests.history.repair.format_histories import valid


@pytest.mark.parametrize("seed", range(20))
def test_a_message_survives_parsing_and_building(seed: int) -> None:
    form = find_format("openai-chat")
    for message in valid("openai-chat", Random(seed)):
        turn = form.parse(message, 0)
        assert turn.source is message
        assert form.build(turn) == message


def test_reasoning_and_refusals_survive() -> None:
    form = find_format("openai-chat")
    message = {"role": "assistant", "content": None, "refusal": "no", "reasoning_content": "hm", "name": "x"}
    assert form.build(form.parse(message, 0)) == message


def test_deprecated_function_calls_survive() -> None:
    form = find_format("openai-chat")
    message = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    assert form.build(form.parse(message, 0)) == message


def test_an_empty_list_of_calls_in_a_user_message_is_removed() -> None:
    done = repair([{"role": "user", "content": "q", "tool_calls": []}], format="openai-chat")
    assert done.messages == [{"role": "user", "content": "q"}]
    assert [edit.code for edit in done.edits] == ["empty-calls"]


def test_calls_in_a_user_message_make_it_a_response() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "t", "arguments": "{}"}}
    asked = {"role": "user", "content": "w", "tool_calls": [call]}
    history = [
        {"role": "user", "content": "q"},
        asked,
        {"role": "tool", "tool_call_id": "c1", "content": "r"},
    ]
    done = repair(history, format="openai-chat")
    assert done.messages == [history[0], {**asked, "role": "assistant"}, history[2]]
    assert [edit.code for edit in done.edits] == ["unknown-role"]


def test_a_call_of_unknown_type_becomes_a_function_call_also_where_the_type_is_optional() -> None:
    call = {"id": "A9vOOFPsp", "type": "{", "function": {"name": "run", "arguments": "{}"}}
    history: list[Any] = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "A9vOOFPsp", "content": "w"},
    ]
    assert repair(history, format="mistral").messages[1]["tool_calls"] == [{**call, "type": "function"}]
    del call["type"]
    assert repair(history, format="mistral").messages is history
