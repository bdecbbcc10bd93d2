"""All frames of both directions, and their JSON form.

One frame is one JSON object with a `type`. Frames are the same on every transport: a WebSocket message, the body of a
POST, or the data of a server-sent event. A receiver ignores unknown members. A client ignores frames of an unknown
type, and a server answers them with `error` (STREAM-34).
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from typing import Annotated, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta, Struct, field

from midstream.errors import FrameTooLargeError, MalformedFrameError, UsageError
from midstream.history.messages import ToolResult, UserPart
from midstream.json_depth import TOO_DEEP, is_too_deep
from midstream.number_checks import WAIT_S_MAX
from midstream.session.calls import APPROVERS_MAX, Choice
from midstream.session.records import ClientTool
from midstream.session.turn.commands import WhenBusy

_T = TypeVar("_T")

PROTOCOL_VERSION = 1
FRAME_BYTES_MAX = 1024 * 1024
"""Bytes of one encoded frame; larger ones are refused before they are parsed."""
COALESCE_S_MAX = 0.1
"""Seconds for which events may be held back; a longer delay would be visible."""
IN_FLIGHT_MAX = 64
"""Commands of a client that may be unacknowledged."""
CANCEL_AFTER_S_MAX = 3600.0
"""Greatest value of `cancel_after_s`."""
KEY_CHARS_MAX = 256
"""Characters of a stream key or of a secret."""
NUMBER_MAX = 2**53
"""The greatest integer that JavaScript represents exactly."""
EVENT_DIGITS_MAX = 19
"""Digits of each number of an event id, including leading zeros."""
EVENT_ID_CHARS_MAX = 2 * EVENT_DIGITS_MAX + 1
"""Characters of two numbers and the dash."""
REASON_CHARS_MAX = 200
"""Characters of a message about an unreadable frame, which may contain a part of the frame."""
EVENT_NUMBER_MAX = 2**63 - 1
"""The greatest integer of every database."""
EVENTS_PER_FRAME_MAX = 512
"""Records in one `events` frame; replay sends frames of this many."""
HEARTBEAT_S = 10.0
"""Seconds of silence after which a server sends a heartbeat; three missed ones end a connection."""
Number = Annotated[int, Meta(ge=0, le=NUMBER_MAX)]
# `open_frame.check_word` and `EventId.parse` check these two forms; the patterns are for schemas.
Word = Annotated[
    str, Meta(extra_json_schema={"maxLength": KEY_CHARS_MAX, "pattern": "^[!-~]([ -~]*[!-~])?$|^$"})
]
EventIdText = Annotated[
    str, Meta(extra_json_schema={"format": "event-id", "pattern": "^(0|[0-9]{1,18}-[0-9]{1,18})$"})
]


class EventId(Struct, frozen=True, gc=False, order=True):
    """The place of a record on a journal's line: its epoch and its position."""

    epoch: int
    position: int

    def __str__(self) -> str:
        return f"{self.epoch}-{self.position}"

    @classmethod
    def parse(cls, text: str) -> EventId:
        """Parse `epoch-position`; `0` means the beginning, like `0-0`.

        Raises:
            MalformedFrameError: It has another form.
        """
        if text == "0":
            return cls(0, 0)
        epoch, dash, position = text.partition("-")
        is_short = len(epoch) <= EVENT_DIGITS_MAX >= len(position)
        if is_short and dash and text.isascii() and epoch.isdecimal() and position.isdecimal():
            event_id = cls(int(epoch), int(position))
            if max(event_id.epoch, event_id.position) <= EVENT_NUMBER_MAX:
                return event_id
        raise MalformedFrameError(f"an event id must look like '3-17'; got {text[:EVENT_ID_CHARS_MAX]!r}")


START = EventId(0, 0)
"""The position before the first record."""


# --- frames of a client -----------------------------------------------------------------------------------------


class SnapshotWhen(StrEnum):
    """When a client accepts a snapshot instead of events."""

    NEVER = "never"
    GONE = "gone"
    """If the next events were pruned."""
    BEGIN = "begin"
    """Also, for a reader without an event id, at the beginning, instead of all events so far."""


SnapshotWhenName = Literal["never", "gone", "begin"]
"""The values of `SnapshotWhen` as literals."""


class Open(Struct, frozen=True, gc=False, tag="open", tag_field="type", omit_defaults=True):
    """The first frame of a connection.

    Args:
        stream: The stream key; empty for a reader that only follows the session.
        secret: 32 random bytes of the client, base64url; the same at each reconnect. If the session is encrypted under
            its client's secret, that secret. A reader sends it, too, or a viewer token (STREAM-89).
        event_id: The last event of the client; None for a new stream (from its beginning) or to follow from the end.
        next_seqno: Number of commands that the client has numbered; the welcome has the server's number.
        cancel_after_s: Seconds after which the turn is stopped if this connection is lost and no other one of the
            stream replaces it (STREAM-55); None for never.
        connection: Its number among the stream's connections, in rising order; 0 without numbers.
        version: The newest protocol version whose frames the client understands; 1 so far.
        snapshots: When it accepts a snapshot.
        coalesce_s: Seconds (0.1 at most) for which events may be held back, so that several come at once.
        old_secret: The previous secret if the client has changed it; else "".
    """

    stream: Word = ""
    secret: Word = ""
    event_id: EventIdText | None = None
    next_seqno: Number = 0
    connection: Number = 0
    cancel_after_s: Annotated[float, Meta(ge=0, le=CANCEL_AFTER_S_MAX)] | None = None
    version: Annotated[int, Meta(ge=1)] = PROTOCOL_VERSION
    snapshots: SnapshotWhen = SnapshotWhen.GONE
    coalesce_s: Annotated[float, Meta(ge=0, le=COALESCE_S_MAX)] = 0.0
    old_secret: Word = ""

    def __repr__(self) -> str:
        return f"Open(stream={self.stream!r}, event_id={self.event_id!r}, next_seqno={self.next_seqno})"


class CommandFrame(Struct, frozen=True, gc=False, tag="command", tag_field="type"):
    """A numbered payload. Each playback has the same bytes.

    Args:
        seqno: Its number: 0, 1, 2, … on each stream.
        payload: One of `send`, `result`, `cancel`, `answer`, `withdraw` or `resume`.
    """

    seqno: int
    payload: msgspec.Raw


class Close(Struct, frozen=True, gc=False, tag="close", tag_field="type"):
    """The client detaches; the turn continues without it."""


class Ping(Struct, frozen=True, gc=False, tag="ping", tag_field="type"):
    """The client requests a heartbeat."""


ClientFrame = Open | CommandFrame | Close | Ping


# --- payloads of commands -------------------------------------------------------------------------------------------


# `SendPayload` refuses more than one approver for a tool without approval; this one is for schemas.
GivenTool = Annotated[
    ClientTool,
    Meta(
        extra_json_schema={
            "anyOf": [
                {"properties": {"approvers": {"maximum": 1}}},
                {"properties": {"needs_approval": {"const": True}}, "required": ["needs_approval"]},
            ]
        }
    ),
]


class SendPayload(Struct, frozen=True, gc=False, tag="send", tag_field="type", omit_defaults=True):
    """A user's message, which opens the stream's turn, and the tools of this client.

    While another turn is running, it waits or is refused, depending on `when_busy`.

    Args:
        parts: Text and files, one at least.
        tools: The tools that the client runs, without the agent's own.
        when_busy: Whether it waits for the end of a running turn, or is refused with `session_busy`.
    """

    parts: Annotated[tuple[UserPart, ...], Meta(min_length=1)]
    tools: tuple[GivenTool, ...] = ()
    when_busy: WhenBusy = WhenBusy.QUEUE

    def __post_init__(self) -> None:  # msgspec reports a ValueError as a validation error
        for tool in self.tools:
            if is_too_deep(tool.spec.parameters):
                raise ValueError(f"the schema of a tool is {TOO_DEEP}")
            if not (0 <= tool.timeout_s <= WAIT_S_MAX and 0 <= tool.answer_s <= WAIT_S_MAX):
                raise ValueError(f"a time limit of a tool has 0 to {WAIT_S_MAX:g} seconds")
            if not 1 <= tool.approvers <= (APPROVERS_MAX if tool.needs_approval else 1):
                raise ValueError(f"a tool that needs approval has 1 to {APPROVERS_MAX} approvers")


class ResultPayload(Struct, frozen=True, gc=False, tag="result", tag_field="type"):
    """The outcome of a call that the client ran.

    Args:
        turn, response: The place of the call, as in its `call_started`.
        result: The outcome, with the id of the call.
    """

    turn: int
    response: int
    result: ToolResult


class CancelPayload(Struct, frozen=True, gc=False, tag="cancel", tag_field="type", omit_defaults=True):
    """Stop the turn; numbered like every command, so that it is retried until it is acknowledged.

    Args:
        turn: Its number; null for the turn or the queued message of the stream. If the stream has neither, null is the
            running turn.
    """

    turn: int | None = None


class AnswerPayload(Struct, frozen=True, gc=False, tag="answer", tag_field="type", omit_defaults=True):
    """A person's decision about a waiting call.

    Args:
        turn, response, call_id: The place of the call, as in its `question_asked`.
        digest: The digest in the `question_asked`, of the shown arguments. An answer for others is refused.
        choice: The decision; see STREAM-36 for the choices of each `kind`.
        text: The answer to a question, the reason of a denial, or the outcome of a call that took effect.
        arguments: For an approval, other arguments (JSON text); null keeps the model's.
    """

    turn: int
    response: int
    call_id: str
    digest: str
    choice: Choice
    text: str = ""
    arguments: str | None = None


class WithdrawPayload(Struct, frozen=True, gc=False, tag="withdraw", tag_field="type", omit_defaults=True):
    """Withdraw a queued message.

    Args:
        number: The number in its `message_queued`; null for all queued messages.
    """

    number: int | None = None


class ResumePayload(Struct, frozen=True, gc=False, tag="resume", tag_field="type", omit_defaults=True):
    """Continue the last turn, which was interrupted or failed; it becomes the stream's turn.

    Args:
        turn: The expected number of that turn; null for any.
    """

    turn: int | None = None


Payload = SendPayload | ResultPayload | CancelPayload | AnswerPayload | WithdrawPayload | ResumePayload


# --- frames of a server -----------------------------------------------------------------------------------------


class Welcome(Struct, frozen=True, gc=False, tag="welcome", tag_field="type"):
    """The first frame of a server, at once.

    Args:
        stream: Echo of the stream key.
        is_degraded: Whether the client cannot resume here; then it must store nothing and retry nothing.
        reason: Why it is degraded, else "".
        event_id: Newest event on the journal's line.
        resume_from: The event after which this connection's events begin.
        acked: Commands of this stream accepted so far: the seqno expected next.
        turn: The stream's turn; 0 while it has none.
        turn_status: The state of that turn: "" (there is none yet), queued, running, completed, cancelled, failed,
            interrupted, or ended (its events show how).
        status: The state of the session, or of its last turn (STREAM-116).
        heartbeat_s: Seconds of silence after which a heartbeat comes.
        frame_bytes_max: Bytes of one frame of a client.
        in_flight_max: Commands of a client that may be unacknowledged.
        retention_s: The look-back of the server in seconds (STREAM-54).
        version: The protocol version of the following frames; 1 so far.
        stall_s: Seconds of silence of a turn after which the server reports it (`first_token_s`, `between_tokens_s`,
            `tool_s`), and after which it cuts a model (the names that end in `_max_s`); null is never.
        oldest: Position of the oldest event that can be replayed.
        retention: The limits of retention: `events_for_s`, `events_max`, `bytes_max`, `sessions_for_s`; null for none.
        is_encrypted: Whether the session is encrypted under its client's secret, or will be with its first record. Then
            the client must keep the secret.
        began_at: The begin of the epoch of `resume_from`, in seconds since 1970: the `at` of its `epoch_started`
            (STREAM-104). None if it is unknown, and before the first record.
    """

    stream: str
    event_id: str
    resume_from: str
    acked: int = 0
    turn: int = 0
    turn_status: str = ""
    status: str = ""
    is_degraded: bool = False
    reason: str = ""
    heartbeat_s: float = HEARTBEAT_S
    frame_bytes_max: int = FRAME_BYTES_MAX
    in_flight_max: int = IN_FLIGHT_MAX
    retention_s: float = 7200.0
    stall_s: dict[str, float | None] = field(default_factory=dict)
    version: int = PROTOCOL_VERSION
    oldest: int = 1
    retention: dict[str, float | None] = field(default_factory=dict)
    is_encrypted: bool = False
    began_at: float | None = None


class Ack(Struct, frozen=True, gc=False, tag="ack", tag_field="type", omit_defaults=True):
    """Every command up to and with `seqno` is in the journal, on disk. Cumulative; may repeat.

    Args:
        seqno: The newest such command.
        is_single: Whether the ack is for this command alone (STREAM-53).
    """

    seqno: int
    is_single: bool = False


class EventFrame(Struct, frozen=True, gc=False):
    """One record and its place.

    Args:
        id: `epoch-position`.
        record: One of the records below.
    """

    id: str
    record: msgspec.Raw


class Events(Struct, frozen=True, gc=False, tag="events", tag_field="type"):
    """Records in order, without gap.

    Args:
        events: Each position follows the one before it.
    """

    events: tuple[EventFrame, ...]


class Gone(Struct, frozen=True, gc=False, tag="gone", tag_field="type"):
    """The event id of the client is not on the line, or its next event was pruned. The events after `resume_from`
    follow; the client deletes those that it has.

    Args:
        resume_from: The event after which the events continue.
        reason: For people.
        oldest: Position of the oldest event that can be replayed.
        has_snapshot: Whether a snapshot comes first, which replaces all data of the client.
    """

    resume_from: str
    reason: str
    oldest: int = 1
    has_snapshot: bool = False


class SnapshotFrame(Struct, frozen=True, gc=False, tag="snapshot", tag_field="type", omit_defaults=True):
    """The session at an event, which replaces all events so far; the later ones follow.

    Args:
        event_id: The event.
        session: The answer of `GET /v1/sessions/{id}`.
        is_over: Whether the turn of this stream had ended by then.
        turn: The stream's turn by then; 0 if it has none, such as for a queued message; null for a reader. If `turns`
            of `session` is another number, its text is the answer of another turn.
    """

    event_id: str
    session: msgspec.Raw
    is_over: bool = False
    turn: int | None = None


class Error(Struct, frozen=True, gc=False, tag="error", tag_field="type", omit_defaults=True):
    """A command is refused, or the connection ends.

    Args:
        code: One of the table of errors; there may be others.
        message: For people.
        retry: The client's reaction: `never` and `ask` end the stream, `now` and `later` open a new connection.
        seqno: The refused command; if it is missing or null, the connection ends.
        expected: The seqno to send next, for the code `seqno_gap`.
        retry_after_s: Seconds to wait before the next connection.
    """

    code: str
    message: str
    retry: str = "never"
    seqno: int | None = None
    expected: int | None = None
    retry_after_s: float | None = None


class HeartbeatFrame(Struct, frozen=True, gc=False, tag="heartbeat", tag_field="type"):
    """The connection is alive.

    Args:
        event_id: The newest event of the session.
        waiting_on: The work that its turn waits for: model, tool, client, person, agent, nothing.
    """

    event_id: str
    waiting_on: str = "nothing"


class _Typed(Struct, frozen=True, gc=False):
    type: str


ServerFrame = Welcome | Ack | Events | Gone | SnapshotFrame | Error | HeartbeatFrame

_encoder = msgspec.json.Encoder()
_from_client: msgspec.json.Decoder[ClientFrame] = msgspec.json.Decoder(ClientFrame)
_from_server: msgspec.json.Decoder[ServerFrame] = msgspec.json.Decoder(ServerFrame)
_typed: msgspec.json.Decoder[_Typed] = msgspec.json.Decoder(_Typed)
_SERVER_TYPES = frozenset(str(kind.__struct_config__.tag) for kind in get_args(ServerFrame))
_payload: msgspec.json.Decoder[Payload] = msgspec.json.Decoder(Payload)


def encode(frame: ClientFrame | ServerFrame | Payload) -> bytes:
    """Return a frame's (or payload's) JSON."""
    return _encoder.encode(frame)


def encode_payload(payload: Payload) -> bytes:
    """Return a payload's JSON.

    Raises:
        UsageError: A text has a lone surrogate, which UTF-8 cannot encode.
    """
    try:
        return _encoder.encode(payload)
    except UnicodeEncodeError as error:
        message = f"a text has a lone surrogate at index {error.start}: half of a character. Nothing was sent"
        raise UsageError(message) from None


def decode_client(body: bytes) -> ClientFrame:
    """Decode a client's frame.

    Raises:
        FrameTooLargeError: The frame is above `FRAME_BYTES_MAX`, and was not parsed.
        MalformedFrameError: It is not a frame.
    """
    return _decode(body, _from_client)


def decode_server(body: bytes) -> ServerFrame:
    """Decode a server's frame; raises like `decode_client`, but has no size limit of its own."""
    try:
        return _from_server.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedFrameError(f"not a server frame: {str(error)[:REASON_CHARS_MAX]}") from error


def is_of_unknown_type(body: bytes) -> bool:
    """Whether a body is a server's frame of a type that this version does not have (STREAM-34)."""
    try:
        kind = _typed.decode(body).type
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return kind not in _SERVER_TYPES


def decode_payload(body: bytes | msgspec.Raw) -> Payload:
    """Decode the payload of a command; raises `MalformedFrameError`."""
    return _decode(bytes(body), _payload)


def _decode(body: bytes, decoder: msgspec.json.Decoder[_T]) -> _T:
    if len(body) > FRAME_BYTES_MAX:
        raise FrameTooLargeError(f"a frame has {len(body)} bytes; the limit is {FRAME_BYTES_MAX}")
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedFrameError(f"not a frame of this protocol: {str(error)[:REASON_CHARS_MAX]}") from error


def digest_of(payload: bytes | msgspec.Raw) -> str:
    """Return the digest that distinguishes a repeated command from a conflicting one."""
    return hashlib.blake2b(bytes(payload), digest_size=16, person=b"midstream-cmd").hexdigest()


def secret_digest_of(secret: str) -> str:
    """Return the digest of a stream secret for the journal."""
    return hashlib.blake2b(secret.encode(), digest_size=32, person=b"midstream-key").hexdigest()
