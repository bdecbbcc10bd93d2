"""Conversion of a stream's events for applications."""

from __future__ import annotations

from midstream.protocol.event_inbox import Applied, ClientEvent, Replaced
from midstream.protocol.events import Event, EventReader
from midstream.protocol.frames import Gone, SnapshotFrame


def event_of(event: ClientEvent, reading: EventReader) -> Event:
    """Convert an event of the stream for the application."""
    match event:
        case Applied(event_id, record):
            return reading.event(str(event_id), record)
        case Replaced(event_id, session, turn):
            return reading.event(str(event_id), SnapshotFrame(str(event_id), session, turn=turn))
        case _:
            gone = Gone(str(event.event_id), event.reason, has_snapshot=event.has_snapshot)
            return reading.event(str(event.event_id), gone)
