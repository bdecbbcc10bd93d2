"""Next events of a session's readers, encoded once for all who stand at the same place."""

from __future__ import annotations

from collections.abc import Sequence

from midstream.engine.runner import Runner
from midstream.protocol.frames import EVENTS_PER_FRAME_MAX, EventId
from midstream.protocol.server_stream import EncodedPage, FrameEncoding
from midstream.store.contract import StoredRecord

AHEAD_RECORDS_MAX = 2048
"""Records read from the store at once, for a reader far behind and for those that follow it closely."""

PAGE_BYTES_MAX = 2**17
"""Bytes of records that are encoded at once, one record at least. A reader that has stopped reading holds what was
written to it last, some times over (as events, as the body of an answer, in the socket's buffer), for as long as it is
waited for."""
AHEAD_BYTES_MAX = 2**22
"""Bytes of what was read from the store that are kept for the next reader, one record at least."""


class Copies:
    """The events of one session, as one kind of transport carries them. Readers are positions; what is kept is shared.

    Args:
        runner: Whose events.
        wire: How they are written down.
    """

    def __init__(self, runner: Runner, wire: FrameEncoding) -> None:
        self.runner = runner
        self._wire = wire
        self._last = EncodedPage(-1, -1, ())
        self._ahead: Sequence[StoredRecord] = ()
        """What was read from the store last."""

    def at_hand(self, position: int) -> EncodedPage | None:
        """Return what follows a position, as far as it is in memory."""
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
        """Get at hand what follows a position that is not the journal's end.

        Raises:
            EventGoneError: It was pruned.
            JournalMovedError: The session was deleted by another process.
            LeaseLostError: A crash of the database lost its last records.
        """
        self._ahead = _within(
            await self.runner.read(after=position, limit=AHEAD_RECORDS_MAX), AHEAD_BYTES_MAX
        )
        if not self._ahead:
            raise await self.runner.events.find_loss()


def _within(records: Sequence[StoredRecord], bytes_max: int) -> Sequence[StoredRecord]:
    """Return as many of the first records as have room, one at least."""
    size = 0
    for count, each in enumerate(records):
        size += len(each.body)
        if count and size > bytes_max:
            return records[:count]
    return records
