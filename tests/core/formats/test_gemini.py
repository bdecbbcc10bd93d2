from __future__ import annotations

from random import Random

import pytest

from midstream.core.formats.named import format_named
from tests.core.repair.histories import valid


@pytest.mark.parametrize("seed", range(20))
def test_a_message_survives_being_read_and_written(seed: int) -> None:
    form = format_named("gemini")
    for message in valid("gemini", Random(seed)):
        turn = form.parse(message, 0)
        assert turn.source is message
        assert form.build(turn) == message


def test_signatures_and_snake_case_survive() -> None:
    form = format_named("gemini")
    call = {"function_call": {"name": "f", "args": {}}, "thought_signature": "c2ln"}
    message = {"role": "model", "parts": [call, {"executableCode": {"code": "1"}}]}
    turn = form.parse(message, 0)
    assert turn.parts[0].signature == "c2ln"
    assert form.build(turn) == message
