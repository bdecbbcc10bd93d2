from __future__ import annotations

from random import Random

import pytest

from midstream.history.codecs.format_registry import find_format
from midstream.history.operations import repair
from tests.history.repair.format_histories import valid


@pytest.mark.parametrize("seed", range(20))
def test_a_message_survives_parsing_and_building(seed: int) -> None:
    form = find_format("openai-responses")
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
    form = find_format("openai-responses")
    assert form.build(form.parse(item, 0)) == item


def test_a_response_of_one_foreign_chunk_without_an_id_becomes_a_plain_text() -> None:
    chunk = {"type": "input_text", "text": "a"}
    item: dict[str, object] = {"type": "message", "role": "assistant", "content": [chunk]}
    history = [{"role": "user", "content": "q"}, item]
    done = repair(history, format="openai-responses")
    assert done.messages[1] == {"type": "message", "role": "assistant", "content": "a"}
    item["id"] = "msg_1"
    done = repair(history, format="openai-responses")
    assert done.messages[1]["content"] == [{"type": "output_text", "text": "a", "annotations": []}]


def test_empty_text_stays_text_when_its_role_is_repaired() -> None:
    done = repair([{"role": "critic", "content": ""}], format="openai-responses")
    assert done.messages == [{"role": "user", "content": ""}]
    assert repair(done.messages, format="openai-responses").edits == ()
