"""Work counted in lines of code, which a busy machine does not increase."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any


class Lines:
    """Number of lines of the package that ran."""

    count = 0


@contextlib.contextmanager
def lines_run() -> Iterator[Lines]:
    """Count the lines of the package that run within the block."""
    lines = Lines()

    def line(frame: FrameType, event: str, argument: object) -> Any:  # noqa: ANN401 - the signature of a trace function
        lines.count += 1
        return line

    def call(frame: FrameType, event: str, argument: object) -> Any:  # noqa: ANN401 - likewise
        name = frame.f_globals.get("__name__", "")
        return line if name.startswith("midstream.") else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        yield lines
    finally:
        sys.settrace(before)
