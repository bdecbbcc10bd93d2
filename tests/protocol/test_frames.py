"""Frames on the wire: their JSON, their limits, and unknown parts."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.errors import FrameTooLargeError, MalformedFrameError
from midstream.history.messages import File, Outcome, Text, ToolResult
from midstream.number_checks import WAIT_S_MAX
from midstream.protocol import frames
from midstream.protocol.frames import (
    EVENT_NUMBER_MAX,
    FRAME_BYTES_MAX,
    Ack,
    AnswerPayload,
    CancelPayload,
    ClientFrame,
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
    Ping,
    ResultPayload,
    ResumePayload,
    SendPayload,
    ServerFrame,
    Welcome,
    WithdrawPayload,
)
from midstream.session.calls import Choice
from midstream.session.turn.commands import WhenBusy
from tests.spec import spec

RAW = msgspec.Raw(b'{"a":1}')
FROM_CLIENT: list[ClientFrame] = [Open("a", "s", "1-2", 3), Open(), CommandFrame(7, RAW), Close(), Ping()]
FROM_SERVER: list[ServerFrame] = [
    Welcome("a", "1-2", "1-1", acked=3, is_degraded=True, reason="no disk"),
    Ack(4),
    Events((EventFrame("1-2", RAW), EventFrame("1-3", RAW))),
    Gone("1-0", "pruned"),
    Error("seqno_gap", "text", "never", seqno=4, expected=2, retry_after_s=1.5),
    HeartbeatFrame("1-2", "tool"),
]
PAYLOADS: list[Payload] = [
    SendPayload((Text("hi"), File("image/png", url="u"))),
    ResultPayload(1, 2, ToolResult("c\n1", "\0 ü", Outcome.UNKNOWN)),
    CancelPayload(3),
    CancelPayload(),
    SendPayload((Text("hi"),), when_busy=WhenBusy.REFUSE),
    AnswerPayload(1, 2, "c", "d", Choice.ALLOW, arguments="{}"),
    WithdrawPayload(),
    WithdrawPayload(2),
    ResumePayload(3),
]


@pytest.mark.parametrize("frame", FROM_CLIENT)
def test_a_client_frame_is_decoded_as_it_was_encoded(frame: ClientFrame) -> None:
    assert frames.decode_client(frames.encode(frame)) == frame


@pytest.mark.parametrize("frame", FROM_SERVER)
def test_a_server_frame_is_decoded_as_it_was_encoded(frame: ServerFrame) -> None:
    assert frames.decode_server(frames.encode(frame)) == frame


@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_payload_survives_its_command_byte_for_byte(payload: Payload) -> None:
    body = frames.encode(payload)
    command = frames.decode_client(frames.encode(CommandFrame(0, msgspec.Raw(body))))
    assert isinstance(command, CommandFrame)
    assert bytes(command.payload) == body
    assert frames.decode_payload(command.payload) == payload
    assert frames.digest_of(command.payload) == frames.digest_of(body)


@spec("STREAM-34")
def test_unknown_members_are_ignored() -> None:
    assert frames.decode_client(b'{"type":"ping","later":[1]}') == Ping()
    assert frames.decode_server(b'{"type":"ack","seqno":1,"later":{}}') == Ack(1)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"type":"later"}', b'{"type":"command"}', b"\xff", b"[" * 9999]
)
def test_bytes_that_are_no_frame_are_refused(body: bytes) -> None:
    for decode in (frames.decode_client, frames.decode_server, frames.decode_payload):
        with pytest.raises(MalformedFrameError):
            decode(body)


def _sending(**limits: object) -> bytes:
    tool = {"spec": {"name": "t"}, **limits}
    return msgspec.json.encode({"type": "send", "parts": [{"type": "text", "text": "hi"}], "tools": [tool]})


@spec("SEC-78")
@pytest.mark.parametrize("name", ["answer_s", "timeout_s"])
@pytest.mark.parametrize("seconds", [-1, -1e-9, 1e300, WAIT_S_MAX + 1, 2**63])
def test_a_time_limit_out_of_bounds_is_refused(name: str, seconds: float) -> None:
    with pytest.raises(MalformedFrameError, match="a time limit of a tool has 0 to "):
        frames.decode_payload(_sending(**{name: seconds}))
    payload = frames.decode_payload(_sending(**{name: WAIT_S_MAX}))
    assert isinstance(payload, SendPayload)
    assert getattr(payload.tools[0], name) == WAIT_S_MAX


@spec("SEC-27")
def test_several_approvers_of_a_tool_that_needs_no_approval_are_refused() -> None:
    for wrong in ({"approvers": 2}, {"approvers": 0}, {"approvers": 11, "needs_approval": True}):
        with pytest.raises(MalformedFrameError, match="a tool that needs approval has 1 to 10 approvers"):
            frames.decode_payload(_sending(**wrong))
    payload = frames.decode_payload(_sending(approvers=2, needs_approval=True))
    assert isinstance(payload, SendPayload)
    assert payload.tools[0].approvers == 2


@spec("SEC-75")
def test_a_tool_whose_schema_is_nested_too_deeply_is_refused() -> None:
    def sending(levels: int) -> bytes:
        schema = b'{"a":' * levels + b"1" + b"}" * levels
        tool = b'{"spec":{"name":"t","parameters":%b}}' % schema
        return b'{"type":"send","parts":[{"type":"text","text":"hi"}],"tools":[%b]}' % tool

    assert isinstance(frames.decode_payload(sending(64)), SendPayload)
    for levels in (65, 900, 5000):
        with pytest.raises(MalformedFrameError):
            frames.decode_payload(sending(levels))


def test_an_error_message_quotes_little_of_the_refused_input() -> None:
    long = "x" * (FRAME_BYTES_MAX - 100)
    for body in (
        f'{{"type":"{long}"}}',
        f'{{"type":"open","event_id":{{"{long}":1}}}}',
        f'{{"type":"{long[:500]}',
    ):
        for decode in (frames.decode_client, frames.decode_server, frames.decode_payload):
            with pytest.raises(MalformedFrameError) as refused:
                decode(body.encode())
            assert len(refused.value.message) < 300
    with pytest.raises(MalformedFrameError) as refused:
        EventId.parse(long)
    assert len(refused.value.message) < 100


@spec("STREAM-17")
def test_a_frame_above_the_limit_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(FrameTooLargeError):
        frames.decode_client(b"x" * (FRAME_BYTES_MAX + 1))
    with pytest.raises(MalformedFrameError):
        frames.decode_client(b"x" * FRAME_BYTES_MAX)


@spec("STREAM-19")
@given(st.integers(0, EVENT_NUMBER_MAX), st.integers(0, EVENT_NUMBER_MAX))
def test_an_event_id_is_parsed_as_it_was_written(epoch: int, position: int) -> None:
    event_id = EventId(epoch, position)
    assert EventId.parse(str(event_id)) == event_id


@pytest.mark.parametrize(
    "text", ["", "00", "1", "1-", "-1", "1-2-3", "a-b", "1--2", "+1-2", " 1-2", "²-1", f"{2**63}-0", "1" * 99]
)
def test_a_malformed_event_id_is_refused(text: str) -> None:
    with pytest.raises(MalformedFrameError):
        EventId.parse(text)


def test_a_single_zero_is_the_beginning_like_two_zeros() -> None:
    assert EventId.parse("0") == EventId.parse("0-0") == EventId(0, 0)


@pytest.mark.parametrize("text", [f"{1:020}-1", f"1-{1:020}", "\uff11-1", "1-\u0663", "1-1 ", "1_0-1"])
def test_an_event_id_has_at_most_nineteen_plain_digits(text: str) -> None:
    with pytest.raises(MalformedFrameError):
        EventId.parse(text)
    assert EventId.parse(f"{1:019}-{2:019}") == EventId(1, 2)


def test_a_secret_and_a_command_never_share_a_digest() -> None:
    assert frames.secret_digest_of("x") != frames.secret_digest_of("y")
    assert not frames.secret_digest_of("x").startswith(frames.digest_of(b"x"))
