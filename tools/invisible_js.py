"""Generate the table of invisible characters of the web page from `midstream.cli.visible_text`.

python tools/invisible_js.py
"""

from __future__ import annotations

from pathlib import Path

from midstream.cli.visible_text import INVISIBLE, UNICODE_VERSION

TARGET = Path(__file__).parents[1] / "src/midstream/server/static/invisible.js"


def text() -> str:
    """Return the whole JavaScript module."""
    rows = [f"  [0x{first:04x}, 0x{last:04x}]," for first, last in INVISIBLE]
    lines = [
        "/** Invisible characters, generated from `src/midstream/cli/visible_text.py` by `tools/invisible_js.py`. */",
        "",
        f"/** First and last code points, of Unicode {UNICODE_VERSION}. */",
        "export const INVISIBLE = [",
        *rows,
        "];",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
