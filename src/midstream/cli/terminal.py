"""Text on a terminal: cleaning, colors and width.

Text of a model or a tool is untrusted: an escape sequence could rewrite the screen, and a direction mark could reverse
a path. Prose is cleaned here. Text for a person's decision is shown completely, by `visible_text`.
"""

from __future__ import annotations

import os
import re
import shutil
import textwrap
import unicodedata
from typing import TextIO

COLOR_MODES = ("auto", "always", "never")
COLUMNS = 80
"""Columns if the width is unknown."""

# Complete escape sequences first (CSI; OSC and similar ones up to their end), then remains of others.
_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]")
# Controls except tab and newline, C1, direction marks and overrides, line separators, invisible tags, lone surrogates.
_HOSTILE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f\ud800-\udfff]"
)


def clean(text: str, *, is_one_line: bool = False) -> str:
    """Return `text` without control sequences and invisible characters, except tabs and newlines.

    Args:
        is_one_line: Join lines and runs of white space with single spaces, for a cell of a table.
    """
    harmless = _HOSTILE.sub("", _SEQUENCE.sub("", text.replace("\r\n", "\n")))
    return " ".join(harmless.split()) if is_one_line else harmless


class Ink:
    """Colors: each method returns its text, with markup if the output supports it."""

    def __init__(self, *, is_colored: bool, is_terminal: bool) -> None:
        self.is_colored = is_colored
        self.is_terminal = is_terminal

    @classmethod
    def on(cls, output: TextIO, mode: str = "auto") -> Ink:
        """Return the ink of an output, by `mode`, NO_COLOR, FORCE_COLOR, TERM=dumb, and whether it is a terminal."""
        is_terminal = output.isatty()
        return cls(is_colored=_is_colored(mode, is_terminal=is_terminal), is_terminal=is_terminal)

    def bold(self, text: str) -> str:
        """Mark important text."""
        return self._mark("1", text)

    def dim(self, text: str) -> str:
        """Mark secondary text."""
        return self._mark("2", text)

    def red(self, text: str) -> str:
        """Mark a failure."""
        return self._mark("31", text)

    def green(self, text: str) -> str:
        """Mark a success."""
        return self._mark("32", text)

    def yellow(self, text: str) -> str:
        """Mark a warning or a doubt."""
        return self._mark("33", text)

    def cyan(self, text: str) -> str:
        """Mark a name."""
        return self._mark("36", text)

    def _mark(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.is_colored and text else text


PLAIN = Ink(is_colored=False, is_terminal=False)


def _is_colored(mode: str, *, is_terminal: bool) -> bool:
    if mode != "auto":
        return mode == "always"
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return is_terminal and os.environ.get("TERM") != "dumb"


def columns() -> int:
    """Return the width of the terminal, at least 40."""
    return max(40, shutil.get_terminal_size((COLUMNS, 24)).columns)


def width_of(text: str) -> int:
    """Return the columns of a cleaned text: two for wide characters, none for combining ones."""
    return sum(_width_of_character(each) for each in text)


def _width_of_character(character: str) -> int:
    if unicodedata.combining(character) or character in "\u200c\u200d\ufe0e\ufe0f":
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def shorten(text: str, width: int) -> str:
    """Return `text` in at most `width` columns, with an ellipsis if it was shortened."""
    if width_of(text) <= width:
        return text
    kept: list[str] = []
    room = width - 1
    for character in text:
        room -= _width_of_character(character)
        if room < 0:
            break
        kept.append(character)
    return "".join(kept) + "…"


def pad(text: str, width: int) -> str:
    """Return `text` shortened or filled with spaces to exactly `width` columns."""
    short = shorten(text, width)
    return short + " " * (width - width_of(short))


def indent_lines(text: str, indent: str, width: int) -> list[str]:
    """Return the lines of a cleaned text, wrapped to `width` columns and indented by `indent`."""
    lines: list[str] = []
    for line in text.expandtabs(4).split("\n"):
        lines.extend(
            textwrap.wrap(
                line,
                width,
                initial_indent=indent,
                subsequent_indent=indent,
                replace_whitespace=False,
                break_on_hyphens=False,
            )
            or [""]
        )
    return lines


def fold_lines(text: str, indent: str, width: int) -> list[str]:
    """Return the lines of a revealed text, cut at `width` columns and indented by `indent`; no character is lost."""
    lines: list[str] = []
    for line in text.expandtabs(4).split("\n"):
        kept, column = [indent], len(indent)
        for character in line:
            wide = _width_of_character(character)
            if column + wide > width and len(kept) > 1:
                lines.append("".join(kept))
                kept, column = [indent], len(indent)
            kept.append(character)
            column += wide
        lines.append("".join(kept))
    return lines
