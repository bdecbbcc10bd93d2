from __future__ import annotations

from random import Random

import pytest

from midstream.history.codecs.anthropic_codec import Anthropic
from midstream.history.codecs.codec_spec import PartKind
from midstream.history.codecs.format_registry import find_format
from tests.history.repair.format_histories import valid


@pytest.mark.parametrize("seed", range(20))
def test_a_message_survives_parsing_and_building(seed: int) -> None:
    form = find_format("anthropic")
    for message in valid("anthropic", Random(seed)):
        turn = form.parse(message, 0)
        assert turn.source is message
        content = message["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        assert form.build(turn) == {**message, "content": blocks}


def test_unknown_blocks_and_cache_markers_are_kept_unchanged() -> None:
    form = find_format("anthropic")
    blocks = [
        {"type": "new_thing", "x": [1]},
        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
    ]
    message = {"role": "user", "content": blocks, "id": "kept"}
    turn = form.parse(message, 0)
    assert form.build(turn) == message
    assert all(a is b for a, b in zip(form.build(turn)["content"], blocks, strict=True))


def test_a_block_without_a_type_is_classified_by_its_keys() -> None:
    blocks = [
        {"id": "a", "name": "run", "input": {}},
        {"tool_use_id": "a", "content": "x"},
        {"thinking": "hm", "signature": "s"},
        {"text": "w"},
        {"source": {"type": "url", "url": "u"}},
    ]
    kinds = [part.kind for part in Anthropic().parse({"role": "user", "content": blocks}, 0).parts]
    assert kinds == [PartKind.CALL, PartKind.RESULT, PartKind.THINKING, PartKind.TEXT, PartKind.MEDIA]
