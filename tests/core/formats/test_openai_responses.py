from __future__ import annotations

from random import Random

import pytest

from midstream.core.formats.named import format_named
from tests.core.repair.histories import valid


@pytest.mark.parametrize("seed", range(20))
def test_a_message_survives_being_read_and_written(seed: int) -> None:
    form = format_named("openai-responses")
    for message in valid("openai-responses", Random(seed)):
        turn = form.parse(message, 0)
        assert turn.source is message
        assert form.build(turn) == message


@pytest.mark.parametrize(
    "item",
    [
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "custom_tool_call", "call_id": "a", "name": "x", "input": "free"},
        {"type": "something_new", "x": 1},
        {
            "role": "user",
            "content": [{"type": "input_image", "image_url": "u"}, {"type": "input_text", "text": "a"}],
        },
    ],
)
def test_items_of_every_kind_survive(item: dict[str, object]) -> None:
    form = format_named("openai-responses")
    assert form.build(form.parse(item, 0)) == item
