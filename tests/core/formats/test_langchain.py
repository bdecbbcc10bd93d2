from __future__ import annotations

from random import Random

import pytest

from midstream.core.formats.named import format_named
from tests.core.repair.histories import valid


@pytest.mark.parametrize("seed", range(20))
def test_a_message_survives_being_read_and_written(seed: int) -> None:
    form = format_named("langchain")
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
def test_every_way_to_write_a_message_survives(message: dict[str, object]) -> None:
    form = format_named("langchain")
    assert form.build(form.parse(message, 0)) == message


def test_blocks_that_mirror_a_call_take_its_new_id() -> None:
    form = format_named("langchain")
    content = [{"type": "text", "text": "a"}, {"type": "tool_use", "id": "x", "name": "f", "input": {}}]
    call = {"name": "f", "args": {}, "id": "x", "type": "tool_call"}
    turn = form.parse({"type": "ai", "data": {"content": content, "tool_calls": [call]}}, 0)
    form.rename(turn.parts[1], "y")
    data = form.build(turn)["data"]
    assert [block.get("id") for block in data["content"]] == [None, "y"]
    assert data["tool_calls"][0]["id"] == "y"
