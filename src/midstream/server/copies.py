"""What the readers of a session are sent next, encoded once for all who stand at the same place."""

from __future__ import annotations

from midstream.core.frames import EVENTS_PER_FRAME_MAX, EventId
from midstream.core.server_stream import Page, Wire
from midstream.runtime.runner import Runner


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

    async def after(self, position: int) -> Page:
        """Return what follows a position, which is not the journal's end.

        Raises:
            EventGoneError: It was pruned.
        """
        if self._last.after != position:
            records = await self.runner.read(after=position, limit=EVENTS_PER_FRAME_MAX)
            events = [(EventId(record.epoch, record.position), record.body) for record in records]
            self._last = self._wire.page(events)
        return self._last
