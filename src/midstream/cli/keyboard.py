"""Lines typed at a terminal while other things go on."""

from __future__ import annotations

import asyncio
import os
import sys

LINE_BYTES_MAX = 64 * 1024
"""One typed line; a terminal hands over 4 KiB at most, a paste comes in pieces."""


class Keyboard:
    """The terminal on stdin, a line at a time, without a thread that would take the next line for itself.

    Only where the system lets a loop watch a terminal: not on Windows.
    """

    def __init__(self) -> None:
        self._typed = b""

    @staticmethod
    def is_there() -> bool:
        """Whether a user can be asked here."""
        return sys.stdin.isatty() and os.name == "posix"

    def discard_input(self) -> None:
        """Drop what was typed before the question stood there: it was no answer to it."""
        import termios  # noqa: PLC0415 - not on every system

        self._typed = b""
        termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)

    async def line(self) -> str | None:
        """Wait for a line; None at the end (Ctrl-D). Cancelling loses nothing that was not a whole line."""
        loop = asyncio.get_running_loop()
        source = sys.stdin.fileno()
        while b"\n" not in self._typed and len(self._typed) < LINE_BYTES_MAX:
            there: asyncio.Future[None] = loop.create_future()
            loop.add_reader(source, _settle, there)
            try:
                await there
            finally:
                loop.remove_reader(source)
            piece = os.read(source, 4096)
            if not piece:
                return None
            self._typed += piece
        line, _, self._typed = self._typed.partition(b"\n")
        return line.decode("utf-8", "replace")


def _settle(there: asyncio.Future[None]) -> None:
    if not there.done():
        there.set_result(None)
