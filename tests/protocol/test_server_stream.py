"""The server's half of the stream protocol, as stories."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.errors import DrainingError, MidstreamError, SeqnoGapError, SessionBusyError, StreamFencedError
from midstream.history.messages import Finish, Response, Text, ToolCall, ToolResult, UserMessage
from midstream.protocol import frames
from midstream.protocol.frames import (
    KEY_CHARS_MAX,
    NUMBER_MAX,
    START,
    Ack,
    AnswerPayload,
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
    Ping,
    ResultPayload,
    ResumePayload,
    SendPayload,
    ServerFrame,
    SnapshotFrame,
    SnapshotWhen,
    Welcome,
    WithdrawPayload,
)
from midstream.protocol.server_stream import (
    EVENTS_BYTES_MAX,
    NATIVE,
    OPEN_WITHIN_S,
    Admit,
    ServerStream,
    SnapshotDue,
    Submit,
    events_frames,
    turn_status_of,
    waiting_on,
)
from midstream.protocol.stream_settings import StreamSettings
from midstream.session.call_references import CallRef
from midstream.session.calls import CallPlan, Choice, Site
from midstream.session.records import (
    AttemptStarted,
    CallStarted,
    CommandAccepted,
    EpochStarted,
    MessageAccepted,
    MessageQueued,
    MessageWithdrawn,
    Record,
    ResponseCompleted,
    StreamOpened,
    TurnEnded,
    TurnStatus,
)
from midstream.session.retention import Retention
from midstream.session.session import COMMANDS_MAX, Received, Session, fold
from midstream.session.turn.commands import (
    Answer,
    CallFinished,
    Cancel,
    Resume,
    SendMessage,
    WhenBusy,
    Withdraw,
)
from midstream.timing import StallBudgets
from tests.spec import spec

SECRET = "s" * 43
DIGEST = frames.secret_digest_of(SECRET)
HI = SendPayload((Text("hi"),))


@spec("STREAM-3")
def test_the_open_requests_admission_and_the_welcome_answers_it() -> None:
    stream = ServerStream(now=0.0)
    assert stream.next_deadline() is not None
    opened = Open("a", SECRET)
    stream.receive(frames.encode(opened), now=1.0)
    assert stream.requests() == [Admit(opened, None)]
    assert stream.frames_to_send() == []

    stream.admit(_session(EpochStarted(3, "host", 1.0)), epoch_at=None, now=1.0)

    assert _sent_frames(stream) == [Welcome("a", event_id="3-1", resume_from="3-1", began_at=1.0)]
    assert (stream.is_admitted, stream.cursor) == (True, 1)


def test_an_empty_session_begins_before_its_first_record() -> None:
    stream = _open(Open("a", SECRET))
    stream.admit(Session(), epoch_at=None, now=0.0)
    assert _sent_frames(stream) == [Welcome("a", event_id="0-0", resume_from="0-0")]


@spec("STREAM-1")
def test_a_connection_that_never_opens_is_ended() -> None:
    stream = ServerStream(now=5.0)
    stream.handle_deadline(newest=START, waiting_on="nothing", now=5.0 + OPEN_WITHIN_S - 0.1)
    assert (stream.frames_to_send(), stream.is_closed) == ([], False)
    stream.handle_deadline(newest=START, waiting_on="nothing", now=5.0 + OPEN_WITHIN_S)
    assert [_code(frame) for frame in _sent_frames(stream)] == ["connection_lost"]
    assert stream.is_closed


@spec("STREAM-1", "STREAM-2", "STREAM-33")
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b'{"type":"nothing"}',
        frames.encode(CommandFrame(0, msgspec.Raw(frames.encode(HI)))),
        frames.encode(Open("a")),
        frames.encode(Open("a" * (KEY_CHARS_MAX + 1), SECRET)),
        frames.encode(Open("ä", SECRET)),
        frames.encode(Open(" a", SECRET)),
        frames.encode(Open("a\n", SECRET)),
        frames.encode(Open("a", "ß" * 43)),
        frames.encode(Open("a", SECRET, old_secret="ß")),
        frames.encode(Open("a", SECRET, next_seqno=2**53 + 1)),
        frames.encode(Open("a", SECRET, event_id="x")),
        frames.encode(Open("a", SECRET, event_id="9999999999999999999-1")),
        frames.encode(Open("a", SECRET, next_seqno=-1)),
        frames.encode(Open("a", SECRET, connection=-1)),
        frames.encode(Open("a", SECRET, connection=NUMBER_MAX + 1)),
        frames.encode(Open("a", SECRET, cancel_after_s=-1.0)),
        frames.encode(Open("a", SECRET, cancel_after_s=3601.0)),
        frames.encode(Open("a", SECRET, version=0)),
        b'{"type":"open","stream":"a","secret":"s","connection":1' + b"0" * 60 + b"}",
        b'"' + b"x" * frames.FRAME_BYTES_MAX + b'"',
    ],
)
def test_an_invalid_first_frame_ends_the_connection(body: bytes) -> None:
    stream = ServerStream(now=0.0)
    stream.receive(body, now=0.0)
    assert [_code(frame) for frame in _sent_frames(stream)] in (
        ["malformed_frame"],
        ["protocol"],
        ["frame_too_large"],
    )
    assert (stream.is_closed, stream.requests(), stream.next_deadline()) == (True, [], None)


@spec("STREAM-1")
def test_a_second_open_ends_the_connection() -> None:
    stream = _admitted(Open("a", SECRET))
    stream.receive(frames.encode(Open("a", SECRET)), now=0.0)
    assert ([_code(frame) for frame in _sent_frames(stream)], stream.is_closed) == (["protocol"], True)


@spec("STREAM-13")
def test_a_command_is_submitted_and_acked_only_after_its_append() -> None:
    stream = _admitted(Open("a", SECRET))
    raw = frames.encode(HI)
    stream.receive(_command(0, raw), now=0.0)
    command = SendMessage(UserMessage((Text("hi"),)), when_busy=WhenBusy.QUEUE)
    assert stream.requests() == [Submit(0, Received("a", DIGEST, 0, frames.digest_of(raw), command))]
    assert stream.frames_to_send() == []

    stream.acknowledge(0, now=0.0)

    assert _sent_frames(stream) == [Ack(0)]


@spec("STREAM-16")
def test_results_and_aborts_become_commands() -> None:
    stream = _admitted(Open("a", SECRET))
    stream.receive(_command(1, frames.encode(ResultPayload(1, 2, ToolResult("c", "done")))), now=0.0)
    stream.receive(_command(2, frames.encode(CancelPayload(1))), now=0.0)
    commands = [request.received.command for request in stream.requests() if isinstance(request, Submit)]
    assert commands == [CallFinished(1, 2, ToolResult("c", "done")), Cancel(1)]


@spec("STREAM-16")
@pytest.mark.parametrize(
    ("seqno", "payload"),
    [
        (1, frames.encode(HI)),
        (0, frames.encode(SendPayload(()))),
        (0, b'{"type":"dance"}'),
        (-1, frames.encode(CancelPayload())),
        (COMMANDS_MAX + 1, frames.encode(CancelPayload())),
    ],
)
def test_a_command_that_breaks_a_rule_ends_the_connection(seqno: int, payload: bytes) -> None:
    stream = _admitted(Open("a", SECRET))
    stream.receive(_command(seqno, payload), now=0.0)
    assert [_code(frame) for frame in _sent_frames(stream)] == ["malformed_frame"]
    assert (stream.is_closed, stream.requests()) == (True, [])


@spec("STREAM-28")
def test_a_refused_command_gets_its_reason_and_the_connection_continues() -> None:
    stream = _admitted(Open("a", SECRET))
    stream.receive(_command(3, frames.encode(CancelPayload())), now=0.0)
    stream.refuse(3, SeqnoGapError("too early", expected=1), now=0.0)
    stream.refuse(0, SessionBusyError("busy", retry_after_s=2.0), now=0.0)
    assert _sent_frames(stream) == [
        Error("seqno_gap", "too early", "never", seqno=3, expected=1),
        Error("session_busy", "busy", "later", seqno=0, retry_after_s=2.0),
    ]
    assert not stream.is_closed


@spec("STREAM-7")
def test_commands_before_the_admission_wait_for_it() -> None:
    stream = _open(Open("a", SECRET))
    stream.receive(_command(0, frames.encode(HI)), now=0.0)
    assert stream.requests() == []
    stream.admit(Session(), epoch_at=None, now=0.0)
    assert [request.seqno for request in stream.requests() if isinstance(request, Submit)] == [0]


@spec("STREAM-5", "STREAM-7")
def test_commands_before_a_refused_admission_are_dropped() -> None:
    stream = _open(Open("a", "another secret"))
    stream.receive(_command(0, frames.encode(HI)), now=0.0)
    stream.admit(_session(*_five_records()), epoch_at=None, now=0.0)
    assert [_code(frame) for frame in _sent_frames(stream)] == ["wrong_secret"]
    assert (stream.is_closed, stream.requests()) == (True, [])


@spec("STREAM-17")
def test_more_commands_in_flight_than_the_welcome_allows_end_the_connection() -> None:
    stream = _admitted(Open("a", SECRET))
    for seqno in range(frames.IN_FLIGHT_MAX):
        stream.receive(_command(seqno, frames.encode(CancelPayload())), now=0.0)
    assert not stream.is_closed
    stream.acknowledge(0, now=0.0)
    stream.receive(_command(frames.IN_FLIGHT_MAX, frames.encode(CancelPayload())), now=0.0)
    assert not stream.is_closed
    stream.receive(_command(frames.IN_FLIGHT_MAX + 1, frames.encode(CancelPayload())), now=0.0)
    assert stream.is_closed


@spec("STREAM-4")
def test_a_known_stream_continues_at_the_position_of_the_client() -> None:
    stream = _open(Open("a", SECRET, event_id="3-4", next_seqno=1))
    stream.admit(_session(*_five_records()), epoch_at=3, now=0.0)
    welcome = Welcome("a", "3-5", "3-4", 1, 1, "running", "running", began_at=1.0)
    assert _sent_frames(stream) == [welcome]
    assert stream.cursor == 4


@spec("STREAM-4")
def test_a_known_stream_without_an_event_id_starts_at_its_beginning() -> None:
    stream = _open(Open("a", SECRET, next_seqno=1))
    stream.admit(_session(*_five_records()), epoch_at=None, now=0.0)
    assert _sent_frames(stream) == [
        Welcome("a", "3-5", "3-1", 1, 1, turn_status="running", status="running", began_at=1.0)
    ]


@spec("STREAM-19", "STREAM-23")
@pytest.mark.parametrize(("event_id", "epoch_at"), [("2-4", 3), ("3-9", None), ("1-0", None)])
def test_an_event_id_outside_the_journal_is_gone(event_id: str, epoch_at: int | None) -> None:
    stream = _open(Open("a", SECRET, event_id=event_id, next_seqno=1))
    stream.admit(_session(*_five_records()), epoch_at=epoch_at, now=0.0)
    welcome, gone = _sent_frames(stream)
    assert welcome == Welcome("a", "3-5", "3-1", 1, 1, turn_status="running", status="running", began_at=1.0)
    assert gone == Gone("3-1", f"the event {event_id} is not in this session's journal")
    assert stream.cursor == 1


def test_a_reader_with_a_gone_event_starts_at_the_beginning() -> None:
    stream = _open(Open(event_id="2-4"))
    stream.admit(_session(*_five_records()), epoch_at=3, now=0.0)
    assert (stream.cursor, len(stream.frames_to_send())) == (0, 2)


@spec("STREAM-104")
@pytest.mark.parametrize(
    ("event_id", "epoch_at", "began_at"),
    [("1-1", 1, 10.0), ("2-2", 2, 20.0), ("3-3", 3, 30.0), ("2-3", 3, None), ("0-0", None, None)],
)
def test_the_welcome_has_the_start_time_of_the_epoch_of_the_next_events(
    event_id: str, epoch_at: int | None, began_at: float | None
) -> None:
    stream = _open(Open(event_id=event_id))
    stream.admit(_session(*(EpochStarted(n, "x", 10.0 * n) for n in (1, 2, 3))), epoch_at=epoch_at, now=0.0)
    welcome = _sent_frames(stream)[0]
    assert isinstance(welcome, Welcome)
    assert welcome.began_at == began_at


@spec("STREAM-2")
def test_a_reader_may_start_before_the_first_record_and_cannot_send_commands() -> None:
    stream = _open(Open(event_id="0-0"))
    stream.admit(_session(*_five_records()), epoch_at=None, now=0.0)
    assert _sent_frames(stream) == [Welcome("", "3-5", "0-0", status="running")]
    stream.receive(_command(0, frames.encode(HI)), now=0.0)
    assert ([_code(frame) for frame in _sent_frames(stream)], stream.is_closed) == (["protocol"], True)


@spec("STREAM-6")
def test_an_unknown_stream_is_refused() -> None:
    stream = _open(Open("b", SECRET, event_id="3-4", next_seqno=1))
    stream.admit(_session(*_five_records()), epoch_at=3, now=0.0)
    assert _sent_frames(stream) == [Error("stream_not_found", "this session has no stream 'b'")]
    assert stream.is_closed


@spec("STREAM-6")
def test_a_stream_whose_first_command_never_arrived_is_not_unknown() -> None:
    stream = _open(Open("b", SECRET, next_seqno=1))
    stream.admit(_session(*_five_records()), epoch_at=None, now=0.0)
    assert _sent_frames(stream) == [Welcome("b", "3-5", "3-5", status="running", began_at=1.0)]


@spec("STREAM-9")
def test_a_degraded_server_reports_it_in_the_welcome() -> None:
    stream = ServerStream(degraded_reason="no durable store", now=0.0)
    stream.receive(frames.encode(Open("a", SECRET)), now=0.0)
    stream.admit(Session(), epoch_at=None, now=0.0)
    (welcome,) = _sent_frames(stream)
    assert welcome == Welcome("a", "0-0", "0-0", is_degraded=True, reason="no durable store")


@spec("STREAM-20")
def test_stored_bytes_are_sent_unchanged() -> None:
    stream = _admitted(Open())
    odd = b'{"type":"later",  "unknown":1.0}'
    stream.deliver([(EventId(1, 1), odd), (EventId(2, 2), b"{}")], now=0.0)
    (body,) = stream.frames_to_send()
    assert body == b'{"type":"events","events":[{"id":"1-1","record":%b},{"id":"2-2","record":{}}]}' % odd
    assert stream.cursor == 2


@spec("STREAM-20")
def test_frames_of_events_are_bounded_by_number_and_by_bytes() -> None:
    small = [(EventId(1, position), b"{}") for position in range(1, frames.EVENTS_PER_FRAME_MAX + 2)]
    assert [len(_events(body)) for body in events_frames(small)] == [frames.EVENTS_PER_FRAME_MAX, 1]
    big = b'"' + b"x" * (EVENTS_BYTES_MAX * 2 // 3) + b'"'
    many = [(EventId(1, 1), big), (EventId(1, 2), b"{}"), (EventId(1, 3), big), (EventId(1, 4), big)]
    assert [len(_events(body)) for body in events_frames(many)] == [2, 1, 1]


@pytest.mark.parametrize("position", [0, 2])
def test_a_shell_that_skips_or_repeats_a_record_is_stopped(position: int) -> None:
    stream = _admitted(Open())
    with pytest.raises(AssertionError):
        stream.deliver([(EventId(1, position), b"{}")], now=0.0)


def test_a_page_is_encoded_once_for_all_readers_at_its_position() -> None:
    page = NATIVE.page([(EventId(1, 1), b"{}"), (EventId(1, 2), b"{}")])
    streams = [_admitted(Open()), _admitted(Open())]
    for stream in streams:
        assert not stream.has_frames
        stream.pass_on(page, now=0.0)
        assert stream.has_frames
    (ours,), (theirs,) = (stream.frames_to_send() for stream in streams)
    assert ours is theirs
    with pytest.raises(AssertionError):
        streams[0].pass_on(page, now=0.0)
    with pytest.raises(AssertionError):
        NATIVE.page([(EventId(1, 1), b"{}"), (EventId(1, 3), b"{}")])


@spec("STREAM-31")
def test_heartbeats_break_the_silence() -> None:
    stream = ServerStream(heartbeat_s=4.0, now=0.0)
    stream.receive(frames.encode(Open()), now=0.0)
    stream.admit(Session(), epoch_at=None, now=1.0)
    stream.frames_to_send()
    stream.deliver([(EventId(1, 1), b"{}")], now=3.0)
    stream.frames_to_send()
    stream.handle_deadline(newest=EventId(1, 1), waiting_on="model", now=6.9)
    assert stream.frames_to_send() == []
    stream.handle_deadline(newest=EventId(1, 1), waiting_on="model", now=7.0)
    assert _sent_frames(stream) == [HeartbeatFrame("1-1", "model")]
    deadline = stream.next_deadline()
    assert deadline is not None
    assert deadline.at == 11.0


@spec("STREAM-31")
def test_a_ping_is_answered_with_a_heartbeat_at_once() -> None:
    stream = _admitted(Open())
    stream.receive(frames.encode(Ping()), now=2.0)
    stream.handle_deadline(newest=START, waiting_on="nothing", now=2.0)
    assert _sent_frames(stream) == [HeartbeatFrame("0-0", "nothing")]


@spec("STREAM-25")
def test_a_close_ends_the_connection_without_a_frame() -> None:
    stream = _admitted(Open("a", SECRET))
    stream.receive(frames.encode(Close()), now=0.0)
    assert (stream.is_closed, stream.frames_to_send()) == (True, [])


@pytest.mark.parametrize("error", [DrainingError("restarting"), StreamFencedError("a newer connection")])
def test_a_failure_of_the_shell_is_sent_once(error: MidstreamError) -> None:
    stream = _admitted(Open("a", SECRET))
    stream.fail(error, now=0.0)
    stream.fail(error, now=0.0)
    assert _sent_frames(stream) == [Error(error.code, error.message, error.retry)]
    stream.acknowledge(0, now=0.0)
    stream.deliver([(EventId(1, 1), b"{}")], now=0.0)
    stream.receive(b"{", now=0.0)
    assert (stream.is_closed, stream.frames_to_send(), stream.requests()) == (True, [], [])


def test_the_activity_of_a_session_and_the_reason_of_its_wait_are_computed() -> None:
    server, client = (_with_call(site) for site in (Site.SERVER, Site.CLIENT))
    sessions = [Session(), _session(*_five_records()), server, client]
    assert [session.status for session in sessions] == ["", "running", "running", "running"]
    assert [waiting_on(session) for session in sessions] == ["nothing", "model", "tool", "client"]
    ended = fold([(3, TurnEnded(1, TurnStatus.COMPLETED, 4.0))], server)
    assert waiting_on(ended) == "nothing"


@spec("STREAM-31")
def test_a_sub_agent_counts_as_a_tool_unless_it_waits_for_a_person() -> None:
    parent = _with_call(Site.CHILD)
    children = [(), ["model"], ["tool"], ["person"], ["person", "person"], ["person", "model"]]
    waits = ["tool", "tool", "tool", "person", "person", "tool"]
    assert [waiting_on(parent, each) for each in children] == waits
    assert waiting_on(_with_call(Site.SERVER), ["person"]) == "tool"


PAYLOADS: list[frames.Payload] = [
    HI,
    SendPayload(()),
    CancelPayload(2),
    ResultPayload(1, 1, ToolResult("c", "")),
]

_client_frames = st.one_of(
    st.builds(
        Open,
        stream=st.sampled_from(["", "a", "b"]),
        secret=st.sampled_from(["", SECRET, "other"]),
        event_id=st.sampled_from([None, "0-0", "3-4", "3-99", "x"]),
        next_seqno=st.integers(-1, 3),
        version=st.integers(0, 2),
    ).map(frames.encode),
    st.tuples(
        st.integers(-1, 3),
        st.sampled_from(PAYLOADS),
    ).map(lambda pair: _command(pair[0], frames.encode(pair[1]))),
    st.sampled_from([frames.encode(Close()), frames.encode(Ping())]),
    st.binary(max_size=40),
    st.text(max_size=40).map(str.encode),
)


@spec("STREAM-33")
@given(
    st.lists(st.tuples(_client_frames, st.sampled_from(["admit", "ack", "refuse", "time", ""])), max_size=20)
)
def test_no_input_from_a_client_raises(script: list[tuple[bytes, str]]) -> None:
    stream = ServerStream(now=0.0)
    session = _session(*_five_records())
    for number, (body, then) in enumerate(script):
        now = float(number * 4)
        stream.receive(body, now=now)
        match then:
            case "admit":
                stream.admit(session, epoch_at=3, now=now)
            case "ack":
                stream.acknowledge(number % 3, now=now)
            case "refuse":
                stream.refuse(number % 3, SessionBusyError("busy"), now=now)
            case "time":
                stream.handle_deadline(newest=EventId(3, 5), waiting_on="model", now=now)
        assert not (stream.is_closed and stream.requests())
    assert [frame for frame in _sent_frames(stream) if isinstance(frame, Events)] == []


def _open(frame: Open) -> ServerStream:
    stream = ServerStream(now=0.0)
    stream.receive(frames.encode(frame), now=0.0)
    assert [type(request) for request in stream.requests()] == [Admit]
    return stream


def _admitted(frame: Open) -> ServerStream:
    stream = _open(frame)
    stream.admit(Session(), epoch_at=None, now=0.0)
    assert len(stream.frames_to_send()) == 1
    return stream


def _sent_frames(stream: ServerStream) -> list[ServerFrame]:
    return [frames.decode_server(body) for body in stream.frames_to_send()]


def _code(frame: ServerFrame) -> str:
    assert isinstance(frame, Error)
    assert frame.seqno is None
    return frame.code


def _events(body: bytes) -> tuple[EventFrame, ...]:
    frame = frames.decode_server(body)
    assert isinstance(frame, Events)
    return frame.events


def _command(seqno: int, payload: bytes) -> bytes:
    return frames.encode(CommandFrame(seqno, msgspec.Raw(payload)))


def _session(*records: Record) -> Session:
    return fold((3, record) for record in records)


def _five_records() -> tuple[Record, ...]:
    """Return five records: stream `a` has sent `hi`, and the model was called."""
    return (
        EpochStarted(3, "host", 1.0),
        StreamOpened("a", DIGEST),
        CommandAccepted("a", 0, frames.digest_of(frames.encode(HI))),
        MessageAccepted(1, UserMessage.of("hi"), 2.0, stream="a"),
        AttemptStarted(1, 1, 1, 2.0),
    )


def _with_call(site: Site) -> Session:
    response = Response((ToolCall("c", "look"),), Finish.CALLS)
    plans = (CallPlan("c", "digest", site),)
    return _session(
        *_five_records(), ResponseCompleted(1, 1, 1, response, 3.0, plans), CallStarted(1, 1, "c", 1, 3.0)
    )


@spec("STREAM-54")
@pytest.mark.parametrize(
    ("more", "status"),
    [
        ((), "running"),
        ((TurnEnded(1, TurnStatus.CANCELLED, 3.0),), "cancelled"),
        ((TurnEnded(1, TurnStatus.FAILED, 3.0), MessageAccepted(2, UserMessage.of("x"), 4.0)), "failed"),
        (
            (
                TurnEnded(1, TurnStatus.COMPLETED, 3.0),
                MessageAccepted(2, UserMessage.of("x"), 4.0),
                TurnEnded(2, TurnStatus.COMPLETED, 5.0),
            ),
            "ended",
        ),
    ],
)
def test_the_welcome_has_the_status_of_the_streams_turn(more: tuple[Record, ...], status: str) -> None:
    assert turn_status_of(_session(*_five_records(), *more), "a") == status
    assert turn_status_of(_session(*_five_records(), *more), "b") == ""


@spec("STREAM-54")
def test_a_queued_message_is_a_waiting_turn() -> None:
    session = _session(
        *_five_records(), StreamOpened("b", DIGEST), MessageQueued(1, UserMessage.of("x"), 3.0, stream="b")
    )
    assert turn_status_of(session, "b") == "queued"
    session = fold([(3, MessageWithdrawn(1, 4.0, "b"))], session)
    assert turn_status_of(session, "b") == "ended"


@spec("STREAM-54", "STREAM-56")
def test_the_welcome_has_the_settings_and_the_silence_limits() -> None:
    settings = StreamSettings(is_recovery_on=False, look_back_s=60.0, heartbeat_s=2.0, in_flight_max=3)
    stalls = StallBudgets(first_token_s=math.inf, tool_s=5.0)
    stream = ServerStream.under(settings, stalls=stalls, now=0.0)
    stream.receive(frames.encode(Open("a", SECRET)), now=0.0)
    stream.admit(Session(), epoch_at=None, now=0.0)
    (welcome,) = _sent_frames(stream)
    assert isinstance(welcome, Welcome)
    assert (welcome.retention_s, welcome.heartbeat_s, welcome.in_flight_max) == (60.0, 2.0, 3)
    assert (welcome.is_degraded, welcome.reason) == (True, settings.degraded_reason)
    assert (welcome.stall_s["first_token_s"], welcome.stall_s["tool_s"]) == (None, 5.0)


@spec("STREAM-17", "STREAM-56")
def test_a_client_that_exceeds_the_announced_limit_is_ended() -> None:
    stream = ServerStream.under(StreamSettings(in_flight_max=1), now=0.0)
    stream.receive(frames.encode(Open("a", SECRET)), now=0.0)
    stream.admit(Session(), epoch_at=None, now=0.0)
    for seqno in range(2):
        stream.receive(_command(seqno, frames.encode(HI if not seqno else CancelPayload())), now=0.0)
    assert (_code(_sent_frames(stream)[-1]), stream.is_closed) == ("protocol", True)


@spec("STREAM-17", "STREAM-56")
@pytest.mark.parametrize("before", range(4))
def test_a_playback_before_the_limit_is_known_is_accepted(before: int) -> None:
    stream = ServerStream.under(StreamSettings(in_flight_max=1), now=0.0)
    stream.receive(frames.encode(Open("a", SECRET, next_seqno=3)), now=0.0)
    for seqno in range(3):
        if seqno == before:
            stream.admit(Session(), epoch_at=None, now=0.0)
        stream.receive(_command(seqno, frames.encode(CancelPayload() if seqno else HI)), now=0.0)
    stream.admit(Session(), epoch_at=None, now=0.0)
    assert [each.seqno for each in stream.requests() if isinstance(each, Submit)] == [0, 1, 2]
    stream.receive(_command(3, frames.encode(CancelPayload())), now=0.0)
    assert not stream.is_closed, "one command after the welcome is what the welcome allows"
    stream.receive(_command(4, frames.encode(CancelPayload())), now=0.0)
    assert (_code(_sent_frames(stream)[-1]), stream.is_closed) == ("protocol", True)


@spec("STREAM-17")
def test_a_playback_is_limited_by_the_protocol() -> None:
    stream = ServerStream.under(StreamSettings(in_flight_max=1), now=0.0)
    stream.receive(frames.encode(Open("a", SECRET, next_seqno=100)), now=0.0)
    for seqno in range(frames.IN_FLIGHT_MAX):
        stream.receive(_command(seqno, frames.encode(CancelPayload())), now=0.0)
    assert not stream.is_closed
    stream.receive(_command(frames.IN_FLIGHT_MAX, frames.encode(CancelPayload())), now=0.0)
    assert (_code(_sent_frames(stream)[-1]), stream.is_closed) == ("protocol", True)


def _lost(stream: ServerStream) -> None:
    del stream


def _closes(stream: ServerStream) -> None:
    stream.receive(frames.encode(Close()), now=0.0)


def _breaks_a_rule(stream: ServerStream) -> None:
    stream.receive(b"not a frame", now=0.0)


@spec("STREAM-55")
@pytest.mark.parametrize(
    ("end", "after_s"),
    [
        (_lost, 5.0),
        (_breaks_a_rule, 5.0),
        (_closes, None),
        (lambda stream: stream.fail(DrainingError("bye"), now=0.0), None),
        (lambda stream: stream.fail(StreamFencedError("bye"), now=0.0), None),
    ],
)
def test_only_a_lost_connection_cancels_a_turn(
    end: Callable[[ServerStream], None], after_s: float | None
) -> None:
    stream = _admitted(Open("a", SECRET, cancel_after_s=5.0))
    end(stream)
    assert stream.cancels_after_s == after_s
    assert _open(Open("a", SECRET, cancel_after_s=5.0)).cancels_after_s is None
    assert _admitted(Open("a", SECRET)).cancels_after_s is None


@spec("STREAM-50")
@pytest.mark.parametrize(
    ("number", "other", "is_before"),
    [(1, 2, True), (2, 2, False), (3, 2, False), (0, 2, False), (2, 0, False)],
)
def test_the_older_of_two_connections_has_the_lower_number(
    number: int, other: int, *, is_before: bool
) -> None:
    connections = [_admitted(Open("a", SECRET, connection=each)) for each in (number, other)]
    assert connections[0].is_before(connections[1]) is is_before


@spec("STREAM-36")
def test_answers_withdrawals_and_resumes_become_commands() -> None:
    for payload, command in (
        (
            AnswerPayload(1, 2, "c", "d", Choice.DENY, "no"),
            Answer(CallRef(1, 2, "c"), "d", Choice.DENY, "no"),
        ),
        (WithdrawPayload(3), Withdraw(3)),
        (ResumePayload(4), Resume(4)),
    ):
        stream = _admitted(Open("a", SECRET))
        stream.receive(_command(0, frames.encode(payload)), now=0.0)
        (request,) = stream.requests()
        assert isinstance(request, Submit)
        assert request.received.command == command


@spec("STREAM-36")
def test_only_the_first_command_of_a_stream_can_resume_a_turn() -> None:
    stream = _admitted(Open("a", SECRET))
    stream.receive(_command(1, frames.encode(ResumePayload())), now=0.0)
    assert ([_code(frame) for frame in _sent_frames(stream)], stream.is_closed) == (["malformed_frame"], True)


@spec("STREAM-62")
def test_the_welcome_has_the_retention_limits() -> None:
    stream = ServerStream(retention=Retention(60.0, 100, None, 3600.0), now=0.0)
    stream.receive(frames.encode(Open()), now=0.0)
    stream.requests()
    stream.admit(_session(*_five_records()), epoch_at=None, pruned_to=EventId(3, 2), now=0.0)
    [welcome] = _sent_frames(stream)
    assert isinstance(welcome, Welcome)
    limits = {"events_for_s": 60.0, "events_max": 100, "bytes_max": None, "sessions_for_s": 3600.0}
    assert (welcome.oldest, welcome.retention) == (3, limits)


@spec("STREAM-63", "STREAM-64")
@pytest.mark.parametrize("event_id", ["0-0", "3-1", "3-3"])
def test_a_reader_of_pruned_events_gets_a_snapshot(event_id: str) -> None:
    stream = _open(Open(event_id=event_id, snapshots=SnapshotWhen.GONE))
    stream.admit(_session(*_five_records()), epoch_at=None, pruned_to=EventId(3, 4), now=0.0)
    welcome, gone = _sent_frames(stream)
    assert welcome == Welcome("", "3-5", "3-4", status="running", oldest=5, began_at=1.0)
    reason = "the events before position 5 are no longer kept"
    assert gone == Gone("3-4", reason, oldest=5, has_snapshot=True)
    assert (stream.cursor, stream.snapshot_due) == (4, SnapshotDue.BEGINNING)

    stream.show(Session(position=4), EventId(3, 4), b'{"turns":0}', now=0.0)
    assert _sent_frames(stream) == [SnapshotFrame("3-4", msgspec.Raw(b'{"turns":0}'))]
    assert (stream.cursor, stream.snapshot_due) == (4, None)


@spec("STREAM-63")
def test_the_last_pruned_event_is_a_valid_event_id() -> None:
    stream = _open(Open(event_id="3-4", snapshots=SnapshotWhen.GONE))
    stream.admit(_session(*_five_records()), epoch_at=3, pruned_to=EventId(3, 4), now=0.0)
    assert _sent_frames(stream) == [Welcome("", "3-5", "3-4", status="running", oldest=5, began_at=1.0)]
    assert (stream.cursor, stream.snapshot_due) == (4, None)


@spec("STREAM-64")
def test_a_client_that_accepts_no_snapshot_gets_the_oldest_available_position() -> None:
    stream = _open(Open(event_id="3-2", snapshots=SnapshotWhen.NEVER))
    stream.admit(_session(*_five_records()), epoch_at=None, pruned_to=EventId(3, 4), now=0.0)
    _, gone = _sent_frames(stream)
    assert gone == Gone("3-4", "the events before position 5 are no longer kept", oldest=5)
    assert (stream.cursor, stream.snapshot_due) == (4, None)


@spec("STREAM-63")
def test_a_slow_reader_that_is_overtaken_gets_a_snapshot_in_the_middle() -> None:
    stream = _open(Open(event_id="3-1", snapshots=SnapshotWhen.GONE))
    stream.admit(_session(*_five_records()), epoch_at=3, now=0.0)
    stream.frames_to_send()
    stream.lose(EventId(3, 4), now=1.0)
    [gone] = _sent_frames(stream)
    assert (gone.resume_from, gone.has_snapshot) == ("3-4", True)  # type: ignore[union-attr] # it is gone
    with pytest.raises(AssertionError):
        stream.deliver([(EventId(3, 5), b"{}")], now=1.0)
    stream.show(Session(position=4), EventId(3, 4), b"{}", now=1.0)
    stream.deliver([(EventId(3, 5), b"{}")], now=1.0)
    assert [type(frame) for frame in _sent_frames(stream)] == [SnapshotFrame, Events]


@spec("STREAM-65")
def test_a_late_reader_may_start_with_a_snapshot_of_the_session() -> None:
    stream = _open(Open(snapshots=SnapshotWhen.BEGIN))
    session = _session(*_five_records())
    stream.admit(session, epoch_at=None, now=0.0)
    assert stream.snapshot_due is SnapshotDue.NEWEST
    stream.show(session, EventId(3, 5), b"{}", now=0.0)
    assert [type(frame) for frame in _sent_frames(stream)] == [Welcome, SnapshotFrame]
    again = _open(Open(event_id="3-5", snapshots=SnapshotWhen.BEGIN))
    again.admit(session, epoch_at=3, now=0.0)
    assert again.snapshot_due is None
    speaker = _open(Open("a", SECRET, snapshots=SnapshotWhen.BEGIN))
    speaker.admit(session, epoch_at=None, now=0.0)
    assert speaker.snapshot_due is None, "its events begin where it began"


@spec("STREAM-64")
def test_a_snapshot_contains_whether_the_turn_of_its_stream_is_over() -> None:
    over = _session(*_five_records(), TurnEnded(1, TurnStatus.COMPLETED, 2.0))
    stream = _open(Open("a", SECRET, event_id="3-2", next_seqno=1, snapshots=SnapshotWhen.GONE))
    stream.admit(over, epoch_at=None, pruned_to=EventId(3, over.position), now=0.0)
    stream.frames_to_send()
    stream.show(over, EventId(3, over.position), b"{}", now=0.0)
    assert _sent_frames(stream) == [
        SnapshotFrame(f"3-{over.position}", msgspec.Raw(b"{}"), is_over=True, turn=1)
    ]


@spec("STREAM-67")
@pytest.mark.parametrize(
    ("server", "client", "both"), [(0.0, 0.0, 0.0), (0.0, 0.02, 0.02), (0.01, 0.0, 0.01), (5.0, 0.0, 0.1)]
)
def test_events_are_coalesced_for_the_longer_of_both_times(server: float, client: float, both: float) -> None:
    stream = ServerStream(coalesce_s=server, now=0.0)
    stream.receive(frames.encode(Open(coalesce_s=client)), now=0.0)
    assert stream.coalesce_s == both


@spec("STREAM-67")
@pytest.mark.parametrize("coalesce_s", [-0.01, 0.2, 1e300])
def test_a_coalescing_time_above_a_tenth_of_a_second_is_refused(coalesce_s: float) -> None:
    stream = ServerStream(now=0.0)
    stream.receive(frames.encode(Open(coalesce_s=coalesce_s)), now=0.0)
    assert [_code(frame) for frame in _sent_frames(stream)] == ["malformed_frame"]
