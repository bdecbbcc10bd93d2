from __future__ import annotations

from random import Random
from typing import Any

import pytest

from midstream.history.codecs.codec_spec import Role
from midstream.history.codecs.format_registry import find_format
from midstream.history.codecs.langchain_codec import LangChain
from midstream.history.operations import repair
from tests.history.repair.format_histories import valid


@pytest.mark.parametrize("seed", range(20))
def test_a_message_survives_parsing_and_building(seed: int) -> None:
    form = find_format("langchain")
    for message in valid("langchain", Random(seed)):
        turn = form.parse(message, 0)
        assert turn.source is message
        assert form.build(turn) == message


@pytest.mark.parametrize(
    "message",
    [
        {"type": "human", "content": "hi", "id": "1"},
        {"role": "user", "content": "hi"},
        {"lc": 1, "type": "constructor", "id": ["langchain", "HumanMessage"], "kwargs": {"content": "hi"}},
        {
            "type": "ai",
            "content": [{"type": "text", "text": "a"}],
            "tool_calls": [],
            "response_metadata": {"m": 1},
        },
    ],
)
def test_every_notation_of_a_message_survives(message: dict[str, object]) -> None:
    form = find_format("langchain")
    assert form.build(form.parse(message, 0)) == message


def test_blocks_that_mirror_a_call_get_its_new_id() -> None:
    form = find_format("langchain")
    content = [{"type": "text", "text": "a"}, {"type": "tool_use", "id": "x", "name": "f", "input": {}}]
    call = {"name": "f", "args": {}, "id": "x", "type": "tool_call"}
    turn = form.parse({"type": "ai", "data": {"content": content, "tool_calls": [call]}}, 0)
    form.rename(turn.parts[1], "y")
    data = form.build(turn)["data"]
    assert [block.get("id") for block in data["content"]] == [None, "y"]
    assert data["tool_calls"][0]["id"] == "y"


def test_data_that_is_no_object_is_the_content() -> None:
    history = [
        {"type": "human", "data": "q"},
        {"type": "ai", "data": {"content": "", "tool_calls": [{"name": "run", "args": {}, "id": "a"}]}},
        {"type": "tool", "data": True},
    ]
    done = repair(history, format="langchain")
    assert done.messages[0] == {"type": "human", "data": {"content": "q"}}
    assert done.messages[2] == {"type": "tool", "data": {"content": "true", "tool_call_id": "a"}}
    assert repair(done.messages, format="langchain").messages is done.messages


def test_a_call_listed_only_in_the_content_keeps_its_order() -> None:
    def use(call_id: str, name: str) -> dict[str, Any]:
        return {"type": "tool_use", "id": call_id, "name": name, "input": {}}

    listed: list[Any] = [{"name": name, "args": {}, "id": name, "type": "tool_call"} for name in ("a", "c")]
    content = [use("old", "a"), use("b", "b"), use("c", "c")]
    turn = LangChain().parse({"type": "ai", "content": content, "tool_calls": listed}, 0)
    assert [part.id for part in turn.parts] == ["a", "b", "c"]


@pytest.mark.parametrize("path", [None, [], [[]], [{}], ["langchain", "schema", "messages", "AIMessage"]])
def test_a_dumped_message_is_parsed_for_any_value_of_its_path(path: object) -> None:
    dumped = {"lc": 1, "type": "constructor", "id": path, "kwargs": {"type": "ai", "content": "x"}}
    role = LangChain().parse(dumped, 0).role
    assert role is (Role.OTHER if path in ([[]], [{}]) else Role.ASSISTANT)
