"""Asynchronous input of lines from a terminal."""

from __future__ import annotations

import asyncio
import os
import sys

LINE_BYTES_MAX = 64 * 1024
"""Bytes of one line. A terminal returns at most 4 KiB at once; pasted text arrives in pieces."""


class Keyboard:
    """Reads lines from the terminal on stdin, without a thread, which could consume the next line.

    It needs an event loop that can watch a terminal, which Windows does not have.
    """

    def __init__(self) -> None:
        self._typed = b""

    @staticmethod
    def is_available() -> bool:
        """Return whether a terminal is available."""
        return sys.stdin.isatty() and os.name == "posix"

    def discard_input(self) -> None:
        """Discard input from before the question was shown."""
        import termios  # noqa: PLC0415 - not on every system

        self._typed = b""
        termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)

    async def line(self) -> str | None:
        """Wait for a line; return None at the end (Ctrl-D). Cancellation keeps an incomplete line."""
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
