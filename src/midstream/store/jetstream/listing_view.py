"""Lines of all sessions in the memory of this process, for listings and the search for orphans.

Before each use, the view reads the changes since the last use. A deleted session may still have a line, so each line is
compared with its journal before use.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping

from midstream.session.child_names import PART_MARK
from midstream.store.contract import ListPlace, SessionInfo
from midstream.store.jetstream.jetstream_link import JetStreamLink
from midstream.store.jetstream.journal_messages import Line, decode
from midstream.store.jetstream.stream_subjects import StreamSubjects

PAGE = 64
"""Sessions whose journals are read concurrently."""


class ListingView:
    """The lines of a store. Its memory grows with the number of sessions: some 400 bytes for each."""

    def __init__(self, link: JetStreamLink, subjects: StreamSubjects) -> None:
        self._link = link
        self._subjects = subjects
        self._lines: dict[str, Line] = {}
        self._live: dict[str, Line] = {}
        """The few with an open turn, which are checked often."""
        self._read_up_to = dict.fromkeys(subjects.shards, 0)
        self._reading = asyncio.Lock()

    async def refresh(self) -> None:
        """Read the changes since the last time.

        Raises:
            MidstreamError: The store cannot be read.
        """
        async with self._reading:
            await asyncio.gather(*map(self._read, self._subjects.shards))

    async def _read(self, stream: str) -> None:
        start = self._read_up_to[stream] + 1
        for message in await self._link.scan(stream, self._subjects.lines(stream), start=start):
            line = decode(message.data, Line)
            self.drop(line.session)
            if not line.is_gone:
                self._lines[line.session] = line
                if line.is_live:
                    self._live[line.session] = line
            self._read_up_to[stream] = message.seq

    def live(self) -> list[Line]:
        """Return the lines of sessions with an open turn, longest unchanged first."""
        return sorted(self._live.values(), key=lambda line: line.at)

    def drop(self, session: str) -> None:
        """Remove the line of a session that does not exist."""
        self._lines.pop(session, None)
        self._live.pop(session, None)

    async def list(
        self,
        find: Callable[[str], Awaitable[SessionInfo | None]],
        *,
        live: bool | None,
        of: Collection[str] | None,
        after: ListPlace | None,
        limit: int | None,
    ) -> AsyncIterator[SessionInfo]:
        """See `StoreReader.list`. `find` returns the line in the journal."""
        await self.refresh()
        fitting = [
            (line.at, line.session)
            for line in self._candidates(self._live if live else self._lines, of)
            if (live is None or line.is_live == live)
            and (after is None or (line.at, line.session) < (after.at, after.session))
        ]
        yielded = 0
        for page in _pages(fitting, limit):
            for name, info in zip(page, await asyncio.gather(*map(find, page)), strict=True):
                if info is None:
                    self.drop(name)
                elif limit is None or yielded < limit:
                    yielded += 1
                    yield info
            if limit is not None and yielded >= limit:
                return

    def _candidates(self, lines: Mapping[str, Line], of: Collection[str] | None) -> Iterator[Line]:
        if of is None:
            yield from [*lines.values()]
            return
        starts = tuple(f"{root}{PART_MARK}" for root in of)
        for name, line in [*lines.items()]:
            if name in of or name.startswith(starts):
                yield line


def _pages(fitting: list[tuple[float, str]], limit: int | None) -> Iterator[list[str]]:
    """Yield the names, greatest first; sort only as many as are needed."""
    rest = fitting
    while rest:
        count = PAGE if limit is not None and limit <= PAGE else len(rest)
        page = heapq.nlargest(count, rest)
        for start in range(0, len(page), PAGE):
            yield [name for _, name in page[start : start + PAGE]]
        if len(page) == len(rest):
            return
        rest = [each for each in rest if each < page[-1]]
