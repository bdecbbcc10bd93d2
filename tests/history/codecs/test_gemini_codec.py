from __future__ import annotations

from random import Random

import pytest

from midstream.history.codecs.codec_spec import PartKind
from midstream.history.codecs.format_registry import find_format
from midstream.history.codecs.gemini_codec import Gemini
from tests.history.repair.format_histories import valid


@pytest.mark.parametrize("seed", range(20))
def test_a_message_survives_parsing_and_building(seed: int) -> None:
    form = find_format("gemini")
    for message in valid("gemini", Random(seed)):
        turn = form.parse(message, 0)
        assert turn.source is message
        assert form.build(turn) == message


def test_signatures_and_snake_case_survive() -> None:
    form = find_format("gemini")
    call = {"function_call": {"name": "f", "args": {}}, "thought_signature": "c2ln"}
    message = {"role": "model", "parts": [call, {"executableCode": {"code": "1"}}]}
    turn = form.parse(message, 0)
    assert turn.parts[0].signature == "c2ln"
    assert form.build(turn) == message


def test_a_part_of_several_kinds_becomes_several_parts() -> None:
    both = {"text": "a", "functionCall": {"name": "run", "args": {}}, "thoughtSignature": "s"}
    turn = Gemini().parse({"role": "model", "parts": [both]}, 0)
    assert [part.kind for part in turn.parts] == [PartKind.TEXT, PartKind.CALL]
    assert all(part.is_new for part in turn.parts)


def test_empty_thoughts_and_attachments_are_parsed() -> None:
    parts = [
        {"thought": True},
        {"thought": True, "thoughtSignature": "s"},
        {"inlineData": {"mimeType": "a/b"}},
    ]
    nothing, signed, file = Gemini().parse({"role": "model", "parts": parts}, 0).parts
    assert (nothing.kind, nothing.name) == (PartKind.OPAQUE, "nothing")
    assert signed.raw == {"thought": True, "thoughtSignature": "s", "text": ""}
    assert (file.kind, file.body) == (PartKind.TEXT, '{"mimeType": "a/b"}')
