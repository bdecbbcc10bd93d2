"""Printable output: text, and nothing that acts on a terminal."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.cli.terminal import (
    Ink,
    clean,
    columns,
    fold_lines,
    indent_lines,
    pad,
    shorten,
    width_of,
)


@pytest.mark.parametrize(
    ("hostile", "harmless"),
    [
        ("\x1b[2J\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07words", "words"),
        ("\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("back\x08space\rreturn\x7f", "backspacereturn"),
        ("\x9b31mC1", "31mC1"),
        ("abc\u202egnp.exe", "abcgnp.exe"),
        ("tag\U000e0041", "tag"),
        ("lone\ud800", "lone"),
        ("one\r\ntwo\tthree", "one\ntwo\tthree"),
        ("family 👨\u200d👩", "family 👨\u200d👩"),
    ],
)
def test_control_sequences_are_removed(hostile: str, harmless: str) -> None:
    assert clean(hostile) == harmless


@given(st.text(), st.text())
def test_no_split_of_a_sequence_lets_it_pass(one: str, other: str) -> None:
    joined = clean(one + "\x1b[31m") + clean("\x9b2J" + other)
    assert not {each for each in joined if (ord(each) < 32 and each not in "\t\n") or 127 <= ord(each) < 160}


def test_one_line_is_one_line() -> None:
    assert clean(" a\n\tb  c\n", is_one_line=True) == "a b c"


@given(st.text(alphabet="ab日本é\u0301", max_size=20), st.integers(2, 30))
def test_a_cell_has_exactly_its_width(text: str, width: int) -> None:
    assert width_of(pad(text, width)) == width


def test_cut_text_is_marked() -> None:
    assert shorten("a long title", 6) == "a lon…"
    assert shorten("日本語", 5) == "日本…"
    assert shorten("short", 5) == "short"


def test_lines_are_wrapped_and_indented() -> None:
    assert indent_lines("one two three\n\nfour", "  ", 9) == ["  one two", "  three", "", "  four"]


@given(st.text(alphabet="ab  日本é\n", max_size=60), st.integers(4, 20))
def test_folded_lines_keep_every_character_and_the_width(text: str, width: int) -> None:
    lines = fold_lines(text, "  ", width)
    assert "".join(line[2:] for line in lines) == text.replace("\n", "")
    assert all(line.startswith("  ") and width_of(line) <= width for line in lines)


@pytest.mark.parametrize(
    ("mode", "environment", "is_colored"),
    [
        ("auto", {}, False),
        ("auto", {"FORCE_COLOR": "1"}, True),
        ("auto", {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        ("always", {"NO_COLOR": "1"}, True),
        ("never", {"FORCE_COLOR": "1"}, False),
    ],
)
def test_colour_depends_on_the_flag_then_the_environment_then_the_output(
    monkeypatch: pytest.MonkeyPatch, mode: str, environment: dict[str, str], *, is_colored: bool
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (Ink.on(io.StringIO(), mode).red("x") == "\x1b[31mx\x1b[0m") is is_colored


@pytest.mark.parametrize(("term", "is_colored"), [("xterm", True), ("dumb", False)])
def test_a_terminal_has_colours_unless_it_is_dumb(
    monkeypatch: pytest.MonkeyPatch, term: str, *, is_colored: bool
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("TERM", term)
    ink = Ink.on(Terminal())
    assert (ink.is_terminal, ink.is_colored) == (True, is_colored)


def test_the_width_has_a_minimum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "3")
    assert columns() == 40
