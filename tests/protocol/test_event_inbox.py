from __future__ import annotations

import msgspec
import pytest

from midstream.errors import ProtocolError
from midstream.history.messages import UserMessage
from midstream.protocol.event_inbox import Inbox
from midstream.protocol.frames import EventFrame, EventId, Gone, SnapshotFrame, Welcome
from midstream.session.records import MessageAccepted, MessageQueued, Record, StreamOpened, encode

HI = UserMessage.of("hi")


def frame(position: int, record: Record) -> EventFrame:
    return EventFrame(f"1-{position}", msgspec.Raw(encode(record)))


def open_inbox(at: int = 1) -> Inbox:
    inbox = Inbox("a", None)
    inbox.begin(Welcome("a", f"1-{at}", f"1-{at}"))
    return inbox


def test_each_event_is_taken_once_and_a_gap_is_a_protocol_error() -> None:
    inbox = open_inbox()
    first = inbox.take(frame(2, StreamOpened("a", "d")))
    assert first is not None
    assert first.event_id == EventId(1, 2)
    assert inbox.take(frame(2, StreamOpened("a", "d"))) is None
    with pytest.raises(ProtocolError, match="does not follow 1-2"):
        inbox.take(frame(4, StreamOpened("a", "d")))


def test_records_before_the_streams_own_are_not_delivered() -> None:
    inbox = open_inbox()
    assert not inbox.delivers(MessageAccepted(1, HI, 0.0, stream="other"))
    assert inbox.delivers(StreamOpened("a", "d"))
    assert inbox.delivers(MessageAccepted(2, HI, 0.0, stream="a"))
    assert inbox.turn == 2


def test_earlier_turns_are_not_delivered_while_the_message_is_queued() -> None:
    inbox = open_inbox()
    inbox.delivers(StreamOpened("a", "d"))
    assert inbox.delivers(MessageQueued(1, HI, 0.0, stream="a"))
    assert not inbox.delivers(MessageAccepted(2, HI, 0.0, stream="other"))
    assert inbox.delivers(MessageAccepted(3, HI, 0.0, stream="a"))


def test_gone_restarts_and_a_snapshot_includes_the_beginning() -> None:
    inbox = open_inbox()
    inbox.delivers(StreamOpened("a", "d"))
    inbox.go_back(Gone("1-9", "pruned"))
    assert (inbox.received, inbox.cursor) == (EventId(1, 9), None)
    inbox.replace(SnapshotFrame("1-12", msgspec.Raw(b"{}")))
    assert inbox.cursor == "1-12"


def test_an_event_announced_by_a_heartbeat_must_arrive_before_the_next() -> None:
    inbox = open_inbox()
    inbox.announce(EventId(1, 2))
    with pytest.raises(ProtocolError, match="was announced and did not come"):
        inbox.announce(EventId(1, 2))
