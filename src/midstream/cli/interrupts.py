"""Counting of Ctrl-C, so that a command can react instead of being interrupted by an exception."""

from __future__ import annotations

import asyncio
import signal
from types import FrameType, TracebackType
from typing import Self


class Interrupts:
    """Counts Ctrl-C (SIGINT) in this process while it is entered. It works only in the main thread."""

    def __init__(self) -> None:
        self.count = 0
        self._came = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._before: signal._HANDLER = None

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    async def wait_for_count(self, count: int) -> None:
        """Wait until the number since entering is `count`."""
        while self.count < count:
            self._came.clear()
            await self._came.wait()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - a handler's shape
        self.count += 1
        # Uses the loop's pipe, because a signal alone does not wake a waiting loop.
        self._loop.call_soon_threadsafe(self._came.set)
