from __future__ import annotations

from random import Random

import pytest

from midstream.core.formats.named import format_named
from tests.core.repair.histories import valid


@pytest.mark.parametrize("seed", range(20))
def test_a_message_survives_being_read_and_written(seed: int) -> None:
    form = format_named("pydantic-ai")
    for message in valid("pydantic-ai", Random(seed)):
        turn = form.parse(message, 0)
        assert turn.source is message
        assert form.build(turn) == message
