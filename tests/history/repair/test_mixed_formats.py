from __future__ import annotations

from typing import Any

import pytest

from midstream.history.codecs.format_registry import find_format
from midstream.history.operations import repair_by_name as repair
from midstream.history.repair.mixed_formats import foreign_words, shape_of
from tests.history.repair.reported import chat_call, chat_response, response, result, text, tool, use, user

CHAT = [chat_response(chat_call("a", '{"x": "m1x"}')), tool("a", "m2x")]
ANTHROPIC = [response(use("a", {"x": "m1x"})), user([result("a", "m2x")])]
GEMINI = [
    {"role": "model", "parts": [{"functionCall": {"name": "run", "args": {"x": "m1x"}}}]},
    {"role": "user", "parts": [{"functionResponse": {"name": "run", "response": {"result": "m2x"}}}]},
]
CONVERSE = [
    {"role": "assistant", "content": [{"toolUse": {"toolUseId": "a", "name": "run", "input": {"x": "m1x"}}}]},
    {"role": "user", "content": [{"toolResult": {"toolUseId": "a", "content": [{"text": "m2x"}]}}]},
]
ITEMS = [
    {"type": "function_call", "call_id": "a", "name": "run", "arguments": '{"x": "m1x"}'},
    {"type": "function_call_output", "call_id": "a", "output": "m2x"},
]
SHAPES = {
    "openai-chat": CHAT,
    "anthropic": ANTHROPIC,
    "gemini": GEMINI,
    "bedrock": CONVERSE,
    "openai-responses": ITEMS,
}


@pytest.mark.parametrize("form", SHAPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_in_the_format_of_another_provider_is_rewritten(form: str, shape: str) -> None:
    first = {"role": "user", "parts": [{"text": "q"}]} if form == "gemini" else user("q")
    done = repair([first, *SHAPES[shape]], format=form)
    found = {edit.code for edit in done.edits}
    assert ("foreign-message" in found) == (shape != form)
    assert not found & {"dangling-call", "orphan-result", "empty-message"}
    again = repair(done.messages, format=form)
    assert again.messages is done.messages
    for word in ("m1x", "m2x"):
        assert word in str(done.messages)


@pytest.mark.parametrize("form", SHAPES)
def test_a_format_never_classifies_its_own_messages_as_foreign(form: str) -> None:
    assert [shape_of(message, find_format(form)) for message in SHAPES[form]] == [None, None]


def test_results_in_anthropics_shape_are_valid_in_langchain() -> None:
    message = user([{"type": "tool_result", "tool_use_id": "a", "content": "w"}])
    assert shape_of(message, find_format("langchain")) is None


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user", "text": "m1x"}, "m1x"),
        ({"said": "m1x"}, "m1x"),
        ({"role": "user", "a": "m1x", "b": ["m2x"]}, '{"a": "m1x", "b": ["m2x"]}'),
        ({"role": "user", "content": "w", "text": "m1x"}, ""),
        ({"role": "user", "content": "", "id": "msg_1", "timestamp": "2026"}, ""),
    ],
)
def test_text_under_an_unknown_key_is_kept(message: dict[str, Any], words: str) -> None:
    assert foreign_words(message, find_format("anthropic")) == words


def test_kept_text_has_the_role_of_its_message() -> None:
    done = repair([{"role": "user", "text": "m1x"}, {"role": "assistant", "text": "m2x"}], format="anthropic")
    assert done.messages == [user("m1x"), {"role": "assistant", "content": "m2x"}]
    assert [edit.code for edit in done.edits] == ["content-shape", "content-shape"]
    assert repair([user([text("q")])]).edits == ()
