"""Retries of a client: progress, and errors without a retry."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from midstream.errors import ConnectionLostError
from midstream.history.messages import ToolResult
from midstream.protocol import frames
from midstream.protocol.checkpoint import Forgotten
from midstream.protocol.client_stream import ClientStream
from midstream.protocol.frames import (
    Ack,
    CancelPayload,
    CommandFrame,
    Error,
    Events,
    HeartbeatFrame,
    ResultPayload,
    ServerFrame,
    Welcome,
)
from midstream.retries import STOPPED_PATIENCE_S
from midstream.session.records import TurnEnded, TurnStatus
from midstream.session.turn.states import LOOK_BACK_S
from tests.protocol.test_client_stream import due_at, event, receive, stream_in_turn
from tests.spec import spec

DONE = ResultPayload(1, 1, ToolResult("c", "done"))


@spec("STREAM-29")
@pytest.mark.parametrize("progress", [Ack(1), HeartbeatFrame("1-3", "model")], ids=["an ack", "a heartbeat"])
def test_an_ack_and_a_heartbeat_are_progress_too(progress: ServerFrame) -> None:
    stream = stream_in_turn()
    stream.submit(DONE)
    now = 0.0
    for _ in range(3):
        stream.end_connection(chance=0.0, now=now)
        now = due_at(stream)
        stream.handle_deadline(now=now)
        stream.begin_connection(now=now)
        receive(stream, Welcome("a", "1-3", "1-3", acked=1, turn=1))
    stream.end_connection(chance=0.0, now=now)
    assert due_at(stream) == 4.0
    stream.handle_deadline(now=4.0)
    stream.begin_connection(now=4.0)
    receive(stream, Welcome("a", "1-3", "1-3", acked=1, turn=1), progress)
    stream.end_connection(chance=0.0, now=50.0)
    assert due_at(stream) == 50.0


@spec("STREAM-77")
def test_after_a_cancel_the_patience_is_short_once_it_is_acknowledged() -> None:
    waited = []
    for is_acknowledged in (False, True):
        stream = stream_in_turn()
        stream.abort()
        if is_acknowledged:
            receive(stream, Ack(1))
        now = _gives_up_at(stream)
        waited.append(now)
        assert isinstance(stream.error, ConnectionLostError)
        assert Forgotten() not in stream.writes(), "it can be resumed to hear the end"
    assert waited == [LOOK_BACK_S, STOPPED_PATIENCE_S]


@spec("STREAM-29")
def test_no_wait_is_longer_than_the_outage_also_after_short_random_waits() -> None:
    stream = ClientStream("a", "secret", now=0.0)
    now = 0.0
    for _ in range(6):  # All within a quarter of a second.
        stream.handle_deadline(now=now)
        stream.end_connection(chance=0.95, now=now)
        now = due_at(stream)
    assert now < 0.3
    stream.handle_deadline(now=now)
    stream.end_connection(chance=0.0, now=now)
    assert due_at(stream) == now + 1.0


@spec("STREAM-77")
def test_no_reconnect_follows_the_end_of_a_cancelled_turn() -> None:
    stream = stream_in_turn()
    stream.abort()
    receive(stream, Ack(1), Events((event(4, TurnEnded(1, TurnStatus.CANCELLED, 2.0)),)))
    assert (stream.is_ended, stream.error, stream.is_connection_wanted) == (True, None, False)
    stream.end_connection(chance=0.0, now=1.0)
    assert (stream.next_deadline(), stream.is_reconnecting) == (None, False)


def _gives_up_at(stream: ClientStream) -> float:
    """Fail every connection; return the time of the stream's end."""
    now = 0.0
    for _ in range(2000):
        stream.end_connection(chance=0.0, now=now)
        if stream.is_ended:
            break
        now = due_at(stream)
        stream.handle_deadline(now=now)
    return now


@spec("STREAM-29")
@pytest.mark.parametrize(("asked_s", "due"), [(None, 0.0), (5.0, 5.0), (60.0, 60.0)])
def test_an_abort_shortens_the_wait_to_the_delay_that_the_server_requested(
    asked_s: float | None, due: float
) -> None:
    stream = stream_in_turn()
    for now in (0.0, 100.0, 200.0, 300.0, 400.0):
        stream.end_connection(ConnectionLostError("gone", retry_after_s=asked_s), chance=0.0, now=now)
        stream.handle_deadline(now=due_at(stream))
    stream.end_connection(ConnectionLostError("gone", retry_after_s=asked_s), chance=0.0, now=500.0)
    assert due_at(stream) == 500.0 + max(16.0, due)
    stream.abort()
    assert due_at(stream) == 500.0 + due


@spec("STREAM-15", "STREAM-77")
@pytest.mark.parametrize("moment", ["live", "waiting", "connecting", "opening"])
def test_an_abort_during_a_reconnect_is_the_next_frame_to_the_server(moment: str) -> None:
    stream = stream_in_turn()
    stop = frames.encode(CommandFrame(1, msgspec.Raw(frames.encode(CancelPayload(1)))))
    moments: dict[str, Callable[[], None]] = {
        "live": lambda: None,
        "waiting": lambda: stream.end_connection(chance=0.0, now=0.0),
        "connecting": lambda: stream.handle_deadline(now=due_at(stream)),
        "opening": lambda: stream.begin_connection(now=0.0),
    }
    sent: list[bytes] = []
    for each, happen in moments.items():
        happen()
        stream.writes()
        sent += stream.frames_to_send()
        if each == moment:
            stream.abort()
            stream.writes()
            sent += stream.frames_to_send()
    assert sent[-1] == stop
    assert b'"type":"open"' in sent[-2], "nothing stands between the open and the stop, not even the welcome"
    receive(stream, Welcome("a", "1-3", "1-3", acked=1, turn=1), Ack(1))
    assert stream.is_acknowledged


@spec("STREAM-9")
@pytest.mark.parametrize(
    "error", [Error("draining", "restarting", "later"), Error("seqno_gap", "no", seqno=1, expected=0)]
)
def test_the_error_of_a_degraded_server_is_the_error_of_the_stream(error: Error) -> None:
    stream = ClientStream("a", "secret", now=0.0)
    stream.submit(DONE)
    stream.handle_deadline(now=0.0)
    stream.begin_connection(now=0.0)
    receive(stream, Welcome("a", "1-1", "1-1", is_degraded=True), error)
    assert stream.error is not None
    assert (stream.is_ended, stream.error.code, stream.is_reconnecting) == (True, error.code, False)
