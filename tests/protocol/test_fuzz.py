"""Whatever comes over a wire: nothing is raised that is not said to be.

Frames are made from good ones, of which one member is taken out or replaced by any JSON; and from any bytes.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from midstream.core import frames, records
from midstream.core.calls import Choice
from midstream.core.client_stream import Applied, ClientStream
from midstream.core.frames import (
    AbortPayload,
    Ack,
    AnswerPayload,
    Chunk,
    ClientFrame,
    Close,
    Error,
    Event,
    Events,
    Gone,
    Heartbeat,
    Open,
    Ping,
    ResultPayload,
    ResumePayload,
    SayPayload,
    Welcome,
    WithdrawPayload,
)
from midstream.core.messages import Result, Text, UserMessage
from midstream.core.records import MessageAccepted, StreamOpened, TurnEnded, TurnStatus
from midstream.core.server_stream import Admit, ServerStream, Submit
from midstream.core.session import Session, decide, fold
from midstream.core.turn import Refused
from midstream.errors import FrameTooLargeError, MalformedFrameError
from tests.spec import spec

SECRET = "s" * 43
PAYLOADS = [
    frames.encode(payload)
    for payload in (
        SayPayload((Text("hi"),)),
        ResultPayload(1, 1, Result("c", "done")),
        AbortPayload(),
        AnswerPayload(1, 1, "c", "d", Choice.ALLOW),
        WithdrawPayload(1),
        ResumePayload(1),
    )
]
GOOD: tuple[ClientFrame, ...] = (
    Open("a", SECRET, "1-1", 1, 1, 5.0),
    *(Chunk(number, msgspec.Raw(payload)) for number, payload in enumerate(PAYLOADS)),
    Chunk(0, msgspec.Raw(PAYLOADS[0])),
    Ping(),
    Close(),
)
CLIENT_FRAMES = [frames.encode(frame) for frame in GOOD]


def _event(position: int, record: records.Record) -> Event:
    return Event(f"1-{position}", msgspec.Raw(records.encode(record)))


SERVER_FRAMES = [
    frames.encode(frame)
    for frame in (
        Welcome("a", "1-1", "1-1", acked=1, turn=1),
        Welcome("a", "1-1", "1-1", is_degraded=True),
        Ack(0),
        Ack(1, is_single=True),
        Events(
            (
                _event(2, StreamOpened("a", "d")),
                _event(3, MessageAccepted(1, UserMessage.of("x"), 0.0, stream="a")),
            )
        ),
        Events((_event(4, TurnEnded(1, TurnStatus.COMPLETED, 0.0)),)),
        Gone("1-1", "pruned"),
        Error("draining", "no", "later", retry_after_s=1.0),
        Error("seqno_gap", "no", seqno=1, expected=0),
        Heartbeat("1-9", "model"),
    )
]
_any_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.sampled_from(["1-2", "9" * 19 + "-1", "never", "later", "\x00", "a" * 300]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def _bent(draw: st.DrawFn, good: list[bytes]) -> bytes:
    """Return a good frame, or one with a member that is not."""
    frame: dict[str, Any] = json.loads(draw(st.sampled_from(good)))
    if draw(st.booleans()):
        return json.dumps(frame).encode()
    inner = frame
    while isinstance(inner.get("payload"), dict) and draw(st.booleans()):
        inner = inner["payload"]
    name = draw(st.sampled_from([*inner, "colour"]))
    if draw(st.booleans()):
        inner.pop(name, None)
    else:
        inner[name] = draw(_any_json)
    body = json.dumps(frame).encode()
    return body[: draw(st.integers(0, len(body)))] if draw(st.integers(0, 9)) == 0 else body


_deep = st.sampled_from(
    [b"[" * 100_000, b'{"type":' * 50_000, b'{"type":"chunk","seqno":0,"payload":' * 20_000, b"\xff\xfe"]
)
_said_by_clients = _bent(CLIENT_FRAMES) | st.binary(max_size=60) | _deep
_said_by_servers = _bent(SERVER_FRAMES) | st.binary(max_size=60) | _deep


@given(_said_by_clients | _bent(PAYLOADS))
def test_a_decoder_raises_nothing_but_what_it_says(body: bytes) -> None:
    for decode in (frames.decode_client, frames.decode_server, frames.decode_payload):
        with suppress(MalformedFrameError, FrameTooLargeError):
            decode(body)


@spec("STREAM-33")
@given(st.lists(_said_by_clients, max_size=12))
def test_a_server_stays_upright_whatever_a_client_says(said: list[bytes]) -> None:
    """With the real judgement behind it: what is refused is refused as `Refused`, and what is accepted folds."""
    session, stream = Session(), ServerStream(now=0.0)
    for body in said:
        stream.receive(body, now=0.0)
        for request in stream.requests():
            match request:
                case Admit():
                    stream.admit(session, epoch_at=None, now=0.0)
                case Submit(seqno, chunk):
                    try:
                        decided = decide(session, chunk, epoch=1, at=0.0)
                    except Refused as refused:
                        stream.refused(seqno, refused.error, now=0.0)
                    else:
                        session = fold(((1, record) for record in decided), session)
                        stream.accepted(seqno, now=0.0)
        for frame in stream.frames_to_send():
            frames.decode_server(frame)


@spec("STREAM-33")
@given(st.lists(_said_by_servers | st.just(b"cut"), max_size=12))
def test_a_client_stays_upright_whatever_a_server_says(said: list[bytes]) -> None:
    stream = ClientStream("a", SECRET, now=0.0)
    stream.submit(SayPayload((Text("hi"),)))
    for number, body in enumerate(said):
        now = float(number)
        if not stream.is_connection_wanted and not stream.is_ended:
            stream.disconnected(chance=0.0, now=now)
            stream.handle_deadline(now=now + 1000.0)
        stream.connected(now=now)
        if body == b"cut":
            stream.disconnected(chance=0.5, now=now)
        else:
            stream.receive(body, now=now)
        stream.writes()
        for frame in stream.frames_to_send():
            frames.decode_client(frame)
        for event in stream.events():
            if isinstance(event, Applied):
                stream.handled(event.event_id)
        stream.writes()
