"""Changed messages are written to their lines; unchanged ones keep their bytes; others move as little as possible."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.doctor.file_reading import lines_of
from midstream.doctor.jsonl_formats import MessageLine, Messages
from midstream.doctor.rewriting import Patch, _rising, encode, gather, mend
from midstream.doctor.shapes import Json
from tests.doctor.files import call_response, line, text_response


def test_a_patch_replaces_omits_and_inserts(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"1\n2\n3\n4")
    patch = Patch({2: b"two", 3: None}, {0: [b"zero"], 4: [b"five"]})
    assert b"".join(patch.apply(lines_of(path))) == b"zero\n1\ntwo\n4\nfive\n"
    assert Patch().is_empty
    assert not patch.is_empty


def test_lines_after_a_change_get_their_new_parent_and_those_before_keep_theirs(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b'{"parentUuid":"a"}\n{"parentUuid":"a"}\n{"parentUuid":"b"}\n')
    patch = Patch(parents={"a": (1, "new")})
    written = patch.apply(lines_of(path), lambda value, parent: {**value, "parentUuid": parent})
    assert list(written) == [b'{"parentUuid":"a"}\n', b'{"parentUuid":"new"}\n', b'{"parentUuid":"b"}\n']


def test_a_moved_message_moves_its_line_and_the_others_stay() -> None:
    messages: list[Json] = [{"role": "user", "content": f"message number {at}"} for at in range(4)]
    entries = [MessageLine(at + 1, message, [message]) for at, message in enumerate(messages)]
    patch = Patch()
    mend(gather(entries), entries, [messages[0], messages[3], messages[1], messages[2]], Messages("x"), patch)
    assert (patch.replaced, patch.inserted) == ({4: None}, {1: [encode(messages[3])]})


def test_pieces_of_one_response_are_one_message_and_longer_states_replace_shorter() -> None:
    lines = [
        line(1, 0, text_response("m", "He")),
        line(2, 1, text_response("m", "Hello")),
        line(3, 2, call_response("m", "a")),
        line(4, 3, call_response("m", "a")),
    ]
    found = gather([MessageLine(at, each, [each["message"]], None, "m") for at, each in enumerate(lines, 1)])
    assert [block["type"] for block in found.messages[0]["content"]] == ["text", "tool_use"]
    assert found.messages[0]["content"][0]["text"] == "Hello"
    assert found.folded == 2


@given(st.permutations(range(8)))
def test_the_unmoved_lines_are_the_longest_increasing_sequence(numbers: list[int]) -> None:
    kept = [numbers[place] for place in sorted(_rising(numbers))]
    assert kept == sorted(kept)
    assert len(kept) == _longest(numbers)


def _longest(numbers: list[int]) -> int:
    best = [0] * len(numbers)
    for at, number in enumerate(numbers):
        best[at] = 1 + max((best[before] for before in range(at) if numbers[before] < number), default=0)
    return max(best, default=0)


def test_json_is_written_readably_and_never_invalid() -> None:
    assert encode({"ü": "half \ud83d"}) == rb'{"\u00fc":"half \ud83d"}'
    assert encode({"ü": 1}) == '{"ü":1}'.encode()
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode(float("nan"))
