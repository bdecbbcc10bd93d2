"""Journals without a session, and the readers in this process that follow them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping


class _Readers:
    """Readers of one journal, and how many of them have read up to each position."""

    def __init__(self) -> None:
        self.futures: set[asyncio.Future[None]] = set()
        self.ends: Counter[int] = Counter()

    def enter(self, reader: asyncio.Future[None], end: int) -> None:
        self.futures.add(reader)
        self.ends[end] += 1

    def leave(self, reader: asyncio.Future[None], end: int) -> None:
        self.futures.discard(reader)
        self.ends[end] -= 1
        if not self.ends[end]:
            del self.ends[end]


class FollowedJournals:
    """Wake readers of journals, whichever node appends.

    Args:
        on_change: Called when a reader waits for another journal, or after another position.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._waiting: dict[str, _Readers] = {}

    def ends(self) -> Mapping[str, int]:
        """Return the followed journals, each with the lowest position that a reader has reached."""
        return {journal: min(readers.ends) for journal, readers in self._waiting.items()}

    async def wait(self, journal: str, end: int) -> None:
        """Wait until a journal may have another end than `end`, or may be deleted."""
        readers = self._waiting.setdefault(journal, _Readers())
        reader: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        is_new = end not in readers.ends
        readers.enter(reader, end)
        if is_new:
            self._on_change()
        try:
            await reader
        finally:
            readers.leave(reader, end)
            if not readers.ends and self._waiting.get(journal) is readers:
                del self._waiting[journal]

    def wake(self, journals: Iterable[str]) -> None:
        """Wake the readers of journals that were changed or deleted."""
        for journal in journals:
            readers = self._waiting.get(journal)
            for reader in () if readers is None else readers.futures:
                if not reader.done():
                    reader.set_result(None)
