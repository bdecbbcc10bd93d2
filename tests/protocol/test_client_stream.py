"""The client's half of the stream protocol, as stories; the server's half responds wherever it can."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.errors import (
    AccessError,
    ConnectionLostError,
    EventsLostError,
    FrameTooLargeError,
    MidstreamError,
    RecordUndecodableError,
    SeqnoGapError,
    SeqnoReusedError,
    SessionBusyError,
    StoreFullError,
    StreamFencedError,
    StreamNotFoundError,
    UsageError,
)
from midstream.history.messages import Text, ToolResult, UserMessage
from midstream.protocol import frames
from midstream.protocol.checkpoint import Checkpoint, CommandKept, CommandsAcked, CursorMoved, Forgotten
from midstream.protocol.client_stream import COMMAND_OVERHEAD_BYTES, STALL_AFTER_S, ClientStream
from midstream.protocol.durable_positions import KnownEpoch
from midstream.protocol.event_inbox import Applied, Forget
from midstream.protocol.frames import (
    FRAME_BYTES_MAX,
    IN_FLIGHT_MAX,
    Ack,
    CancelPayload,
    Close,
    CommandFrame,
    Error,
    EventFrame,
    EventId,
    Events,
    Gone,
    HeartbeatFrame,
    Open,
    Payload,
    ResultPayload,
    SendPayload,
    ServerFrame,
    SnapshotFrame,
    Welcome,
)
from midstream.retries import RETRY_AFTER_MAX_S
from midstream.session import records
from midstream.session.records import (
    CommandAccepted,
    Delta,
    EpochStarted,
    MessageAccepted,
    Record,
    StreamOpened,
    TurnEnded,
    TurnStatus,
)
from tests.spec import spec

HI = SendPayload((Text("hi"),))
HI_BODY = frames.encode(HI)
DONE = ResultPayload(1, 1, ToolResult("c", "done"))


@spec("STREAM-11")
def test_a_command_is_stored_before_it_is_sent() -> None:
    stream = _live()
    assert stream.submit(HI) == 0
    with pytest.raises(AssertionError):
        stream.frames_to_send()
    assert stream.writes() == [CommandKept(0, HI_BODY)]
    assert stream.frames_to_send() == [_command(0, HI)]


@spec("STREAM-7")
def test_the_first_message_is_sent_directly_after_the_open() -> None:
    stream = ClientStream("a", "secret", now=0.0)
    stream.submit(HI)
    stream.handle_deadline(now=0.0)
    assert stream.is_connection_wanted
    stream.begin_connection(now=0.0)
    stream.writes()
    assert stream.frames_to_send() == [frames.encode(Open("a", "secret", None, 1, 1)), _command(0, HI)]


@spec("STREAM-13")
def test_acks_are_cumulative_and_may_repeat() -> None:
    stream = _live(HI, DONE, CancelPayload(1))
    receive(stream, Ack(1))
    assert stream.writes() == [CommandsAcked(1)]
    receive(stream, Ack(0), Ack(1))
    assert (stream.writes(), stream.frames_to_send()) == ([], [])


@spec("STREAM-53")
def test_a_single_ack_acknowledges_only_its_command() -> None:
    stream = _live(HI, DONE, CancelPayload(1))
    receive(stream, Ack(1, is_single=True))
    assert (stream.writes(), stream.is_acknowledged) == ([], False)
    _reconnect(stream)
    assert stream.frames_to_send()[1:] == [_command(0, HI), _command(2, CancelPayload(1))]
    receive(stream, Welcome("a", "1-1", "1-1"), Ack(0, is_single=True))
    assert stream.writes() == [CommandsAcked(1)]
    receive(stream, Ack(2, is_single=True))
    assert (stream.writes(), stream.is_acknowledged) == ([CommandsAcked(2)], True)
    receive(stream, Ack(7, is_single=True))
    assert not stream.is_connection_wanted


@spec("STREAM-17", "STREAM-53")
def test_single_acks_make_room_for_other_commands() -> None:
    stream = _opening(HI, *(DONE for _ in range(5)))
    _reconnect(stream)
    stream.frames_to_send()
    receive(stream, Welcome("a", "1-1", "1-1", in_flight_max=2))
    for _ in range(3):
        stream.submit(DONE)
    stream.writes()
    assert stream.frames_to_send() == []


@spec("STREAM-55")
def test_the_cancel_delay_is_sent_with_every_connection() -> None:
    stream = ClientStream("a", "secret", cancel_after_s=5.0, now=0.0)
    for _ in range(2):
        _reconnect(stream)
        opened = frames.decode_client(stream.frames_to_send()[0])
        assert isinstance(opened, Open)
        assert opened.cancel_after_s == 5.0


def test_an_ack_of_an_unsent_command_drops_the_connection() -> None:
    stream = _live(HI)
    receive(stream, Ack(1))
    assert not stream.is_connection_wanted
    assert not stream.is_ended


@spec("STREAM-10", "STREAM-14")
def test_unacked_commands_are_resent_with_the_same_bytes() -> None:
    stream = _live(HI, DONE, CancelPayload(1))
    receive(stream, Ack(0))
    _reconnect(stream)
    assert stream.frames_to_send() == [
        frames.encode(Open("a", "secret", None, 3, 2)),
        _command(1, DONE),
        _command(2, CancelPayload(1)),
    ]


def test_commands_acknowledged_by_the_welcome_need_no_ack() -> None:
    stream = _opening(HI, DONE)
    receive(stream, Welcome("a", "1-1", "1-1", acked=1))
    assert stream.writes() == [CommandsAcked(0)]


@spec("STREAM-17")
def test_commands_in_flight_are_limited_to_the_servers_maximum() -> None:
    stream = _opening(HI, *(DONE for _ in range(IN_FLIGHT_MAX + 5)))
    assert len(stream.frames_to_send()) == 0
    receive(stream, Welcome("a", "1-1", "1-1"), Ack(2))
    stream.writes()
    assert stream.frames_to_send() == [_command(IN_FLIGHT_MAX + n, DONE) for n in range(3)]


@spec("STREAM-21")
def test_events_are_applied_once_and_in_order() -> None:
    stream = stream_in_turn()
    first, second = (event(4, delta("one")), event(5, delta("two")))
    receive(stream, Events((first,)), Events((first, second)))
    assert stream.events() == [Applied(EventId(1, 4), delta("one")), Applied(EventId(1, 5), delta("two"))]


@spec("STREAM-21")
@pytest.mark.parametrize("event_id", ["1-6", "0-4", "2-3", "nonsense"])
def test_an_event_after_a_gap_drops_the_connection(event_id: str) -> None:
    stream = stream_in_turn()
    receive(stream, Events((EventFrame(event_id, _raw(delta("x"))),)))
    assert (stream.is_connection_wanted, stream.events()) == (False, [])
    _reconnect(stream)
    assert stream.frames_to_send()[0] == frames.encode(Open("a", "secret", "1-3", 1, 2))


@spec("STREAM-22")
def test_records_before_the_streams_first_one_are_ignored() -> None:
    stream = _live(HI)
    before = EpochStarted(2, "host", 1.0)
    opened = StreamOpened("a", "digest")
    receive(stream, Events((event(1, before, epoch=2), event(2, opened, epoch=2))))
    assert stream.events() == [Applied(EventId(2, 2), opened)]


def test_a_stream_unknown_to_the_server_resumes_from_its_beginning() -> None:
    stream = _live(HI)
    receive(stream, Events((event(1, EpochStarted(1, "host", 1.0)),)))
    _reconnect(stream)
    assert stream.frames_to_send()[0] == frames.encode(Open("a", "secret", None, 1, 2))


@spec("STREAM-13")
def test_a_journaled_command_counts_as_acknowledged() -> None:
    stream = _live(HI)
    receive(stream, Events((event(1, StreamOpened("a", "d")), event(2, CommandAccepted("a", 0, "d")))))
    assert stream.writes() == [CommandsAcked(0)]


@spec("STREAM-26")
def test_the_end_of_the_turn_ends_the_stream_and_its_checkpoint_is_deleted_once_handled() -> None:
    stream = stream_in_turn()
    ended = TurnEnded(1, TurnStatus.COMPLETED, 9.0)
    receive(stream, Events((event(4, ended), event(5, delta("of another turn")))))
    assert (stream.is_ended, stream.error) == (True, None)
    assert stream.events() == [Applied(EventId(1, 4), ended)]
    assert stream.writes() == []
    assert stream.frames_to_send() == [frames.encode(Close())]

    stream.mark_handled(EventId(1, 4))

    assert stream.writes() == [Forgotten()]


def test_the_end_of_another_turn_does_not_end_the_stream() -> None:
    stream = stream_in_turn()
    receive(stream, Events((event(4, TurnEnded(7, TurnStatus.COMPLETED, 9.0)),)))
    assert not stream.is_ended


@spec("STREAM-24")
def test_the_cursor_moves_when_the_application_has_handled_an_event() -> None:
    stream = stream_in_turn()
    receive(stream, Events((event(4, delta("x")),)))
    assert stream.writes() == []
    stream.mark_handled(EventId(1, 4))
    assert stream.writes() == [CursorMoved(EventId(1, 4), promised=EventId(1, 3))]


@spec("STREAM-105")
def test_the_newest_epoch_is_stored_with_the_cursor_whatever_frame_carried_it() -> None:
    stream = _opening(HI)
    receive(stream, Welcome("a", "1-1", "1-1", began_at=10.0))
    receive(stream, Events((event(2, StreamOpened("a", "d")), event(3, EpochStarted(2, "x", 20.0), epoch=2))))
    stream.writes()
    stream.mark_handled(EventId(1, 2))
    assert stream.writes() == [CursorMoved(EventId(1, 2), EventId(2, 3), KnownEpoch(2, 20.0))]
    receive(stream, Gone("1-1", "the power was cut"))
    assert stream.writes() == [CursorMoved(None, EventId(2, 3), KnownEpoch(2, 20.0))]


@spec("STREAM-105")
@pytest.mark.parametrize("stream", ["a", ""], ids=["a stream", "a reader"])
@pytest.mark.parametrize("began_at", [20.0, 21.0, None])
def test_a_server_with_another_start_of_the_epoch_has_lost_promised_events(
    stream: str, began_at: float | None
) -> None:
    kept = Checkpoint(stream, "secret", EventId(2, 4), 1, (), EventId(2, 4), KnownEpoch(2, 20.0))
    client = ClientStream.resume(kept, now=0.0)
    _reconnect(client)
    client.frames_to_send()
    receive(client, Welcome(stream, "2-9", "2-4", acked=1, turn=1, began_at=began_at))
    assert client.is_ended is (began_at == 21.0)
    assert client.is_kept is bool(stream)
    if client.is_ended:
        assert isinstance(client.error, EventsLostError)
        assert (client.events(), client.writes()) == ([], [])


@spec("STREAM-6", "STREAM-105")
@pytest.mark.parametrize(
    ("newest", "began_at", "code", "is_kept"),
    [
        ("2-9", 20.0, "stream_not_found", False),
        ("2-9", 21.0, "events_lost", True),
        ("2-3", 20.0, "events_lost", True),
    ],
)
def test_a_rolled_back_server_is_detected_before_its_acks_are_used(
    newest: str, began_at: float, code: str, *, is_kept: bool
) -> None:
    kept = Checkpoint("a", "secret", EventId(2, 4), 2, (), EventId(2, 4), KnownEpoch(2, 20.0))
    client = ClientStream.resume(kept, now=0.0)
    _reconnect(client)
    client.frames_to_send()
    receive(client, Welcome("a", newest, "2-3", acked=1, turn=1, began_at=began_at))
    assert client.error is not None
    assert (client.error.code, client.is_kept) == (code, is_kept)


@spec("STREAM-23")
def test_a_gone_event_resets_the_application_and_restarts() -> None:
    stream = stream_in_turn()
    receive(stream, Gone("1-0", "the power was cut"))
    assert stream.events() == [Forget(EventId(1, 0), "the power was cut")]
    assert stream.writes() == [CursorMoved(None, promised=EventId(1, 3))]
    opened, after = StreamOpened("a", "d"), EpochStarted(2, "host", 1.0)
    receive(stream, Events((event(1, opened), event(2, delta("x")), event(3, delta("y")))))
    receive(stream, Events((event(4, after, epoch=2),)))
    assert stream.events()[0] == Applied(EventId(1, 1), opened)
    assert stream.events() == []


@spec("STREAM-9")
def test_a_degraded_server_means_no_checkpoint_and_no_retry() -> None:
    stream = _opening(HI)
    receive(stream, Welcome("a", "1-1", "1-1", is_degraded=True, reason="no disk"))
    assert stream.writes() == [Forgotten()]
    stream.submit(DONE)
    assert (stream.writes(), stream.frames_to_send()) == ([], [_command(1, DONE)])
    lost = ConnectionLostError("reset")
    stream.end_connection(lost, chance=0.0, now=1.0)
    assert (stream.is_ended, stream.error, stream.is_reconnecting) == (True, lost, False)


@spec("STREAM-8", "STREAM-28")
@pytest.mark.parametrize(
    ("error", "is_kept"),
    [
        (StreamNotFoundError("forgotten"), False),
        (SeqnoReusedError("no"), False),
        (StreamFencedError("a newer connection"), True),
        (AccessError("log in again"), True),
    ],
)
def test_a_classified_refusal_ends_the_stream_with_its_type(error: MidstreamError, *, is_kept: bool) -> None:
    stream = _live(HI)
    receive(stream, Error(error.code, error.message))
    assert stream.is_ended
    assert (type(stream.error), str(stream.error)) == (type(error), str(error))
    assert stream.writes() == ([] if is_kept else [Forgotten()])


@spec("STREAM-28")
def test_a_busy_session_ends_the_stream_with_its_error() -> None:
    stream = _live(HI)
    receive(stream, Error("session_busy", "turn 3 is running", "later", seqno=0))
    assert isinstance(stream.error, SessionBusyError)
    assert stream.writes() == [Forgotten()]


@spec("STREAM-28", "STREAM-29")
def test_a_temporary_refusal_reconnects_after_the_named_delay() -> None:
    stream = _live(HI)
    receive(stream, Error("store_busy", "locked", "later", seqno=0, retry_after_s=7.0))
    assert not stream.is_connection_wanted
    stream.end_connection(chance=0.0, now=10.0)
    assert due_at(stream) == 17.0
    stream.handle_deadline(now=17.0)
    stream.begin_connection(now=17.0)
    assert stream.frames_to_send()[1] == _command(0, HI)


def test_a_temporary_trouble_of_the_server_is_exposed_until_a_command_is_acknowledged() -> None:
    stream = _live(HI)
    receive(stream, Error("store_full", "no space left", "later", seqno=0))
    stream.end_connection(chance=0.0, now=10.0)
    stream.handle_deadline(now=10.0)
    stream.begin_connection(now=10.0)
    receive(stream, Welcome(stream="a", event_id="1-0", resume_from="1-0", heartbeat_s=10.0))
    assert isinstance(stream.trouble, StoreFullError)
    receive(stream, Ack(0))
    assert stream.trouble is None


def test_a_requested_delay_is_bounded() -> None:
    stream = _live(HI)
    receive(stream, Error("draining", "restarting", "later", retry_after_s=1e9))
    stream.end_connection(chance=0.0, now=0.0)
    assert due_at(stream) == RETRY_AFTER_MAX_S


@spec("STREAM-28")
def test_a_gap_that_can_be_filled_is_filled_by_playback() -> None:
    stream = _live(HI, DONE)
    receive(stream, Error("seqno_gap", "command 0 first", seqno=1, expected=0))
    assert (stream.is_ended, stream.is_connection_wanted) == (False, False)


def test_a_gap_that_cannot_be_filled_ends_the_stream() -> None:
    stream = _live(HI, DONE)
    receive(stream, Ack(0), Error("seqno_gap", "command 0 first", seqno=1, expected=0))
    assert isinstance(stream.error, SeqnoGapError)


@spec("STREAM-6")
def test_a_server_that_lost_acknowledged_commands_has_lost_the_stream() -> None:
    stream = _live(HI)
    receive(stream, Ack(0))
    _reconnect(stream)
    receive(stream, Welcome("a", "5-9", "5-9", acked=0))
    assert isinstance(stream.error, StreamNotFoundError)


@spec("STREAM-11")
def test_a_checkpoint_older_than_the_sent_commands_never_reuses_a_number() -> None:
    stream = _opening(HI)
    receive(stream, Welcome("a", "1-9", "1-0", acked=2))
    assert isinstance(stream.error, SeqnoReusedError)


@spec("STREAM-29")
def test_the_first_reconnect_is_immediate_and_later_waits_grow_to_30_s() -> None:
    stream = ClientStream("a", "secret", now=0.0)
    waits = []
    now = 0.0
    for _ in range(8):
        stream.handle_deadline(now=now)
        assert stream.is_connection_wanted
        stream.end_connection(chance=0.0, now=now)
        assert stream.is_reconnecting
        waits.append(due_at(stream) - now)
        now = due_at(stream)
    assert waits == [0.0, 1.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0]


def test_random_jitter_spreads_the_waits() -> None:
    stream = ClientStream("a", "secret", now=0.0)
    for now in (0.0, 10.0, 20.0):
        stream.handle_deadline(now=now)
        stream.end_connection(chance=0.75, now=now)
    assert due_at(stream) == 20.5


@spec("STREAM-29")
def test_a_welcome_alone_is_no_progress_but_an_event_is() -> None:
    stream = stream_in_turn()
    stream.end_connection(chance=0.0, now=0.0)
    for _ in range(2):
        now = due_at(stream)
        stream.handle_deadline(now=now)
        stream.begin_connection(now=now)
        receive(stream, Welcome("a", "1-3", "1-3", acked=1, turn=1))
        assert not stream.is_reconnecting
        stream.end_connection(chance=0.0, now=now)
    assert due_at(stream) == 2.0
    stream.handle_deadline(now=2.0)
    stream.begin_connection(now=2.0)
    receive(stream, Welcome("a", "1-4", "1-3", acked=1, turn=1), Events((event(4, delta("x")),)))
    stream.end_connection(chance=0.0, now=50.0)
    assert due_at(stream) == 50.0


@spec("STREAM-29")
def test_after_the_patience_the_stream_ends_and_can_still_be_resumed() -> None:
    stream = ClientStream("a", "secret", patience_s=60.0, now=0.0)
    now = 0.0
    for _ in range(20):
        stream.handle_deadline(now=now)
        stream.end_connection(chance=0.0, now=now)
        if stream.is_ended:
            break
        now = due_at(stream)
    assert isinstance(stream.error, ConnectionLostError)
    assert (now, stream.writes()) == (60.0, [])


def test_a_permanent_transport_error_ends_the_stream() -> None:
    stream = ClientStream("a", "secret", now=0.0)
    stream.handle_deadline(now=0.0)
    error = AccessError("401")
    stream.end_connection(error, chance=0.0, now=0.0)
    assert (stream.is_ended, stream.error) == (True, error)


@spec("STREAM-32")
def test_silence_for_three_heartbeats_drops_the_connection() -> None:
    stream = _opening(HI)
    stream.receive(frames.encode(Welcome("a", "1-0", "1-0", heartbeat_s=2.0)), now=1.0)
    assert due_at(stream) == 7.0
    stream.receive(frames.encode(HeartbeatFrame("1-0", "model")), now=5.0)
    assert stream.waiting_on == "model"
    stream.handle_deadline(now=10.9)
    assert stream.is_connection_wanted
    stream.note_traffic(now=10.9)
    stream.handle_deadline(now=11.0)
    assert stream.is_connection_wanted
    stream.handle_deadline(now=16.9)
    assert not stream.is_connection_wanted


@spec("STREAM-32")
def test_an_event_announced_twice_that_never_comes_is_lost() -> None:
    stream = stream_in_turn()
    receive(stream, HeartbeatFrame("1-4"))
    assert stream.is_connection_wanted
    receive(stream, HeartbeatFrame("1-5"))
    assert not stream.is_connection_wanted


@spec("STREAM-14")
def test_a_command_unacknowledged_after_three_heartbeats_is_resent() -> None:
    stream = _live(HI)
    receive(stream, *[HeartbeatFrame("0-0")] * 2)
    wanted = [stream.is_connection_wanted]
    receive(stream, HeartbeatFrame("0-0"))
    assert [*wanted, stream.is_connection_wanted] == [True, False]
    _reconnect(stream)
    assert stream.frames_to_send()[1:] == [_command(0, HI)]


def test_repeated_heartbeats_keep_a_connection_without_unacknowledged_commands() -> None:
    stream = stream_in_turn()
    receive(stream, *[HeartbeatFrame("1-3")] * 9)
    assert stream.is_connection_wanted


@spec("STREAM-15")
def test_an_abort_is_numbered_once_and_resent() -> None:
    stream = stream_in_turn()
    stream.abort()
    stream.abort()
    assert stream.writes() == [CommandKept(1, frames.encode(CancelPayload(1)))]
    assert stream.frames_to_send() == [_command(1, CancelPayload(1))]
    _reconnect(stream)
    assert stream.frames_to_send()[1:] == [_command(1, CancelPayload(1))]


def test_an_abort_before_the_turn_is_known_names_none() -> None:
    stream = _live(HI)
    stream.abort()
    assert stream.writes() == [CommandKept(1, frames.encode(CancelPayload()))]


def test_an_abort_numbered_before_a_crash_is_not_numbered_again() -> None:
    kept = ((1, frames.encode(CancelPayload())),)
    stream = ClientStream.resume(Checkpoint("a", "secret", None, 2, kept), now=0.0)
    stream.abort()
    assert stream.writes() == []


@spec("STREAM-26")
def test_a_stream_that_only_cancels_a_turn_ends_with_its_ack() -> None:
    stream = _live(CancelPayload())
    stream.finish()
    assert not stream.is_ended
    receive(stream, Ack(0))
    assert (stream.is_ended, stream.error) == (True, None)
    assert stream.writes() == [CommandsAcked(0), Forgotten()]
    assert stream.frames_to_send() == [frames.encode(Close())]


@spec("STREAM-25")
def test_detaching_leaves_everything_unchanged() -> None:
    stream = stream_in_turn()
    stream.detach()
    assert (stream.is_ended, stream.error, stream.writes()) == (True, None, [])
    assert stream.frames_to_send() == [frames.encode(Close())]
    stream.detach()
    assert stream.frames_to_send() == []


@spec("STREAM-18")
def test_a_command_submitted_after_detaching_is_stored_for_the_next_process() -> None:
    # A tool that ends while its client detaches: its outcome is stored, so its command must be.
    stream = stream_in_turn()
    stream.detach()
    stream.frames_to_send()
    assert stream.submit(DONE) == 1
    assert (stream.writes(), stream.frames_to_send()) == ([CommandKept(1, frames.encode(DONE))], [])


def test_a_command_submitted_after_the_end_of_the_turn_is_dropped() -> None:
    stream = stream_in_turn()
    receive(stream, Events((event(4, TurnEnded(1, TurnStatus.COMPLETED, 2.0)),)))
    stream.writes()
    stream.submit(DONE)
    assert stream.writes() == []


@spec("STREAM-50")
def test_connections_are_numbered_upwards_also_by_the_next_process() -> None:
    checkpoint = Checkpoint("a", "secret", EventId(1, 7), 1)
    numbers = []
    for life in (0, 1, 5):
        stream = ClientStream.resume(checkpoint, life=life, now=0.0)
        for _ in range(2):
            _reconnect(stream)
            opened = frames.decode_client(stream.frames_to_send()[0])
            assert isinstance(opened, Open)
            numbers.append(opened.connection)
    assert numbers == sorted(set(numbers))


def test_a_resumed_stream_continues_from_its_checkpoint() -> None:
    checkpoint = Checkpoint(
        "a", "secret", EventId(1, 7), 3, ((1, frames.encode(DONE)), (2, b'{"type":"cancel"}'))
    )
    stream = ClientStream.resume(checkpoint, now=0.0)
    stream.handle_deadline(now=0.0)
    stream.begin_connection(now=0.0)
    assert stream.frames_to_send() == [
        frames.encode(Open("a", "secret", "1-7", 3, 1)),
        _command(1, DONE),
        frames.encode(CommandFrame(2, msgspec.Raw(b'{"type":"cancel"}'))),
    ]
    receive(stream, Welcome("a", "1-9", "1-7", acked=1, turn=4))
    assert stream.turn == 4


def test_a_stream_resumed_before_its_first_event_still_waits_for_its_own() -> None:
    stream = ClientStream.resume(Checkpoint("a", "secret", None, 1, ((0, HI_BODY),)), now=0.0)
    stream.handle_deadline(now=0.0)
    stream.begin_connection(now=0.0)
    receive(stream, Welcome("a", "1-9", "1-9"), Events((event(10, EpochStarted(2, "host", 1.0), epoch=2),)))
    assert stream.events() == []


def test_a_reader_sends_no_commands_and_continues_past_the_end_of_turns() -> None:
    stream = ClientStream(after=EventId(1, 3), now=0.0)
    with pytest.raises(UsageError):
        stream.submit(HI)
    stream.handle_deadline(now=0.0)
    stream.begin_connection(now=0.0)
    assert stream.frames_to_send() == [frames.encode(Open(event_id="1-3"))]
    ended = TurnEnded(1, TurnStatus.COMPLETED, 9.0)
    receive(stream, Welcome("", "1-4", "1-3"), Events((event(4, ended),)))
    assert (stream.events(), stream.is_ended) == ([Applied(EventId(1, 4), ended)], False)
    _reconnect(stream)
    assert stream.frames_to_send() == [frames.encode(Open(event_id="1-4"))]
    assert stream.writes() == []


def test_half_of_a_character_is_refused_before_anything_changes() -> None:
    stream = _live()
    with pytest.raises(UsageError, match="lone surrogate at index 1"):
        stream.submit(SendPayload((Text("a\ud800b"),)))
    assert (stream.writes(), stream.frames_to_send()) == ([], [])
    assert stream.submit(SendPayload((Text("ab"),))) == 0


def test_a_payload_too_large_for_a_frame_is_refused_before_anything_changes() -> None:
    stream = _live()
    with pytest.raises(FrameTooLargeError):
        stream.submit(SendPayload((Text("x" * FRAME_BYTES_MAX),)))
    assert stream.writes() == []
    size = FRAME_BYTES_MAX - COMMAND_OVERHEAD_BYTES - len(frames.encode(SendPayload((Text(""),))))
    assert stream.submit(SendPayload((Text("x" * size),))) == 0
    stream.writes()
    (frame,) = stream.frames_to_send()
    assert len(frame) <= FRAME_BYTES_MAX


@spec("STREAM-34")
def test_an_undecodable_record_of_a_known_type_ends_the_stream_and_keeps_the_checkpoint() -> None:
    stream = stream_in_turn()
    receive(stream, Events((EventFrame("1-4", msgspec.Raw(b'{"type":"delta","turn":"later"}')),)))
    assert isinstance(stream.error, RecordUndecodableError)
    assert stream.writes() == []


_ids = st.sampled_from(["0-0", "1-3", "1-4", "1-5", "2-4", "x", "1-99999999999999999999"])
_records = st.sampled_from(
    [
        records.encode(_record)
        for _record in (
            StreamOpened("a", "d"),
            CommandAccepted("a", 0, "d"),
            CommandAccepted("a", 5, "d"),
            MessageAccepted(1, UserMessage.of("hi"), 1.0, stream="a"),
            TurnEnded(1, TurnStatus.COMPLETED, 1.0),
        )
    ]
    + [b"{}", b"1", b'{"type":"later"}']
).map(msgspec.Raw)
_numbers = st.one_of(st.integers(-2, 6), st.sampled_from([2**63, 2**70]))
_server_frames = st.one_of(
    st.builds(
        Welcome,
        stream=st.just("a"),
        event_id=_ids,
        resume_from=_ids,
        acked=_numbers,
        turn=_numbers,
        is_degraded=st.booleans(),
        heartbeat_s=st.floats(-1.0, 1e12),
        in_flight_max=_numbers,
    ),
    st.builds(Ack, _numbers),
    st.builds(Events, st.lists(st.builds(EventFrame, _ids, _records), max_size=4).map(tuple)),
    st.builds(Gone, _ids, st.just("gone"), st.integers(), st.booleans()),
    st.builds(SnapshotFrame, _ids, st.just(msgspec.Raw(b"{}")), st.booleans()),
    st.builds(HeartbeatFrame, _ids, st.text(max_size=5)),
    st.builds(
        Error,
        st.sampled_from(["seqno_gap", "draining", "session_busy", "stream_fenced", "unheard_of"]),
        st.text(max_size=5),
        st.sampled_from(["never", "later", "now", "perhaps"]),
        seqno=st.none() | _numbers,
        expected=st.none() | _numbers,
        retry_after_s=st.none() | st.floats(-1.0, 1e12),
    ),
).map(frames.encode)


@spec("STREAM-33")
@given(
    st.booleans(),
    st.lists(
        st.tuples(
            _server_frames | st.binary(max_size=30),
            st.sampled_from(["", "", "cut", "send", "cancel", "time", "handled"]),
        ),
        max_size=25,
    ),
)
def test_no_input_from_a_server_raises(is_reader: bool, script: list[tuple[bytes, str]]) -> None:  # noqa: FBT001
    stream = ClientStream(now=0.0) if is_reader else ClientStream("a", "secret", now=0.0)
    for number, (body, then) in enumerate(script):
        now = float(number * 40)
        stream.handle_deadline(now=now)
        stream.begin_connection(now=now)
        stream.receive(body, now=now)
        match then:
            case "cut":
                stream.end_connection(chance=0.5, now=now)
            case "send" if not is_reader:
                stream.submit(DONE)
            case "cancel" if not is_reader:
                stream.abort()
            case "handled":
                stream.mark_handled(EventId(1, number))
            case "time":
                stream.handle_deadline(now=now + 39.0)
        stream.writes()
        stream.frames_to_send()
        positions = [event.event_id.position for event in stream.events() if isinstance(event, Applied)]
        assert all(after == before + 1 for before, after in itertools.pairwise(positions))
        if not stream.is_connection_wanted:
            stream.end_connection(chance=0.5, now=now)


def _opening(*sent: Payload, stall_after_s: float = STALL_AFTER_S) -> ClientStream:
    """Return a stream that has sent its open and these payloads after it."""
    stream = ClientStream("a", "secret", stall_after_s=stall_after_s, now=0.0)
    for payload in sent:
        stream.submit(payload)
    stream.handle_deadline(now=0.0)
    stream.begin_connection(now=0.0)
    stream.writes()
    stream.frames_to_send()
    return stream


def _live(*sent: Payload, stall_after_s: float = STALL_AFTER_S) -> ClientStream:
    stream = _opening(*sent, stall_after_s=stall_after_s)
    receive(stream, Welcome("a", "0-0", "0-0"))
    assert (stream.writes(), stream.frames_to_send()) == ([], [])
    return stream


def stream_in_turn(stall_after_s: float = STALL_AFTER_S) -> ClientStream:
    """Return a stream whose message opened turn 1, at event 1-3."""
    stream = _live(HI, stall_after_s=stall_after_s)
    message = MessageAccepted(1, UserMessage.of("hi"), 1.0, stream="a")
    opened: tuple[Record, ...] = (StreamOpened("a", "d"), CommandAccepted("a", 0, "d"), message)
    receive(stream, Events(tuple(event(number, record) for number, record in enumerate(opened, 1))))
    assert [type(event) for event in stream.events()] == [Applied] * 3
    stream.writes()
    return stream


def _reconnect(stream: ClientStream) -> None:
    stream.end_connection(chance=0.0, now=0.0)
    stream.handle_deadline(now=due_at(stream))
    stream.writes()
    stream.begin_connection(now=0.0)


def receive(stream: ClientStream, *received: ServerFrame) -> None:
    for frame in received:
        stream.receive(frames.encode(frame), now=0.0)


def due_at(stream: ClientStream) -> float:
    deadline = stream.next_deadline()
    assert deadline is not None
    return deadline.at


def _command(seqno: int, payload: Payload) -> bytes:
    return frames.encode(CommandFrame(seqno, msgspec.Raw(frames.encode(payload))))


def event(position: int, record: Record, *, epoch: int = 1) -> EventFrame:
    return EventFrame(f"{epoch}-{position}", _raw(record))


def _raw(record: Record) -> msgspec.Raw:
    return msgspec.Raw(records.encode(record))


def delta(text: str) -> Delta:
    return Delta(1, 1, 1, 0, "text", text)
