"""Stalled turns at a client."""

from __future__ import annotations

import pytest

from midstream.protocol import frames
from midstream.protocol.client_stream import STALL_AFTER_S, ClientStream
from midstream.protocol.frames import Events, HeartbeatFrame, Ping, Welcome
from midstream.session.records import StallNoticed
from midstream.timing import StalledOn
from tests.protocol.test_client_stream import delta, due_at, event, receive, stream_in_turn
from tests.spec import spec


def _stalling(waiting_on: str) -> ClientStream:
    """Return a stream whose turn had an event at 0 s and waits since, with a heartbeat at 55 s."""
    stream = stream_in_turn()
    assert due_at(stream) == 30.0, "silence of the server comes first"
    for at in (25.0, 55.0):
        stream.receive(frames.encode(HeartbeatFrame("1-3", waiting_on)), now=at)
    assert due_at(stream) == STALL_AFTER_S
    return stream


@spec("STREAM-47")
@pytest.mark.parametrize("waiting_on", ["model", "tool", "client"])
def test_a_stalled_turn_is_reported_once_and_nothing_else_happens(waiting_on: str) -> None:
    stream = _stalling(waiting_on)
    stalls: list[bool] = []
    for at in (59.9, 60.0):
        stream.handle_deadline(now=at)
        stalls.append(stream.is_stalled)
    assert (stalls, stream.is_connection_wanted, stream.waiting_on) == ([False, True], True, waiting_on)
    assert due_at(stream) == 85.0, "only the server's silence is owed now"
    word = Events((event(4, delta("on")),))
    for frame, at in ((HeartbeatFrame("1-4", waiting_on), 70.0), (word, 80.0)):
        stream.receive(frames.encode(frame), now=at)
        stalls.append(stream.is_stalled)
    assert stalls[2:] == [True, False], "a heartbeat is no event"
    for at in (105.0, 130.0):
        stream.receive(frames.encode(HeartbeatFrame("1-4", waiting_on)), now=at)
    stream.handle_deadline(now=140.0)
    assert stream.is_stalled, "another silence is reported again"


@spec("STREAM-47")
def test_the_servers_record_of_the_silence_does_not_end_it() -> None:
    stream = stream_in_turn()
    stream.receive(frames.encode(HeartbeatFrame("1-3", "model")), now=25.0)
    noticed = StallNoticed(1, 1, StalledOn.FIRST_TOKEN, 30.0, 30.0)
    stream.receive(frames.encode(Events((event(4, noticed),))), now=30.0)
    stream.receive(frames.encode(HeartbeatFrame("1-4", "model")), now=50.0)
    stalls: list[bool] = []
    for at in (59.9, 60.0):
        stream.handle_deadline(now=at)
        stalls.append(stream.is_stalled)
    stream.receive(frames.encode(Events((event(5, noticed),))), now=70.0)
    assert [*stalls, stream.is_stalled] == [False, True, True], "it is reported once"


@spec("STREAM-47")
@pytest.mark.parametrize("waiting_on", ["person", "nothing"])
def test_a_turn_that_waits_for_a_person_is_not_stalled(waiting_on: str) -> None:
    stream = _stalling(waiting_on)
    stream.handle_deadline(now=60.0)
    stalls = [stream.is_stalled]
    for at in (80.0, 105.0):
        stream.receive(frames.encode(HeartbeatFrame("1-3", "tool")), now=at)
    stream.handle_deadline(now=120.0)
    assert [*stalls, stream.is_stalled] == [False, True], "once the person has answered it may"


@spec("STREAM-47")
def test_without_a_connection_or_a_turn_there_is_no_stall() -> None:
    stream = _stalling("model")
    stream.handle_deadline(now=60.0)
    stream.end_connection(chance=0.0, now=61.0)
    assert (stream.is_stalled, stream.is_reconnecting) == (False, True)
    assert due_at(stream) == 61.0
    reader = ClientStream(now=0.0)
    reader.handle_deadline(now=0.0)
    reader.begin_connection(now=0.0)
    receive(reader, Welcome("", "1-3", "1-3"))
    for at in (25.0, 50.0, 60.0):
        reader.receive(frames.encode(HeartbeatFrame("1-3", "model")), now=at)
        reader.handle_deadline(now=at)
    assert not reader.is_stalled


def test_a_pause_of_the_reader_is_no_silence_of_the_turn() -> None:
    stream = _stalling("model")
    stream.resume_reading(now=59.0)
    stream.handle_deadline(now=60.0)
    assert (stream.is_stalled, due_at(stream)) == (False, 89.0)
    stream.detach()
    assert stream.next_deadline() is None


@spec("STREAM-47")
@pytest.mark.parametrize(("waiting_on", "is_stalled"), [("tool", True), ("person", False)])
def test_a_budget_below_the_heartbeat_interval_is_kept(waiting_on: str, is_stalled: bool) -> None:  # noqa: FBT001 - a parameter
    stream = stream_in_turn(stall_after_s=3.0)
    assert due_at(stream) == 3.0
    stream.handle_deadline(now=3.0)
    assert (stream.frames_to_send(), stream.is_stalled) == ([frames.encode(Ping())], False)
    stream.handle_deadline(now=3.1)
    assert stream.frames_to_send() == [], "it is requested once"
    stream.receive(frames.encode(HeartbeatFrame("1-3", waiting_on)), now=3.2)
    assert stream.is_stalled is is_stalled
    stream.receive(frames.encode(Events((event(4, delta("on")),))), now=4.0)
    assert (stream.is_stalled, due_at(stream)) == (False, 7.0)
