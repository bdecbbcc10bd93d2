from __future__ import annotations

from random import Random

import pytest

from midstream.history.codecs.format_registry import find_format
from tests.history.repair.format_histories import valid


@pytest.mark.parametrize("seed", range(20))
def test_a_message_survives_parsing_and_building(seed: int) -> None:
    form = find_format("mistral")
    for message in valid("mistral", Random(seed)):
        turn = form.parse(message, 0)
        assert turn.source is message
        assert form.build(turn) == message


def test_arguments_may_be_objects() -> None:
    form = find_format("mistral")
    call = {"id": "c", "function": {"name": "f", "arguments": {"a": 1}}}
    turn = form.parse({"role": "assistant", "content": "", "tool_calls": [call]}, 0)
    assert form.bad_arguments(turn.parts[0]) is None
