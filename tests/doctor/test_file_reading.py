"""The reading of bytes as lines and values, with the place of the first error."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.doctor.file_reading import document_in, head_of, line_at, lines_of, value_in
from midstream.errors import UnreadableHistoryError
from midstream.json_depth import DEPTH_MAX


def test_lines_keep_their_bytes_and_their_offsets(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\n  \n[2]\n{"cut')
    lines = list(lines_of(path))
    assert [(line.number, line.body, line.is_whole) for line in lines] == [
        (1, b'{"a": 1}\r\n', True),
        (4, b"[2]\n", True),
        (5, b'{"cut', False),
    ]
    assert [line_at(path, line.offset) for line in lines] == [line.body for line in lines]


def test_a_line_beyond_the_limit_has_no_body_and_the_next_one_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midstream.doctor.file_reading.LINE_BYTES_MAX", 10)
    path = tmp_path / "f"
    path.write_bytes(b"x" * 35 + b"\nshort\n" + b"y" * 12)
    assert [(line.number, line.body, line.offset) for line in lines_of(path)] == [
        (1, b"", 0),
        (2, b"short\n", 36),
        (3, b"", 42),
    ]


def test_json_that_only_stricter_readers_refuse_is_read() -> None:
    assert value_in(b'{"a": NaN, "b": -Infinity}') == ({"a": None, "b": None}, ("NaN", "-Infinity"))
    assert value_in(rb'"half \ud83d"').value == "half \ud83d"
    assert value_in(b"12345678901234567890123").value == 12345678901234567890123


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "cut-json"),
        (b'{"a": ', "cut-json"),
        (b'{"a": "b', "cut-json"),
        (b"{'a': 1}", "not-json"),
        (b'{"a": 1} {"b": 2}', "not-json"),
        (b'"\xff"', "not-json"),
        (b"9" * 5000 + b"x", "not-json"),
        (b"[" * 100_000, "too-deep"),
        (b"[" * (DEPTH_MAX + 1) + b"]" * (DEPTH_MAX + 1), "too-deep"),
        (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, "too-deep"),
        (b"[NaN," * 10_000 + b"1" + b"]" * 10_000, "too-deep"),
    ],
)
def test_invalid_json_has_a_reason(body: bytes, reason: str) -> None:
    with pytest.raises(UnreadableHistoryError) as refused:
        value_in(body)
    assert refused.value.reason == reason


def test_brackets_in_strings_are_not_counted() -> None:
    text = "[" * (2 * DEPTH_MAX) + '\\"'
    assert value_in(b'{"nan": NaN, "text": "' + text.encode() + b'"}').constants == ("NaN",)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_value_or_a_typed_error(body: bytes) -> None:
    try:
        value_in(body)
        reason = ""
    except UnreadableHistoryError as error:
        reason = error.reason
    assert reason in {"", "not-json", "cut-json"}


def test_a_head_with_zero_bytes_is_not_text_unless_it_is_a_database(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"SQLite format 3\0...")
    assert head_of(path).startswith(b"SQLite")
    path.write_bytes(b"PK\3\4\0\0")
    with pytest.raises(UnreadableHistoryError):
        head_of(path)


def test_a_document_may_start_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"\xef\xbb\xbf[]")
    assert document_in(path).value == []
