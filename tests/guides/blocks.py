"""The code blocks of the README and the guides, as printed."""

from __future__ import annotations

import re
from pathlib import Path

from msgspec import Struct

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]
PROGRAMS = frozenset({"python", "js"})
"""Languages of blocks that are executed."""
COMMANDS = frozenset({"", "sh"})
"""Languages of blocks that may contain commands of ours; their names and options are checked."""
SHOWN = frozenset({"console", "json", "toml", "yaml"})
"""Languages of output, and of configuration."""
_BLOCK = re.compile(r"^```(?P<language>\S*)[^\n]*\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(Struct, frozen=True):
    """One fenced block.

    Args:
        page: File name of its page.
        number: From 0, among the blocks of its page in this language.
    """

    page: str
    language: str
    number: int
    code: str

    @property
    def key(self) -> tuple[str, str, int]:
        """Return the identity of the block."""
        return self.page, self.language, self.number


def blocks_of(text: str, page: str) -> list[Block]:
    """Return the blocks of a page, in order."""
    found: list[Block] = []
    for match in _BLOCK.finditer(text):
        language = match["language"]
        number = sum(each.language == language for each in found)
        found.append(Block(page, language, number, match["code"]))
    return found


def all_blocks() -> list[Block]:
    """Return the blocks of all pages."""
    return [block for page in PAGES for block in blocks_of(page.read_text(encoding="utf-8"), page.name)]
