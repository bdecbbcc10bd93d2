from __future__ import annotations

from random import Random

import pytest

from midstream.history.codecs.bedrock_codec import Bedrock
from midstream.history.codecs.codec_spec import PartKind
from midstream.history.codecs.format_registry import find_format
from midstream.history.operations import repair
from tests.history.repair.histories import valid


@pytest.mark.parametrize("seed", range(20))
def test_a_message_survives_being_read_and_written(seed: int) -> None:
    form = find_format("bedrock")
    for message in valid("bedrock", Random(seed)):
        turn = form.parse(message, 0)
        assert turn.source is message
        assert form.build(turn) == message


def test_a_null_signature_goes_where_none_is_asked_for() -> None:
    thought = {"reasoningContent": {"reasoningText": {"text": "hm", "signature": None}}}
    history = [
        {"role": "user", "content": [{"text": "q"}]},
        {"role": "assistant", "content": [thought, {"text": "a"}]},
    ]
    done = repair(history, format="bedrock", profile="bedrock-mistral")
    assert done.messages[1]["content"][0] == {"reasoningContent": {"reasoningText": {"text": "hm"}}}
    assert [edit.code for edit in done.edits] == ["content-shape"]


def test_a_block_that_holds_several_things_is_several_and_one_that_holds_none_is_none() -> None:
    both = {"text": "a", "toolUse": {"toolUseId": "c", "name": "run", "input": {}}}
    turn = Bedrock().parse({"role": "assistant", "content": [both, {"toolUse": None}]}, 0)
    assert [(part.kind, part.body) for part in turn.parts] == [
        (PartKind.TEXT, "a"),
        (PartKind.CALL, {}),
        (PartKind.TEXT, ""),
    ]


def test_anthropics_text_blocks_are_read_and_reasoning_that_is_a_text_is_one() -> None:
    blocks = [{"type": "text", "text": "a"}, {"reasoningContent": {"reasoningText": "hm"}}]
    text, thought = Bedrock().parse({"role": "assistant", "content": blocks}, 0).parts
    assert (text.raw, thought.raw) == (
        {"text": "a"},
        {"reasoningContent": {"reasoningText": {"text": "hm"}}},
    )


def test_a_result_piece_that_holds_nothing_goes() -> None:
    result = {"toolResult": {"toolUseId": "c", "content": [{}], "status": "done"}}
    (part,) = Bedrock().parse({"role": "user", "content": [result]}, 0).parts
    assert Bedrock().tidy(part) == "empty-result"
    assert part.raw == {"toolResult": {"toolUseId": "c", "content": [{"text": "(no output)"}]}}


def test_a_content_that_is_one_block_of_several_things_is_taken_apart_too() -> None:
    turn = Bedrock().parse({"role": "user", "content": {"toolUse": None, "text": "a"}}, 0)
    assert [(part.kind, part.body) for part in turn.parts] == [(PartKind.TEXT, ""), (PartKind.TEXT, "a")]
