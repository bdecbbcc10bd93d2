"""A message shows its format, or none; its surroundings are only a hint."""

from __future__ import annotations

from typing import Any

import pytest

from midstream.doctor.shapes import at, format_of, resolve_format, shape_of, with_value
from midstream.errors import UnreadableHistoryError, UsageError
from midstream.history.codecs.recognition import recognize_by_marks

USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("message", "form"),
    [
        (USER, ""),
        ({"role": "system", "content": "hi"}, ""),
        (42, ""),
        ({"role": "assistant", "content": [{"type": "text", "text": "hi"}]}, ""),
        ({"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}, "anthropic"),
        ({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}, "anthropic"),
        ({"role": "tool", "tool_call_id": "a", "content": "x"}, "openai-chat"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "openai-chat"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "openai-chat"),
        ({"role": "user", "content": [{"type": "input_text", "text": "x"}]}, "openai-responses"),
        ({"type": "function_call", "call_id": "a"}, "openai-responses"),
        ({"type": "message", "role": "user", "content": "x"}, "openai-responses"),
        ({"role": "model", "parts": [{"text": "x"}]}, "gemini"),
        ({"parts": [{"text": "x"}]}, "gemini"),
        ({"kind": "request", "parts": []}, "pydantic-ai"),
        ({"role": "user", "content": [{"text": "x"}]}, "bedrock"),
        ({"type": "human", "content": "x"}, "langchain"),
        ({"type": "ai", "data": {"content": "x"}}, "langchain"),
        ({"lc": 1, "type": "constructor", "id": ["HumanMessage"], "kwargs": {}}, "langchain"),
        ({"role": "assistant", "content": [{"type": "thinking", "thinking": [{}]}]}, "mistral"),
    ],
)
def test_the_format_of_a_message_is_recognized(message: object, form: str) -> None:
    assert recognize_by_marks(message) == form


@pytest.mark.parametrize(
    ("document", "path", "form"),
    [
        ([USER], (), "openai-chat"),
        ({"messages": [USER]}, ("messages",), "openai-chat"),
        ({"system": "s", "messages": [USER]}, ("messages",), "anthropic"),
        ({"input": [USER]}, ("input",), "openai-responses"),
        ({"values": {"messages": [USER]}}, ("values", "messages"), "openai-chat"),
        ({"body": {"contents": [{"parts": []}]}}, ("body", "contents"), "gemini"),
    ],
)
def test_messages_are_found_where_programs_store_them(
    document: object, path: tuple[str, ...], form: str
) -> None:
    shape = shape_of(document)
    assert shape is not None
    assert (shape.path, shape.format) == (path, form)


@pytest.mark.parametrize("document", [None, 1, "text", {}, {"messages": "no"}, [1, 2, 3], {"input": "text"}])
def test_a_document_without_messages_has_no_shape(document: object) -> None:
    assert shape_of(document) is None


def test_an_invalid_entry_does_not_hide_the_other_messages() -> None:
    assert shape_of([USER, 42, USER]) is not None


def test_two_formats_at_once_are_reported_with_their_places() -> None:
    mixed = [{"role": "model", "parts": []}, {"kind": "request", "parts": []}]
    with pytest.raises(
        UnreadableHistoryError, match=r"gemini \(first: message 0\), pydantic-ai \(first: message 1\)"
    ):
        format_of(mixed)
    assert format_of(mixed, "gemini") == "gemini"


def test_format_names_are_accepted_in_common_spellings() -> None:
    assert [resolve_format(name) for name in ("Claude_Code", "google", "chat")] == [
        "claude-code",
        "gemini",
        "openai-chat",
    ]
    with pytest.raises(UsageError, match="unknown format"):
        resolve_format("klingon")


def test_a_value_is_replaced_in_its_place_and_the_rest_is_unchanged() -> None:
    document = {"a": {"messages": [1]}, "b": [2]}
    changed: Any = with_value(document, ("a", "messages"), [3])
    assert (changed, document["a"]) == ({"a": {"messages": [3]}, "b": [2]}, {"messages": [1]})
    assert changed["b"] is document["b"]
    assert at(document, ("a", "none", "deeper")) is None
