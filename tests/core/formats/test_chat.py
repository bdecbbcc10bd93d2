from __future__ import annotations

from random import Random

import pytest

from midstream.core.formats.named import format_named
from tests.core.repair.histories import valid


@pytest.mark.parametrize("seed", range(20))
def test_a_message_survives_being_read_and_written(seed: int) -> None:
    form = format_named("openai-chat")
    for message in valid("openai-chat", Random(seed)):
        turn = form.parse(message, 0)
        assert turn.source is message
        assert form.build(turn) == message


def test_reasoning_and_refusals_survive() -> None:
    form = format_named("openai-chat")
    message = {"role": "assistant", "content": None, "refusal": "no", "reasoning_content": "hm", "name": "x"}
    assert form.build(form.parse(message, 0)) == message


def test_old_function_calls_survive() -> None:
    form = format_named("openai-chat")
    message = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    assert form.build(form.parse(message, 0)) == message
