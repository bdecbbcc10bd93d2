"""Visible codes for invisible characters.

A person decides by the visible text. An invisible character can contain hidden text (tags, variation selectors),
reverse text (direction marks) or imitate a space. Approval prompts, names, arguments and results show each of them as a
code such as `⟨U+202E⟩`. `tools/invisible_js.py` writes the same table for the web page.
"""

from __future__ import annotations

import json
import re

import msgspec

UNICODE_VERSION = "17.0"
"""Version of the Unicode data of the table."""
INVISIBLE: tuple[tuple[int, int], ...] = (
    (0x0000, 0x0008),
    (0x000B, 0x001F),
    (0x007F, 0x00A0),
    (0x00AD, 0x00AD),
    (0x034F, 0x034F),
    (0x0600, 0x0605),
    (0x061C, 0x061C),
    (0x06DD, 0x06DD),
    (0x070F, 0x070F),
    (0x0890, 0x0891),
    (0x08E2, 0x08E2),
    (0x115F, 0x1160),
    (0x1680, 0x1680),
    (0x17B4, 0x17B5),
    (0x180B, 0x180F),
    (0x2000, 0x200F),
    (0x2028, 0x202F),
    (0x205F, 0x206F),
    (0x2800, 0x2800),
    (0x3000, 0x3000),
    (0x3164, 0x3164),
    (0xD800, 0xF8FF),
    (0xFE00, 0xFE0F),
    (0xFEFF, 0xFEFF),
    (0xFFA0, 0xFFA0),
    (0xFFF0, 0xFFFB),
    (0x110BD, 0x110BD),
    (0x110CD, 0x110CD),
    (0x13430, 0x1343F),
    (0x1BCA0, 0x1BCA3),
    (0x1D173, 0x1D17A),
    (0xE0000, 0xE0FFF),
    (0xF0000, 0xFFFFD),
    (0x100000, 0x10FFFD),
)
"""First and last code points: the categories Cc, Cf, Co, Cs, Zl, Zp and Zs, the property
Default_Ignorable_Code_Point and the empty Braille pattern, without space, tab and newline."""

_CLASS = "[" + "".join(f"{chr(first)}-{chr(last)}" for first, last in INVISIBLE) + "]"
_SHOWN_BY_CODE = re.compile(_CLASS + r"|\u27e8(?=U\+)")
"""Characters of the table, and the bracket of a code, so that text cannot imitate a code."""
_INVISIBLE = re.compile(_CLASS)


def reveal(text: str) -> str:
    """Replace each invisible character in `text` by its code, except space, tab and newline."""
    return _SHOWN_BY_CODE.sub(lambda found: f"\u27e8U+{ord(found.group()):04X}\u27e9", text)


def reveal_line(text: str) -> str:
    """Replace invisible characters like `reveal`, and each run of spaces, tabs and newlines by one space."""
    return " ".join(reveal(text).split())


def escape_json(document: str) -> str:
    """Return a JSON document with JSON escapes for invisible characters, which is safe to print."""
    return _INVISIBLE.sub(lambda found: json.dumps(found.group())[1:-1], document)


def json_of(value: object) -> str:
    """Encode a value as one line of JSON that is safe to print."""
    return escape_json(msgspec.json.encode(value).decode())
