"""The input of a stream as the events that an application receives."""

from __future__ import annotations

import msgspec

from midstream.client.client_events import event_of
from midstream.protocol.event_inbox import Applied, Forget, Replaced
from midstream.protocol.events import Event, EventReader
from midstream.protocol.frames import EventId, Gone, SnapshotFrame
from midstream.session.records import Delta

WORD = Delta(1, 1, 1, 0, "text", "hello")


def test_an_event_has_its_id_its_record_and_the_answer_so_far() -> None:
    reading = EventReader()
    event = event_of(Applied(EventId(1, 4), WORD), reading)
    assert (event, event.text, event.transcript) == (Event("1-4", WORD), "hello", "hello")
    gone = event_of(Forget(EventId(1, 3), "a power cut"), reading)
    assert (gone, gone.replaces, gone.transcript) == (Event("1-3", Gone("1-3", "a power cut")), True, "")
    session = msgspec.Raw(b'{"turns":1,"history":[]}')
    assert event_of(Replaced(EventId(1, 4), session), reading).record == SnapshotFrame("1-4", session)
