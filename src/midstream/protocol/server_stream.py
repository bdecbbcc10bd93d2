"""The server's half of the stream protocol, without I/O: one connection of one client.

Inputs: `receive`, `admit`, `acknowledge`, `refuse`, `deliver`, `lose`, `show`, `handle_deadline`, `fail`. After each of
them do `requests()`, send `frames_to_send()` in order, arm one timer for `next_deadline()`, and when `is_closed` close
the transport.

    opening ──open──▶ admitting ──admit()──▶ admitted ──┐
       └──────────────────┴───────────────────┴─────────┴──▶ closed

The connection has no durable state: the commands of a stream are in the journal, and the session (`session/session.py`)
decides about each. This class keeps the order: `acknowledge` queues an ack, and the shell calls it after the append;
`deliver` queues events, in order and without gap. Clause numbers refer to `docs/spec/stream.md`.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from enum import Enum
from typing import Self, assert_never

import msgspec
from msgspec import Struct
from msgspec.structs import asdict, replace

from midstream.errors import (
    ConnectionLostError,
    MalformedFrameError,
    MidstreamError,
    ProtocolError,
    SeqnoGapError,
    StreamFencedError,
    StreamNotFoundError,
    UnavailableError,
    WrongSecretError,
)
from midstream.history.messages import UserMessage
from midstream.protocol.frames import (
    COALESCE_S_MAX,
    EVENTS_PER_FRAME_MAX,
    HEARTBEAT_S,
    IN_FLIGHT_MAX,
    START,
    Ack,
    AnswerPayload,
    CancelPayload,
    Close,
    CommandFrame,
    Error,
    EventId,
    Gone,
    HeartbeatFrame,
    Open,
    Payload,
    Ping,
    ResultPayload,
    ResumePayload,
    SendPayload,
    ServerFrame,
    SnapshotFrame,
    SnapshotWhen,
    Welcome,
    WithdrawPayload,
    decode_client,
    decode_payload,
    digest_of,
    encode,
    secret_digest_of,
)
from midstream.protocol.open_frame import check_open, merge_open_fields
from midstream.protocol.stream_settings import StreamSettings
from midstream.session.call_references import CallRef
from midstream.session.calls import Site
from midstream.session.retention import Retention
from midstream.session.session import COMMANDS_MAX, Received, Session, StreamState, fencing_error
from midstream.session.turn.commands import (
    Answer,
    CallFinished,
    Cancel,
    Command,
    Resume,
    SendMessage,
    Withdraw,
)
from midstream.session.turn.states import LOOK_BACK_S, AwaitingModel, Cancelling, Idle, RunningCalls
from midstream.timing import Deadline, StallBudgets

OPEN_WITHIN_S = 10.0
"""Seconds for a new connection to send its `open`."""
EVENTS_BYTES_MAX = 256 * 1024
"""Bytes of records after which an `events` frame is full; a larger record has a frame of its own."""


class Admit(Struct, frozen=True):
    """Read the session, and the epoch of the record at `event_id.position`; then call `admit`."""

    open: Open
    event_id: EventId | None


class Submit(Struct, frozen=True):
    """Decide and append this command; then call `acknowledge` or `refuse`."""

    seqno: int
    received: Received


Request = Admit | Submit


class SnapshotDue(Enum):
    """The snapshot that a connection must get before further events."""

    BEGINNING = "beginning"
    """The first state of the pruned journal."""
    NEWEST = "newest"
    """The current state of the session."""


class EncodedPage(Struct, frozen=True):
    """Successive events, encoded for all connections at the position before them.

    Args:
        after: Position before the first event.
        end: Position of the last one.
        pieces: The encoded data.
    """

    after: int
    end: int
    pieces: tuple[bytes, ...]


class FrameEncoding(Struct, frozen=True):
    """The encoding of frames and records for one kind of transport.

    Args:
        frame: Encodes one frame other than `events`.
        records: Encodes records into pieces within its limits.
    """

    frame: Callable[[ServerFrame], bytes]
    records: Callable[[Iterable[tuple[EventId, bytes]]], Iterable[bytes]]

    def page(self, records: Sequence[tuple[EventId, bytes]]) -> EncodedPage:
        """Encode one or more successive records. Stored bytes are sent unchanged."""
        first, last = _bounds(records)
        return EncodedPage(first - 1, last, tuple(self.records(records)))


class _State(Enum):
    OPENING = "opening"
    ADMITTING = "admitting"
    ADMITTED = "admitted"
    CLOSED = "closed"


class _Terms(Struct, frozen=True):
    """The settings of a stream; see the arguments of `ServerStream`."""

    heartbeat_s: float
    retention_s: float
    retention: Retention | None
    coalesce_s: float
    degraded_reason: str
    in_flight_max: int
    stalls: StallBudgets | None


class ServerStream:
    """One connection at the server. See the module's docstring for the order of calls.

    Args:
        heartbeat_s: Seconds of silence after which a heartbeat is sent.
        retention_s: Seconds for which the stream can be resumed, for the welcome.
        retention: The limits of retention, for the welcome; None omits them.
        coalesce_s: Seconds for which events are held back, to send several together; a client may request more.
        degraded_reason: Why streams cannot be resumed here; "" if they can.
        in_flight_max: Commands that may be unacknowledged.
        stalls: Limits for silences of a turn, for the welcome.
        wire: The encoding of frames; `NATIVE` by default.
        headers: Fields from the headers of its request, which replace members of the `open`.
        now: The shell's clock, as in every call.
    """

    def __init__(
        self,
        *,
        heartbeat_s: float = HEARTBEAT_S,
        retention_s: float = LOOK_BACK_S,
        retention: Retention | None = None,
        coalesce_s: float = 0.0,
        degraded_reason: str = "",
        in_flight_max: int = IN_FLIGHT_MAX,
        stalls: StallBudgets | None = None,
        wire: FrameEncoding | None = None,
        headers: Open | None = None,
        now: float,
    ) -> None:
        self._state = _State.OPENING
        self._terms = _Terms(
            heartbeat_s, retention_s, retention, coalesce_s, degraded_reason, in_flight_max, stalls
        )
        self.wire = wire or NATIVE
        """The encoding of its frames."""
        self._failure: MidstreamError | None = None
        self._deadline: Deadline | None = Deadline(now + OPEN_WITHIN_S, "the client owes its open frame")
        """The deadline before the next heartbeat, or None."""
        self._spoke_at = now
        self._open = headers or Open()
        self._event_id: EventId | None = None
        self._secret_digest = ""
        self._is_encrypted = False
        self.cursor = START.position
        """Position after which `deliver` continues."""
        self._was_admitted = False
        self._cancel_after_s: float | None = None
        self._is_left = False
        """Whether the client sent `close`, so that the turn continues without it."""
        self.snapshot_due: SnapshotDue | None = None
        """The snapshot that `show` must get before any event, or None."""
        self._in_flight: set[int] = set()
        self._requests: list[Request] = []
        self._held: list[Submit] = []
        """Commands before the admission; they are requested after it, or never."""
        self._frames: list[bytes] = []

    @classmethod
    def under(
        cls,
        settings: StreamSettings,
        *,
        stalls: StallBudgets | None = None,
        retention: Retention | None = None,
        degraded_reason: str = "",
        wire: FrameEncoding | None = None,
        headers: Open | None = None,
        now: float,
    ) -> Self:
        """Create a stream with an operator's settings; the server's own reason for degradation has priority."""
        return cls(
            heartbeat_s=settings.heartbeat_s,
            retention_s=settings.look_back_s,
            retention=retention,
            coalesce_s=settings.coalesce_s,
            degraded_reason=degraded_reason or settings.degraded_reason,
            in_flight_max=settings.in_flight_max,
            stalls=stalls,
            wire=wire,
            headers=headers,
            now=now,
        )

    # --- queries of the shell -----------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """Whether this connection has ended: send the queued frames, close the transport, and call nothing more."""
        return self._state is _State.CLOSED

    @property
    def failure(self) -> MidstreamError | None:
        """The error with which the server ended this connection, or None."""
        return self._failure

    @property
    def is_admitted(self) -> bool:
        """Whether events may be delivered."""
        return self._state is _State.ADMITTED

    @property
    def stream(self) -> str:
        """The key of the client's stream; "" for a reader and before the `open`."""
        return self._open.stream

    def is_opened_with(self, secret: str) -> bool:
        """Whether the `open` of this connection had that secret."""
        return hmac.compare_digest(self._open.secret.encode(), secret.encode())

    @property
    def connection(self) -> int:
        """The client's number of this connection; 0 before the `open`, and if the client does not number them."""
        return self._open.connection

    def is_before(self, other: ServerStream) -> bool:
        """Whether this connection is older than `other`, of the same stream, by the client's numbers (STREAM-50).

        A network may delay a connection until after the one that replaced it.
        """
        return 0 < self._open.connection < other._open.connection

    @property
    def cancels_after_s(self) -> float | None:
        """Seconds after which the turn is stopped unless the client returns; None if it continues (STREAM-55).

        For use at the end of the connection. A connection that the server ended, that a newer one replaced, or that the
        client closed with a frame, is not lost.
        """
        is_ours = isinstance(self._failure, UnavailableError | StreamFencedError)
        is_lost = self._was_admitted and not (self._is_left or is_ours)
        return self._cancel_after_s if is_lost else None

    @property
    def coalesce_s(self) -> float:
        """Seconds to wait for further events after one has arrived."""
        return min(max(self._terms.coalesce_s, self._open.coalesce_s), COALESCE_S_MAX)

    def is_fenced_by(self, session: Session) -> bool:
        """Whether a newer connection has the stream, by the journal: then end this one, and deliver nothing more."""
        known = session.streams.get(self._open.stream)
        return known is not None and known.is_beyond(self._open.connection)

    def is_turn_over(self, session: Session) -> bool:
        """Whether the turn of this stream has ended and all events so far were delivered.

        A transport whose body has an end ends it only here (STREAM-27).
        """
        known = session.streams.get(self._open.stream)
        if known and known.queued and not known.turn:
            is_waiting = any(each.number == known.queued for each in session.queue)
            return not is_waiting and self.cursor >= session.position
        if not known or not known.turn or self.cursor < session.position:
            return False
        return session.turns > known.turn or not session.is_live

    def requests(self) -> list[Request]:
        """Return the new requests for the shell, in order."""
        requests, self._requests = self._requests, []
        return requests

    @property
    def has_frames(self) -> bool:
        """Whether there are frames to send."""
        return bool(self._frames)

    def frames_to_send(self) -> list[bytes]:
        """Return the new encoded frames, in order."""
        frames, self._frames = self._frames, []
        return frames

    def next_deadline(self) -> Deadline | None:
        """Return the time and the reason for the next `handle_deadline`, or None."""
        if self._deadline is not None or not self.is_admitted:
            return self._deadline
        return Deadline(self._spoke_at + self._terms.heartbeat_s, "the client expects a sign of life")

    # --- inputs -------------------------------------------------------------------------------------------------

    def receive(self, body: bytes, *, now: float) -> None:
        """Process one received frame.

        Never raises for a fault of the peer: a violation queues an `error` frame and closes the connection (STREAM-33).
        """
        if self.is_closed:
            return
        try:
            self._take(body, now=now)
        except MidstreamError as error:
            self.fail(error, now=now)

    def admit(
        self,
        session: Session,
        *,
        epoch_at: int | None,
        pruned_to: EventId = START,
        secret_digest: str | None = None,
        now: float,
    ) -> None:
        """Answer an `Admit`: queue the welcome and set the cursor, or refuse and close.

        Args:
            session: The current state of the session.
            epoch_at: Epoch of the record at the position of the client's event id; None without an id or a record.
            pruned_to: The last known pruned event.
            secret_digest: The digest for the client's secret in this session; None for the digest of the secret itself.
        """
        if self._state is not _State.ADMITTING:
            return
        known = session.streams.get(self._open.stream)
        self._secret_digest = secret_digest or digest_of_shown_secret(session, self._open)
        if (refusal := self._refusal(known)) is not None:
            self.fail(refusal, now=now)
            return
        newest = EventId(session.epoch, session.position)
        begin = EventId(known.epoch, known.since) if known else None
        is_gone = self._event_id is not None and not _is_on_line(self._event_id, epoch_at)
        resume_from = begin or START if is_gone else self._event_id or begin or newest
        is_pruned = resume_from.position < pruned_to.position
        if is_pruned:
            resume_from = pruned_to
        elif self._open.snapshots is SnapshotWhen.BEGIN and not self._open.stream and self._event_id is None:
            self.snapshot_due = SnapshotDue.NEWEST
        of_stream = known.cancel_after_s if known else None
        self._cancel_after_s = of_stream if self._open.cancel_after_s is None else self._open.cancel_after_s
        self.cursor = resume_from.position
        self._is_encrypted = secret_digest is not None
        self._state = _State.ADMITTED
        self._was_admitted = True
        self._queue(self._welcome(session, resume_from, oldest=pruned_to.position + 1), now=now)
        if is_pruned:
            self.lose(pruned_to, now=now)
        elif is_gone:
            reason = f"the event {self._event_id} is not in this session's journal"
            self._queue(Gone(str(resume_from), reason, pruned_to.position + 1), now=now)
        for each in self._held:
            self._requests.append(
                Submit(each.seqno, replace(each.received, secret_digest=self._secret_digest))
            )
        self._held = []

    def acknowledge(self, seqno: int, *, now: float) -> None:
        """Queue the ack of a command. Call it only after the append has returned (STREAM-13)."""
        self._in_flight.discard(seqno)
        if not self.is_closed:
            self._queue(Ack(seqno), now=now)

    def refuse(self, seqno: int, error: MidstreamError, *, now: float) -> None:
        """Queue the refusal of a command; the connection continues."""
        self._in_flight.discard(seqno)
        if not self.is_closed:
            self._queue(_frame_of(error, seqno), now=now)

    def deliver(self, records: Sequence[tuple[EventId, bytes]], *, now: float) -> None:
        """Queue records as events; the first one follows `cursor`, and each the previous one."""
        if records:
            self.pass_on(self.wire.page(records), now=now)

    def pass_on(self, page: EncodedPage, *, now: float) -> None:
        """Queue the events of a page with this `wire` encoding; the first one follows `cursor`."""
        if self._state is _State.CLOSED:
            return
        self._advance_over(page)
        self._frames += page.pieces
        self._note_traffic(now)

    def lose(self, pruned_to: EventId, *, now: float) -> None:
        """Report that the next events up to this one were pruned, and continue after it."""
        if self.is_closed:
            return
        self.cursor = pruned_to.position
        has_snapshot = self._open.snapshots is not SnapshotWhen.NEVER
        self.snapshot_due = SnapshotDue.BEGINNING if has_snapshot else None
        oldest = pruned_to.position + 1
        reason = f"the events before position {oldest} are no longer kept"
        self._queue(Gone(str(pruned_to), reason, oldest, has_snapshot), now=now)

    def show(self, session: Session, event_id: EventId, body: bytes, *, now: float) -> None:
        """Queue the requested snapshot, and continue after it.

        Args:
            session: The state at `event_id`.
            body: Its JSON for clients.
        """
        if self.is_closed:
            return
        self.snapshot_due = None
        self.cursor = event_id.position
        known = session.streams.get(self._open.stream)
        turn = (known.turn if known else 0) if self._open.stream else None
        is_over = self.is_turn_over(session)
        self._queue(SnapshotFrame(str(event_id), msgspec.Raw(body), is_over, turn), now=now)

    def handle_deadline(self, *, newest: EventId, waiting_on: str, now: float) -> None:
        """Do the due work; without effect if none is due.

        Args:
            newest: The newest event of the session, for the heartbeat.
            waiting_on: The work that the turn waits for, see `waiting_on`.
        """
        deadline = self.next_deadline()
        if deadline is None or now < deadline.at:
            return
        if self._state is _State.OPENING:
            # Not the client's fault: a bad network may delay its first frame, so it may try again.
            self.fail(ConnectionLostError(f"no open frame came within {OPEN_WITHIN_S:g} s"), now=now)
            return
        self._queue(HeartbeatFrame(str(newest), waiting_on), now=now)

    def fail(self, error: MidstreamError, *, now: float) -> None:
        """End the connection with an `error` frame: draining, fenced, or an unavailable store."""
        if self.is_closed:
            return
        self._failure = error.again()
        self._queue(_frame_of(error), now=now)
        self._end()

    # --- frames -------------------------------------------------------------------------------------------------

    def _take(self, body: bytes, *, now: float) -> None:
        frame = decode_client(body)
        if self._state is _State.OPENING:
            if not isinstance(frame, Open):
                raise ProtocolError("the first frame of a connection is `open`")
            self._take_open(frame)
            return
        match frame:
            case Open():
                raise ProtocolError("a connection can be opened only once")
            case CommandFrame():
                self._take_command(frame)
            case Ping():
                if self.is_admitted:
                    self._deadline = Deadline(now, "the client asked for a heartbeat")
            case Close():
                self._is_left = True
                self._end()
            case _:
                assert_never(frame)

    def _take_open(self, frame: Open) -> None:
        frame = merge_open_fields(self._open, frame)
        check_open(frame)
        self._event_id = EventId.parse(frame.event_id) if frame.event_id is not None else None
        self._open = frame
        self._state = _State.ADMITTING
        self._deadline = None
        self._requests.append(Admit(frame, self._event_id))

    def _take_command(self, frame: CommandFrame) -> None:
        if not self._open.stream:
            raise ProtocolError("a reader has no stream to send commands on")
        command = read_command(
            frame,
            stream=self._open.stream,
            secret_digest=self._secret_digest,
            cancel_after_s=self._open.cancel_after_s,
            connection=self._open.connection,
        )
        self._in_flight.add(command.seqno)
        self._require_few_in_flight()
        queue = self._requests if self.is_admitted else self._held
        queue.append(Submit(command.seqno, command))

    def _require_few_in_flight(self) -> None:
        most = self._terms.in_flight_max
        if len(self._in_flight) <= most:
            return
        # STREAM-56: the client may have sent the commands that it counted in its `open` before the welcome.
        later = sum(seqno >= self._open.next_seqno for seqno in self._in_flight)
        if later > most or len(self._in_flight) > IN_FLIGHT_MAX:
            raise ProtocolError(f"more than {most} commands wait for their acks")

    def _advance_over(self, page: EncodedPage) -> None:
        assert self._state is _State.ADMITTED, "events before the welcome"
        assert self.snapshot_due is None, "events before the snapshot"
        assert page.after == self.cursor, f"events after {page.after} at position {self.cursor}"
        self.cursor = page.end

    def _welcome(self, session: Session, resume_from: EventId, *, oldest: int) -> Welcome:
        known = session.streams.get(self._open.stream)
        return Welcome(
            stream=self._open.stream,
            event_id=str(EventId(session.epoch, session.position)),
            resume_from=str(resume_from),
            acked=known.accepted if known else 0,
            turn=known.turn if known else 0,
            turn_status=turn_status_of(session, self._open.stream),
            status=session.status,
            is_degraded=bool(self._terms.degraded_reason),
            reason=self._terms.degraded_reason,
            heartbeat_s=self._terms.heartbeat_s,
            in_flight_max=self._terms.in_flight_max,
            retention_s=self._terms.retention_s,
            stall_s=describe_stalls(self._terms.stalls),
            oldest=oldest,
            retention=asdict(self._terms.retention) if self._terms.retention else {},
            is_encrypted=self._is_encrypted,
            began_at=session.began_at(resume_from.epoch),
        )

    def _refusal(self, known: StreamState | None) -> MidstreamError | None:
        """Return the refusal of a client's stream, or None."""
        if known and not hmac.compare_digest(known.secret_digest, self._secret_digest):
            return WrongSecretError("this stream was opened with another secret")
        if known and known.is_beyond(self._open.connection):
            return fencing_error()
        if (
            self._open.stream
            and not known
            and self._open.next_seqno > 0
            and self._event_id not in (None, START)
        ):
            # STREAM-6. Without an event id, the client's first command never arrived, and it plays it back.
            return StreamNotFoundError(f"this session has no stream {self._open.stream!r}")
        return None

    def _queue(self, frame: ServerFrame, *, now: float) -> None:
        self._frames.append(self.wire.frame(frame))
        self._note_traffic(now)

    def _note_traffic(self, now: float) -> None:
        self._deadline = None
        self._spoke_at = now

    def _end(self) -> None:
        self._state = _State.CLOSED
        self._deadline = None
        self._requests = []
        self._held = []


def _bounds(records: Sequence[tuple[EventId, bytes]]) -> tuple[int, int]:
    first, last = records[0][0].position, records[-1][0].position
    assert last - first == len(records) - 1, f"{len(records)} events from {first} to {last}"
    return first, last


def digest_of_shown_secret(session: Session, shown: Open) -> str:
    """Return the digest of the client's secret: of the old one if its stream was opened with that."""
    known = session.streams.get(shown.stream)
    if known and shown.old_secret:
        before = secret_digest_of(shown.old_secret)
        if hmac.compare_digest(known.secret_digest, before):
            return before
    return secret_digest_of(shown.secret)


def _is_on_line(event_id: EventId, epoch_at: int | None) -> bool:
    return event_id == START or (event_id.position > 0 and event_id.epoch == epoch_at)


def _frame_of(error: MidstreamError, seqno: int | None = None) -> Error:
    expected = error.expected if isinstance(error, SeqnoGapError) else None
    return Error(error.code, error.message, error.retry, seqno, expected, error.retry_after_s)


def read_command(
    frame: CommandFrame,
    *,
    stream: str,
    secret_digest: str,
    cancel_after_s: float | None = None,
    connection: int = 0,
) -> Received:
    """Decode a command for `session.decide`.

    Raises:
        MalformedFrameError: It is not a payload of this protocol, or has an invalid number.
    """
    if not 0 <= frame.seqno <= COMMANDS_MAX:
        raise MalformedFrameError(f"sequence numbers go from 0 to {COMMANDS_MAX}")
    command = _command_of(decode_payload(frame.payload), frame.seqno)
    digest = digest_of(frame.payload)
    return Received(stream, secret_digest, frame.seqno, digest, command, cancel_after_s, connection)


def _command_of(payload: Payload, seqno: int) -> Command:
    match payload:
        case SendPayload():
            if seqno != 0:
                raise MalformedFrameError("a message is command 0: open a new stream for the next turn")
            return SendMessage(UserMessage(payload.parts), payload.tools, when_busy=payload.when_busy)
        case ResultPayload():
            return CallFinished(payload.turn, payload.response, payload.result)
        case CancelPayload():
            return Cancel(payload.turn)
        case AnswerPayload():
            return answer_of(payload)
        case WithdrawPayload():
            return Withdraw(payload.number)
        case ResumePayload():
            if seqno != 0:
                raise MalformedFrameError("a turn is resumed by command 0: open a new stream for it")
            return Resume(payload.turn)
        case _:
            assert_never(payload)


def answer_of(payload: AnswerPayload) -> Answer:
    """Return the command for a person's answer."""
    return Answer(
        CallRef(payload.turn, payload.response, payload.call_id),
        payload.digest,
        payload.choice,
        payload.text,
        payload.arguments,
    )


def events_frames(records: Iterable[tuple[EventId, bytes]]) -> Iterator[bytes]:
    """Yield encoded `events` frames of stored records, within `EVENTS_PER_FRAME_MAX` and `EVENTS_BYTES_MAX`."""
    events: list[bytes] = []
    size = 0
    for event_id, body in records:
        if events and (len(events) >= EVENTS_PER_FRAME_MAX or size + len(body) > EVENTS_BYTES_MAX):
            yield _events_frame(events)
            events, size = [], 0
        events.append(b'{"id":"%d-%d","record":%b}' % (event_id.epoch, event_id.position, body))
        size += len(body)
    if events:
        yield _events_frame(events)


def _events_frame(events: list[bytes]) -> bytes:
    return b'{"type":"events","events":[' + b",".join(events) + b"]}"


NATIVE = FrameEncoding(encode, events_frames)
"""One JSON object per message, as `protocol/frames.py` defines them."""


def turn_status_of(session: Session, stream: str) -> str:
    """Return the state of a stream's turn, see `Welcome.turn_status`."""
    known = session.streams.get(stream)
    if known is None or not (known.turn or known.queued):
        return ""
    if not known.turn:
        return "queued" if any(each.number == known.queued for each in session.queue) else "ended"
    if known.turn == session.turns and session.is_live:
        return "running"
    last = session.last_turn
    return last.status.value if last is not None and last.turn == known.turn else "ended"


def describe_stalls(stalls: StallBudgets | None) -> dict[str, float | None]:
    """Return stall budgets in the form of a welcome."""
    budgets = {} if stalls is None else asdict(stalls)
    return {name: seconds if math.isfinite(seconds) else None for name, seconds in budgets.items()}


def waiting_on(session: Session, children: Collection[str] = ()) -> str:
    """Return the kind of work that the turn waits for: model, tool, client, person, nothing.

    Args:
        children: The same for each known sub-agent. It counts as a tool, unless it waits for a person itself.
    """
    match session.turn:
        case Idle():
            return "nothing"
        case AwaitingModel():
            return "person" if session.turn.is_waiting_for_person else "model"
        case Cancelling():
            return "tool"
        case RunningCalls():
            running = {call.plan.site for call in session.turn.calls if call.is_running}
            if Site.SERVER in running:
                return "tool"
            if Site.CLIENT in running:
                return "client"
            if Site.CHILD in running:
                return "person" if {*children} == {"person"} else "tool"
            return "person" if session.turn.is_waiting_for_person else "tool"
        case _:
            assert_never(session.turn)
