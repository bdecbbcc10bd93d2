from __future__ import annotations

from random import Random

import pytest

from midstream.core.formats.named import format_named
from midstream.history import repair
from tests.core.repair.histories import valid


@pytest.mark.parametrize("seed", range(20))
def test_a_message_survives_being_read_and_written(seed: int) -> None:
    form = format_named("bedrock")
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
