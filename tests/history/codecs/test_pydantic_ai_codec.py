from __future__ import annotations

from random import Random

import pytest

from midstream.history.codecs.format_registry import find_format
from tests.history.repair.format_histories import valid


@pytest.mark.parametrize("seed", range(20))
def test_a_message_survives_parsing_and_building(seed: int) -> None:
    form = find_format("pydantic-ai")
    for message in valid("pydantic-ai", Random(seed)):
        turn = form.parse(message, 0)
        assert turn.source is message
        assert form.build(turn) == message


def test_a_tool_return_without_content_gets_some() -> None:
    form = find_format("pydantic-ai")
    gone = {"part_kind": "tool-return", "tool_name": "t", "tool_call_id": "c"}
    part = form.parse({"kind": "request", "parts": [gone]}, 0).parts[0]
    assert form.tidy(part) == "empty-result"
    assert part.raw == {**gone, "content": "(no output)"}
    null = form.parse({"kind": "request", "parts": [{**gone, "content": None}]}, 0).parts[0]
    assert form.tidy(null) is None
