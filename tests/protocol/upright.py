"""Possible input of a decoder or of a half of the protocol, and its permitted results: nothing undocumented.

Shared by the properties (`test_fuzz.py`) and by the coverage-guided fuzzer (`fuzz.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from random import Random
from typing import Any

import msgspec

from midstream.errors import FrameTooLargeError, MalformedFrameError, RecordUndecodableError
from midstream.history.messages import Text, ToolResult, UserMessage
from midstream.protocol import frames
from midstream.protocol.client_stream import ClientStream
from midstream.protocol.event_inbox import Applied
from midstream.protocol.frames import (
    START,
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
    Ping,
    ResultPayload,
    ResumePayload,
    SendPayload,
    SnapshotFrame,
    Welcome,
    WithdrawPayload,
)
from midstream.protocol.server_stream import Admit, ServerStream, Submit
from midstream.protocol.sse import ServerSentEvent, SseDecoder
from midstream.protocol.sse import encode as encode_event
from midstream.session import records
from midstream.session.calls import Choice
from midstream.session.records import MessageAccepted, StreamOpened, TurnEnded, TurnStatus
from midstream.session.session import Received, Session, decide, fold
from midstream.session.turn.commands import Refused

SECRET = "s" * 43
CUT = b"cut"
"""Marker in the input of a client's half: its connection breaks."""
PAYLOADS = [
    frames.encode(payload)
    for payload in (
        SendPayload((Text("hi"),)),
        ResultPayload(1, 1, ToolResult("c", "done")),
        CancelPayload(),
        AnswerPayload(1, 1, "c", "d", Choice.ALLOW),
        WithdrawPayload(1),
        ResumePayload(1),
    )
]
_FROM_CLIENT: tuple[ClientFrame, ...] = (
    Open("a", SECRET, "1-1", 1, 1, 5.0),
    *(CommandFrame(number, msgspec.Raw(payload)) for number, payload in enumerate(PAYLOADS)),
    CommandFrame(0, msgspec.Raw(PAYLOADS[0])),
    Ping(),
    Close(),
)
CLIENT_FRAMES = [frames.encode(frame) for frame in _FROM_CLIENT]


def _event(position: int, record: records.Record) -> EventFrame:
    return EventFrame(f"1-{position}", msgspec.Raw(records.encode(record)))


_ACCEPTED = MessageAccepted(1, UserMessage.of("x"), 0.0, stream="a")
SERVER_FRAMES = [
    frames.encode(frame)
    for frame in (
        Welcome("a", "1-1", "1-1", acked=1, turn=1),
        Welcome("a", "1-1", "1-1", is_degraded=True),
        Ack(0),
        Ack(1, is_single=True),
        Events((_event(2, StreamOpened("a", "d")), _event(3, _ACCEPTED))),
        Events((_event(4, TurnEnded(1, TurnStatus.COMPLETED, 0.0)),)),
        Gone("1-1", "pruned"),
        Gone("1-1", "pruned", oldest=2, has_snapshot=True),
        SnapshotFrame("1-1", msgspec.Raw(b"{}")),
        Error("draining", "no", "later", retry_after_s=1.0),
        Error("seqno_gap", "no", seqno=1, expected=0),
        HeartbeatFrame("1-9", "model"),
    )
]


def decode_as_anything(body: bytes) -> None:
    """Decode bytes with each decoder: they are decoded, or refused as malformed."""
    for decode in (frames.decode_client, frames.decode_server, frames.decode_payload):
        with suppress(MalformedFrameError, FrameTooLargeError):
            decode(body)
    with suppress(RecordUndecodableError):
        records.decode(body)
    with suppress(MalformedFrameError):
        EventId.parse(body.decode("utf-8", "replace"))


def read_events(pieces: Iterable[bytes]) -> None:
    """Read server-sent events from pieces: the limit holds, and the decoded events can be encoded again."""
    decoder = SseDecoder(event_bytes_max=4096)
    with suppress(FrameTooLargeError):
        for piece in pieces:
            for event in decoder.feed(piece):
                again = SseDecoder().feed(encode_event(ServerSentEvent(event.data, event.event, event.id)))
                assert [each.data for each in again] == [event.data]


class _Journal:
    """A journal, and its fold."""

    def __init__(self) -> None:
        self.state = Session()
        self.bodies: list[bytes] = []

    def take(self, received: Received) -> None:
        """Append the records of a received command; raise `Refused` where it is not permitted."""
        decided = decide(self.state, received, epoch=1, at=0.0)
        self.state = fold(((1, record) for record in decided), self.state)
        self.bodies += map(records.encode, decided)

    def after(self, position: int) -> list[tuple[EventId, bytes]]:
        """Return the records after a position."""
        return [(EventId(1, position + 1 + n), body) for n, body in enumerate(self.bodies[position:])]


def feed_server(sent: Sequence[bytes]) -> None:
    """Send these frames from clients to a server's half with the real decisions behind it; `CUT` ends a
    connection.

    Refusals are raised as `Refused`, accepted records fold, and all responses are frames.
    """
    journal, stream = _Journal(), ServerStream(now=0.0)
    for number, body in enumerate(sent):
        now = 2.0 * number
        if body == CUT:
            stream = ServerStream(now=now)
        else:
            stream.receive(body, now=now)
        for request in stream.requests():
            match request:
                case Admit():
                    _admit(stream, journal, request.event_id, now)
                case Submit(seqno, received):
                    try:
                        journal.take(received)
                    except Refused as refused:
                        stream.refuse(seqno, refused.error, now=now)
                    else:
                        stream.acknowledge(seqno, now=now)
        if stream.snapshot_due is not None:
            newest = EventId(1, journal.state.position)
            stream.show(journal.state, newest, b"{}", now=now)
        if stream.is_admitted:
            stream.deliver(journal.after(stream.cursor), now=now)
        deadline = stream.next_deadline()
        if deadline is not None and deadline.at <= now:
            stream.handle_deadline(newest=START, waiting_on="nothing", now=now)
        for frame in stream.frames_to_send():
            frames.decode_server(frame)


def _admit(stream: ServerStream, journal: _Journal, at: EventId | None, now: float) -> None:
    is_held = at is not None and 0 < at.position <= journal.state.position
    stream.admit(journal.state, epoch_at=1 if is_held else None, now=now)


def feed_client(sent: Sequence[bytes]) -> None:
    """Send these frames from a server to a client with a message under way; `CUT` breaks the connection."""
    stream = ClientStream("a", SECRET, now=0.0)
    stream.submit(SendPayload((Text("hi"),)))
    for number, body in enumerate(sent):
        now = float(number)
        if not stream.is_connection_wanted and not stream.is_ended:
            stream.end_connection(chance=0.0, now=now)
            stream.handle_deadline(now=now + 1000.0)
        stream.begin_connection(now=now)
        if body == CUT:
            stream.end_connection(chance=0.5, now=now)
        else:
            stream.receive(body, now=now)
        stream.writes()
        for frame in stream.frames_to_send():
            frames.decode_client(frame)
        for event in stream.events():
            if isinstance(event, Applied):
                stream.mark_handled(event.event_id)
        stream.writes()


# --- input of a fuzzer: one string of bytes, and its seeds
# ----------------------------------------------------

BETWEEN = b"\n"
"""Separator of two frames, or two pieces of a stream of events: no frame of ours contains it."""
PIECES = b"\0"


def _each(body: bytes) -> None:
    for piece in body.split(BETWEEN):
        decode_as_anything(piece)


TARGETS: dict[bytes, Callable[[bytes], None]] = {
    b"d": _each,
    b"e": lambda body: read_events(body.split(PIECES)),
    b"s": lambda body: feed_server(body.split(BETWEEN)),
    b"c": lambda body: feed_client(body.split(BETWEEN)),
}
HEADS = frozenset(TARGETS)
"""First byte of an input: its target."""

PAST_FINDINGS: tuple[bytes, ...] = ()
"""Inputs that once raised an undocumented exception."""


def take(data: bytes) -> None:
    """Run one input: an exception is a fault of ours."""
    target = TARGETS.get(data[:1])
    if target is not None:
        target(data[1:])


def seeds() -> list[bytes]:
    """Return seeds: good frames alone, in turn, and in stories with a cut in them."""
    reported: list[bytes] = [*PAST_FINDINGS]
    for head, content in ((b"s", CLIENT_FRAMES), (b"c", SERVER_FRAMES)):
        reported += [head + frame for frame in content]
        reported += [b"d" + frame for frame in content]
        reported.append(head + BETWEEN.join(content))
        reported += [
            head + BETWEEN.join([*content[:n], CUT, *content[: n + 1]]) for n in range(1, len(content))
        ]
    reported.append(
        b"e" + PIECES.join([b"id: 1-2\r", b"\nevent: record\nda", b"ta: {}\n\n", b":\n\nretry: 10\n\n"])
    )
    return reported


def dictionary() -> list[str]:
    """Return the parts of frames, as a dictionary of libFuzzer."""
    found: set[str] = set()

    def gather(value: object) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                found.add(f'"{name}":')
                gather(inner)
        elif isinstance(value, list):
            for inner in value:
                gather(inner)
        else:
            found.add(json.dumps(value))

    for frame in (*CLIENT_FRAMES, *SERVER_FRAMES):
        gather(json.loads(frame))
    quoted = [word.replace("\\", "\\\\").replace('"', '\\"') for word in sorted(found)]
    return [f'"{word}"' for word in quoted if word.isascii()]


ODD: tuple[Any, ...] = (
    *(None, True, False, [], {}, 1.5, 1e308, -1, 0, 1, 2, 3, 4, 9, 10_001, 2**31, 2**53, 2**63, 2**64),
    *(
        "",
        "a",
        "k",
        SECRET,
        "0-0",
        "1-1",
        "1-2",
        "1-3",
        "1-4",
        "2-2",
        "9" * 16 + "-1",
        "never",
        "begin",
        "\0",
        "x" * 300,
    ),
)
"""Odd values to put in the place of good ones."""


def mutate(data: bytes, chance: Random) -> bytes:
    """Return an input with one frame added, removed, two of them swapped, or another member in one."""
    head, content = data[:1], data[1:].split(BETWEEN)
    good = [*(CLIENT_FRAMES if head == b"s" else SERVER_FRAMES), CUT]
    at = chance.randrange(len(content))
    match chance.randrange(6):
        case 0:
            content.insert(at, chance.choice(good))
        case 1 if len(content) > 1:
            content.pop(at)
        case 2:
            other = chance.randrange(len(content))
            content[at], content[other] = content[other], content[at]
        case _:
            content[at] = _with_another_member(content[at], chance) or chance.choice(good)
    return head + BETWEEN.join(content)


def _with_another_member(frame: bytes, chance: Random) -> bytes:
    """Return a frame in which one member, at any depth, is missing, new, or odd; b"" where it is no frame."""
    try:
        whole = json.loads(frame)
    except (ValueError, RecursionError):
        return b""
    places = [value for value in _within(whole) if value and isinstance(value, dict | list)]
    if not places:
        return b""
    place = chance.choice(places)
    key = chance.choice([*place, "colour"] if isinstance(place, dict) else range(len(place)))
    if chance.randrange(4) == 0 and key != "colour":
        del place[key]
    else:
        place[key] = chance.choice(ODD)
    return json.dumps(whole, separators=(",", ":")).encode()


def _within(value: Any) -> Iterator[Any]:  # noqa: ANN401 - any JSON
    yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _within(inner)
