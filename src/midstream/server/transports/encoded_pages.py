"""Encoded events of a session, shared by all readers at the same position."""

from __future__ import annotations

from collections.abc import Sequence

from midstream.engine.runner import Runner
from midstream.protocol.frames import EVENTS_PER_FRAME_MAX, EventId
from midstream.protocol.server_stream import EncodedPage, FrameEncoding
from midstream.store.contract import StoredRecord

AHEAD_RECORDS_MAX = 2048
"""Records of one read from the store, for readers that are behind."""

PAGE_BYTES_MAX = 2**17
"""Bytes of records in one encoded page; a page has at least one record. For a client that stopped reading, several
copies of its last page stay in memory."""
AHEAD_BYTES_MAX = 2**22
"""Bytes of records that are kept after a read for the next reader; at least one record."""


class EncodedEvents:
    """Encoded events of one session, for one kind of transport. All readers share them.

    Args:
        runner: Runner of the session.
        wire: Encoding of the frames.
    """

    def __init__(self, runner: Runner, wire: FrameEncoding) -> None:
        self.runner = runner
        self._wire = wire
        self._last = EncodedPage(-1, -1, ())
        self._ahead: Sequence[StoredRecord] = ()
        """The last records that were read from the store."""

    def page_after(self, position: int) -> EncodedPage | None:
        """Return the events after a position, or None if they are not in memory."""
        if self._last.after != position:
            records = self.runner.events.near(after=position, limit=EVENTS_PER_FRAME_MAX)
            if records:
                self._ahead = ()
            elif self._ahead and (skip := position + 1 - self._ahead[0].position) >= 0:
                records = self._ahead[skip : skip + EVENTS_PER_FRAME_MAX]
            if not records:
                return None
            if len(records) > 1:
                records = _within(records, PAGE_BYTES_MAX)
            events = [(EventId(each.epoch, each.position), each.body) for each in records]
            self._last = self._wire.page(events)
        return self._last

    async def read(self, position: int) -> None:
        """Read the records after a position, which is before the journal's end, into memory.

        Raises:
            EventGoneError: The records were pruned.
            JournalMovedError: The session was deleted by another process.
            LeaseLostError: The database lost the last records in a crash.
        """
        self._ahead = _within(
            await self.runner.read(after=position, limit=AHEAD_RECORDS_MAX), AHEAD_BYTES_MAX
        )
        if not self._ahead:
            raise await self.runner.events.find_loss()


def _within(records: Sequence[StoredRecord], bytes_max: int) -> Sequence[StoredRecord]:
    """Return the first records within `bytes_max`, at least one."""
    size = 0
    for count, each in enumerate(records):
        size += len(each.body)
        if count and size > bytes_max:
            return records[:count]
    return records
