"""The table of invisible characters: its contents, and how they are shown."""

from __future__ import annotations

import json
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.cli.visible_text import INVISIBLE, escape_json, reveal, reveal_line
from tests.spec import spec
from tools import invisible_js

CATEGORIES = frozenset(("Cc", "Cf", "Co", "Cs", "Zl", "Zp", "Zs"))
SHOWN_AS_THEY_ARE = " \t\n"
IGNORABLE_BY_DEFAULT = (
    0x034F,
    0x115F,
    0x17B4,
    0x180B,
    0x180F,
    0x2065,
    0x3164,
    0xFE0F,
    0xFFA0,
    0xFFF0,
    0xE0100,
)
"""Code points with this property outside the categories."""


def is_listed(code: int) -> bool:
    return any(first <= code <= last for first, last in INVISIBLE)


@spec("SEC-70")
def test_the_table_has_every_invisible_category_of_this_pythons_unicode_data() -> None:
    expected = {
        code
        for code in range(sys.maxunicode + 1)
        if unicodedata.category(chr(code)) in CATEGORIES and chr(code) not in SHOWN_AS_THEY_ARE
    }
    assert {code for code in expected if not is_listed(code)} == set()
    assert all(is_listed(code) for code in IGNORABLE_BY_DEFAULT)


@spec("SEC-70")
def test_visible_characters_are_not_in_the_table() -> None:
    listed = [code for first, last in INVISIBLE for code in range(first, last + 1)]
    others = {unicodedata.category(chr(code)) for code in listed} - CATEGORIES
    assert others <= {"Cn", "Mn", "Lo", "So"}, "unassigned ones, joiners, selectors and fillers"
    assert not any(is_listed(ord(character)) for character in "aé日本語👩🏽⟨⟩ \t\n")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("abc\u202egnp.exe", "abc⟨U+202E⟩gnp.exe"),
        ("rm -rf /\U000e0020\U000e0068", "rm -rf /⟨U+E0020⟩⟨U+E0068⟩"),
        ("one\u2028two", "one⟨U+2028⟩two"),
        ("soft\u00adhyphen\u00a0", "soft⟨U+00AD⟩hyphen⟨U+00A0⟩"),
        ("⚠\ufe0f \ue000 \x1b[2J \ud800", "⚠⟨U+FE0F⟩ ⟨U+E000⟩ ⟨U+001B⟩[2J ⟨U+D800⟩"),
        ("a\tb\nc d", "a\tb\nc d"),
        ("⟨U+202E⟩", "⟨U+27E8⟩U+202E⟩"),
    ],
)
@spec("SEC-70")
def test_an_invisible_character_is_shown_by_its_code(text: str, shown: str) -> None:
    assert reveal(text) == shown


@given(st.text(), st.text())
def test_two_different_texts_look_different(one: str, other: str) -> None:
    assert (reveal(one) == reveal(other)) == (one == other)


def test_one_line_is_one_line() -> None:
    assert reveal_line(" a\n\tb\u2029c\n") == "a b⟨U+2029⟩c"


@given(st.text())
def test_escaped_json_is_printable_and_the_same_value(text: str) -> None:
    document = escape_json(json.dumps({"said": text}, ensure_ascii=False))
    assert reveal(document.replace("⟨", "")) == document.replace("⟨", "")
    assert json.loads(document) == {"said": text}


@spec("SEC-70")
def test_the_documentation_has_the_same_table() -> None:
    assert invisible_js.TARGET.read_text(encoding="utf-8") == invisible_js.text()
