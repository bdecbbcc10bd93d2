"""What the readers of a session are sent next, encoded once for all who stand at the same place."""

from __future__ import annotations

from collections.abc import Sequence

from midstream.core.frames import EVENTS_PER_FRAME_MAX, EventId
from midstream.core.server_stream import Page, Wire
from midstream.runtime.runner import Runner
from midstream.store.contract import Stored


class Copies:
    """The events of one session, as one kind of transport carries them. Readers are positions; the last page is kept.

    Args:
        runner: Whose events.
        wire: How they are written down.
    """

    def __init__(self, runner: Runner, wire: Wire) -> None:
        self.runner = runner
        self._wire = wire
        self._last = Page(-1, -1, ())

    def at_hand(self, position: int) -> Page | None:
        """Return what follows a position, as far as it is in memory."""
        if self._last.after != position:
            records = self.runner.events.near(after=position, limit=EVENTS_PER_FRAME_MAX)
            if not records:
                return None
            self._last = self._encoded(records)
        return self._last

    async def after(self, position: int) -> Page:
        """Return what follows a position, which is not the journal's end.

        Raises:
            EventGoneError: It was pruned.
        """
        self._last = self._encoded(await self.runner.read(after=position, limit=EVENTS_PER_FRAME_MAX))
        return self._last

    def _encoded(self, records: Sequence[Stored]) -> Page:
        return self._wire.page([(EventId(each.epoch, each.position), each.body) for each in records])
