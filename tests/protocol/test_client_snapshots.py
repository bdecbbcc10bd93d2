"""Snapshots at a client: each replaces all earlier events."""

from __future__ import annotations

import msgspec

from midstream.history.messages import Text, UserMessage
from midstream.protocol import frames
from midstream.protocol.checkpoint import Checkpoint, CursorMoved, Forgotten
from midstream.protocol.client_stream import ClientStream
from midstream.protocol.event_inbox import Applied, Forget, Replaced
from midstream.protocol.frames import (
    Ack,
    Error,
    EventFrame,
    EventId,
    Events,
    Gone,
    Open,
    SendPayload,
    ServerFrame,
    SnapshotFrame,
    SnapshotWhen,
    Welcome,
)
from midstream.session import records
from midstream.session.records import CommandAccepted, MessageAccepted, Record, StepCommitted, StreamOpened
from tests.spec import spec


def _receive(stream: ClientStream, frame: ServerFrame) -> None:
    stream.receive(frames.encode(frame), now=0.0)


def _receive_and_reconnect(stream: ClientStream, refusal: Error) -> None:
    _receive(stream, refusal)
    stream.end_connection(chance=0.0, now=0.0)
    stream.handle_deadline(now=0.0)
    stream.writes()
    stream.begin_connection(now=0.0)


def _event(position: int, record: Record, *, epoch: int = 1) -> EventFrame:
    return EventFrame(f"{epoch}-{position}", msgspec.Raw(records.encode(record)))


def _stream_in_turn() -> ClientStream:
    """Return a stream whose message opened turn 1, at event 1-3."""
    stream = ClientStream("a", "secret", snapshots=SnapshotWhen.GONE, now=0.0)
    stream.submit(SendPayload((Text("hi"),)))
    stream.handle_deadline(now=0.0)
    stream.begin_connection(now=0.0)
    _receive(stream, Welcome("a", "1-0", "1-0"))
    message = MessageAccepted(1, UserMessage.of("hi"), 1.0, stream="a")
    opened: tuple[Record, ...] = (StreamOpened("a", "d"), CommandAccepted("a", 0, "d"), message)
    _receive(stream, Events(tuple(_event(number, record) for number, record in enumerate(opened, 1))))
    stream.events()
    stream.writes()
    return stream


@spec("STREAM-64")
def test_a_snapshot_replaces_all_earlier_events_and_the_rest_follows() -> None:
    stream = _stream_in_turn()
    _receive(stream, Gone("1-7", "pruned", 8, has_snapshot=True))
    _receive(stream, SnapshotFrame("1-7", msgspec.Raw(b'{"turns":1}')))
    assert stream.events() == [
        Forget(EventId(1, 7), "pruned", has_snapshot=True),
        Replaced(EventId(1, 7), msgspec.Raw(b'{"turns":1}')),
    ]
    stream.writes()
    stream.mark_handled(EventId(1, 7))
    assert stream.writes() == [CursorMoved(EventId(1, 7), promised=EventId(1, 3))]
    late = StepCommitted(1, 1)
    _receive(stream, Events((_event(8, late, epoch=1),)))
    assert stream.events() == [Applied(EventId(1, 8), late)]
    assert not stream.is_ended


def test_a_temporary_trouble_of_the_server_ends_with_a_snapshot_and_with_the_stream() -> None:
    stream = _stream_in_turn()
    full = Error("store_full", "no space left", "later")
    _receive_and_reconnect(stream, full)
    _receive(stream, Welcome("a", "1-3", "1-3", acked=1, turn=1))
    troubles = [stream.trouble]
    _receive(stream, SnapshotFrame("1-5", msgspec.Raw(b"{}"), turn=1))
    troubles.append(stream.trouble)
    _receive_and_reconnect(stream, full)
    troubles.append(stream.trouble)
    _receive(stream, Error("internal", "a defect", "never"))
    assert stream.is_ended
    assert [each and each.code for each in (*troubles, stream.trouble)] == [
        "store_full",
        None,
        "store_full",
        None,
    ]


@spec("STREAM-64")
def test_a_snapshot_after_the_end_of_its_turn_ends_the_stream() -> None:
    stream = _stream_in_turn()
    _receive(stream, SnapshotFrame("1-90", msgspec.Raw(b"{}"), is_over=True))
    assert (stream.is_ended, stream.error, stream.end) == (True, None, EventId(1, 90))
    assert stream.events() == [Replaced(EventId(1, 90), msgspec.Raw(b"{}"))]
    stream.writes()
    stream.mark_handled(EventId(1, 90))
    assert stream.writes() == [Forgotten()]


@spec("STREAM-65")
def test_a_reader_requests_the_snapshots_it_accepts() -> None:
    stream = ClientStream(snapshots=SnapshotWhen.BEGIN, now=0.0)
    stream.handle_deadline(now=0.0)
    stream.begin_connection(now=0.0)
    assert stream.frames_to_send() == [frames.encode(Open(snapshots=SnapshotWhen.BEGIN))]
    _receive(stream, Welcome("", "2-9", "2-9"))
    _receive(stream, SnapshotFrame("2-10", msgspec.Raw(b"{}")))
    _receive(stream, Events((_event(11, StepCommitted(1, 1), epoch=2),)))
    assert [type(event) for event in stream.events()] == [Replaced, Applied]


@spec("STREAM-26")
def test_a_turn_that_ended_before_the_stored_cursor_ends_the_stream_and_removes_its_checkpoint() -> None:
    kept = Checkpoint("a", "secret", EventId(1, 4), 1, promised=EventId(1, 4))
    stream = ClientStream.resume(kept, life=1, now=0.0)
    stream.handle_deadline(now=0.0)
    stream.begin_connection(now=0.0)
    _receive(stream, Welcome("a", "1-4", "1-4", acked=1, turn=1, turn_status="completed"))
    assert (stream.is_ended, stream.error, stream.events()) == (True, None, [])
    assert stream.writes() == [Forgotten()]


@spec("STREAM-26")
def test_a_command_without_ack_keeps_the_stream_of_an_ended_turn_open() -> None:
    kept = Checkpoint("a", "secret", EventId(1, 4), 2, ((1, b'{"type":"cancel"}'),))
    stream = ClientStream.resume(kept, life=1, now=0.0)
    stream.handle_deadline(now=0.0)
    stream.begin_connection(now=0.0)
    _receive(stream, Welcome("a", "1-4", "1-4", acked=1, turn=1, turn_status="completed"))
    assert not stream.is_ended
    _receive(stream, Ack(1))
    assert (stream.is_ended, stream.error) == (True, None)
