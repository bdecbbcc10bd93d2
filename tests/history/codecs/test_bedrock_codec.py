from __future__ import annotations

from random import Random

import pytest

from midstream.history.codecs.bedrock_codec import Bedrock
from midstream.history.codecs.codec_spec import PartKind
from midstream.history.codecs.format_registry import find_format
from midstream.history.operations import repair
from tests.history.repair.format_histories import valid


@pytest.mark.parametrize("seed", range(20))
def test_a_message_survives_parsing_and_building(seed: int) -> None:
    form = find_format("bedrock")
    for message in valid("bedrock", Random(seed)):
        turn = form.parse(message, 0)
        assert turn.source is message
        assert form.build(turn) == message


def test_a_null_signature_is_removed_where_none_is_required() -> None:
    thought = {"reasoningContent": {"reasoningText": {"text": "hm", "signature": None}}}
    history = [
        {"role": "user", "content": [{"text": "q"}]},
        {"role": "assistant", "content": [thought, {"text": "a"}]},
    ]
    done = repair(history, format="bedrock", profile="bedrock-mistral")
    assert done.messages[1]["content"][0] == {"reasoningContent": {"reasoningText": {"text": "hm"}}}
    assert [edit.code for edit in done.edits] == ["content-shape"]


def test_a_block_of_several_kinds_becomes_several_parts_and_an_empty_one_becomes_text() -> None:
    both = {"text": "a", "toolUse": {"toolUseId": "c", "name": "run", "input": {}}}
    turn = Bedrock().parse({"role": "assistant", "content": [both, {"toolUse": None}]}, 0)
    assert [(part.kind, part.body) for part in turn.parts] == [
        (PartKind.TEXT, "a"),
        (PartKind.CALL, {}),
        (PartKind.TEXT, ""),
    ]


def test_text_blocks_of_anthropic_and_plain_reasoning_texts_are_parsed() -> None:
    blocks = [{"type": "text", "text": "a"}, {"reasoningContent": {"reasoningText": "hm"}}]
    text, thought = Bedrock().parse({"role": "assistant", "content": blocks}, 0).parts
    assert (text.raw, thought.raw) == (
        {"text": "a"},
        {"reasoningContent": {"reasoningText": {"text": "hm"}}},
    )


def test_an_empty_piece_of_a_result_is_replaced() -> None:
    result = {"toolResult": {"toolUseId": "c", "content": [{}], "status": "done"}}
    (part,) = Bedrock().parse({"role": "user", "content": [result]}, 0).parts
    assert Bedrock().tidy(part) == "empty-result"
    assert part.raw == {"toolResult": {"toolUseId": "c", "content": [{"text": "(no output)"}]}}


def test_a_content_that_is_one_block_of_several_kinds_is_split_too() -> None:
    turn = Bedrock().parse({"role": "user", "content": {"toolUse": None, "text": "a"}}, 0)
    assert [(part.kind, part.body) for part in turn.parts] == [(PartKind.TEXT, ""), (PartKind.TEXT, "a")]
