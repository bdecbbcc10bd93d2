"""Roles: inferred for a message with a role unknown to its provider."""

from __future__ import annotations

from typing import Any

import pytest

from midstream.history.codecs.format_registry import find_format
from midstream.history.operations import repair_by_name
from midstream.history.repair.roles import with_known_role

CALLS = [{"id": "c1", "type": "function", "function": {"name": "t", "arguments": "{}"}}]


@pytest.mark.parametrize(
    ("form", "message", "role"),
    [
        ("openai-chat", {"role": "users", "content": None, "tool_calls": CALLS}, "assistant"),
        ("openai-chat", {"role": None, "tool_call_id": "c1", "content": "x"}, "tool"),
        ("openai-chat", {"role": "Assistant", "content": "x"}, "assistant"),
        ("openai-chat", {"content": "x"}, "user"),
        ("openai-chat", {"role": "developer", "content": None, "tool_calls": CALLS}, "assistant"),
        ("openai-chat", {"role": "function", "tool_call_id": "c1", "content": "x"}, "tool"),
        ("anthropic", {"role": "system", "content": [{"type": "thinking", "thinking": "x"}]}, "assistant"),
        ("anthropic", {"role": "ai", "content": [{"type": "tool_result", "tool_use_id": "c1"}]}, "user"),
        ("anthropic", {"role": [], "content": [{"type": "thinking", "thinking": "x"}]}, "assistant"),
        ("gemini", {"role": "Assistant", "parts": [{"functionResponse": {"name": "t"}}]}, "user"),
        ("gemini", {"role": "tool", "parts": [{"functionCall": {"name": "t"}}]}, "model"),
        ("bedrock", {"role": "SYSTEM", "content": [{"text": "x"}]}, "system"),
    ],
)
def test_the_role_is_inferred_from_keys_that_only_one_side_uses(
    form: str, message: dict[str, Any], role: str
) -> None:
    assert with_known_role(message, find_format(form).spec)["role"] == role


@pytest.mark.parametrize(
    ("item", "kind"),
    [
        ({"call_id": "c1", "output": "x"}, "function_call_output"),
        ({"call_id": "c1", "name": "t", "arguments": "{}"}, "function_call"),
        ({"id": "rs_1", "summary": []}, "reasoning"),
        ({"weird": 1}, "message"),
    ],
)
def test_an_item_without_a_type_gets_the_type_of_its_keys(item: dict[str, Any], kind: str) -> None:
    assert with_known_role(item, find_format("openai-responses").spec)["type"] == kind


def test_a_valid_message_is_the_same_object() -> None:
    for form in ("anthropic", "openai-chat", "langchain"):
        message = {"role": "user", "content": "x"}
        assert with_known_role(message, find_format(form).spec) is message


@pytest.mark.parametrize("kind", [True, None, [], "", "x"])
def test_a_message_dumped_by_langchain_is_a_constructor_whatever_its_type(kind: object) -> None:
    path = ["langchain", "schema", "messages", "AIMessage"]
    dumped = {"lc": 1, "type": kind, "id": path, "kwargs": {"type": "ai", "content": "x"}}
    assert with_known_role(dumped, find_format("langchain").spec) == {**dumped, "type": "constructor"}


def test_a_part_outside_a_list_decides_the_role_in_the_first_repair() -> None:
    once = repair_by_name([{"content": {"functionCall": None}, "tool_calls": {"a": 1}}], format="bedrock")
    again = repair_by_name(once.messages, format="bedrock")
    assert again.edits == ()
