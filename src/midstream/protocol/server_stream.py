"""The server's half of the stream protocol, without I/O: one connection of one client.

Inlets: `receive`, `admit`, `acknowledge`, `refuse`, `deliver`, `lose`, `show`, `handle_deadline`, `fail`. After any of
them do `requests()`, send `frames_to_send()` in order, arm one timer for `next_deadline()`, and when `is_closed` close
the transport.

    opening ──open──▶ admitting ──admit()──▶ admitted ──┐
       └──────────────────┴───────────────────┴─────────┴──▶ closed

The connection is mortal and keeps nothing: the commands of a stream are in the journal, and its fold
(`session/session.py`) decides about each. Only order lives here: an ack is queued by `acknowledge`, which the shell
calls when the append has returned, and events are queued by `deliver`, in the line's order, without gap. Clause
numbers refer to `docs/spec/stream.md`.
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
from midstream.protocol.open_fields import check_open, merge_open_fields
from midstream.protocol.stream_settings import StreamSettings
from midstream.session.calls import Site
from midstream.session.references import CallRef
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
"""Seconds a new connection has for its `open`."""
EVENTS_BYTES_MAX = 256 * 1024
"""Bytes of records after which an `events` frame is full; a record above it travels alone."""


class Admit(Struct, frozen=True):
    """Look the session up, and the epoch of the record at `event_id.position`; then call `admit`."""

    open: Open
    event_id: EventId | None


class Submit(Struct, frozen=True):
    """Decide and append this command; then call `acknowledge` or `refuse`."""

    seqno: int
    received: Received


Request = Admit | Submit


class SnapshotDue(Enum):
    """Which snapshot a connection is to be shown before any more events."""

    BEGINNING = "beginning"
    """What the journal begins with since it was pruned."""
    NEWEST = "newest"
    """The session as it is."""


class EncodedPage(Struct, frozen=True):
    """Events that follow one another, encoded for every connection that stands before the first of them.

    Args:
        after: Position before the first event.
        end: Position of the last one.
        pieces: What is sent.
    """

    after: int
    end: int
    pieces: tuple[bytes, ...]


class FrameEncoding(Struct, frozen=True):
    """How frames and records are written down for one kind of transport.

    Args:
        frame: Encodes one frame other than `events`.
        records: Encodes records into as many pieces as its limits ask for.
    """

    frame: Callable[[ServerFrame], bytes]
    records: Callable[[Iterable[tuple[EventId, bytes]]], Iterable[bytes]]

    def page(self, records: Sequence[tuple[EventId, bytes]]) -> EncodedPage:
        """Encode records, one at least, each of which follows the one before it. Stored bytes go out as they are."""
        first, last = _bounds(records)
        return EncodedPage(first - 1, last, tuple(self.records(records)))


class _State(Enum):
    OPENING = "opening"
    ADMITTING = "admitting"
    ADMITTED = "admitted"
    CLOSED = "closed"


class _Terms(Struct, frozen=True):
    """The conditions under which a stream is served; see the arguments of `ServerStream`."""

    heartbeat_s: float
    retention_s: float
    retention: Retention | None
    coalesce_s: float
    degraded_reason: str
    in_flight_max: int
    stalls: StallBudgets | None


class ServerStream:
    """One connection, seen from the server. See the module's text for the order of calls.

    Args:
        heartbeat_s: Seconds of silence after which a heartbeat goes out.
        retention_s: How long the stream can be resumed, for the welcome.
        retention: How long events are kept, for the welcome; None leaves it out.
        coalesce_s: Seconds for which events are held back, so that several go out at once; a client may ask for more.
        degraded_reason: Why nothing can be resumed here; "" where it can.
        in_flight_max: Commands that may wait for their acks.
        stalls: How long a turn may be silent, for the welcome.
        wire: How frames are written down; `NATIVE` by default.
        headers: Fields from the headers of its request, in place of members of the coming `open`.
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
        """How its frames are written down."""
        self._failure: MidstreamError | None = None
        self._deadline: Deadline | None = Deadline(now + OPEN_WITHIN_S, "the client owes its open frame")
        """What is owed before the next heartbeat."""
        self._spoke_at = now
        self._open = headers or Open()
        self._event_id: EventId | None = None
        self._secret_digest = ""
        self._is_encrypted = False
        self.cursor = START.position
        """Position after which `deliver` goes on."""
        self._was_admitted = False
        self._cancel_after_s: float | None = None
        self._is_left = False
        """The client sent `close`: it leaves the turn to itself."""
        self.snapshot_due: SnapshotDue | None = None
        """Which snapshot `show` must be given before anything is delivered; None where none is owed."""
        self._in_flight: set[int] = set()
        self._requests: list[Request] = []
        self._held: list[Submit] = []
        """Commands that came before the admission; they are requested after it or never."""
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
        """Make a connection's half with an operator's settings; a reason of the server's own comes first."""
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
        """Whether this connection is over: send what is queued, close the transport, call nothing more."""
        return self._state is _State.CLOSED

    @property
    def failure(self) -> MidstreamError | None:
        """Why this connection was ended by the server; None while it lives and where the client ended it."""
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
        """Whether this connection's `open` showed that secret."""
        return hmac.compare_digest(self._open.secret.encode(), secret.encode())

    @property
    def connection(self) -> int:
        """The number the client gave this connection; 0 before the `open`, and of a client that does not count."""
        return self._open.connection

    def is_before(self, other: ServerStream) -> bool:
        """Whether the client made this connection before `other` one of the same stream, and numbered it so
        (STREAM-50).

        A network may hold a connection back until after the one that replaced it.
        """
        return 0 < self._open.connection < other._open.connection

    @property
    def cancels_after_s(self) -> float | None:
        """Seconds after which the turn is stopped unless the client comes back; None where it goes on (STREAM-55).

        Meant for the moment the connection is over. One that the server ended for reasons of its own, or gave to a
        newer one, or that the client closed with a word, is not lost.
        """
        is_ours = isinstance(self._failure, UnavailableError | StreamFencedError)
        is_lost = self._was_admitted and not (self._is_left or is_ours)
        return self._cancel_after_s if is_lost else None

    @property
    def coalesce_s(self) -> float:
        """Seconds to wait for more when something has come to deliver."""
        return min(max(self._terms.coalesce_s, self._open.coalesce_s), COALESCE_S_MAX)

    def is_fenced_by(self, session: Session) -> bool:
        """Whether, by the journal, a newer connection has the stream: end this one, deliver nothing more."""
        known = session.streams.get(self._open.stream)
        return known is not None and known.is_beyond(self._open.connection)

    def is_turn_over(self, session: Session) -> bool:
        """Whether the turn of this stream has ended and all events so far were delivered.

        A transport whose body has an end ends it here and nowhere else (STREAM-27).
        """
        known = session.streams.get(self._open.stream)
        if known and known.queued and not known.turn:
            is_waiting = any(each.number == known.queued for each in session.queue)
            return not is_waiting and self.cursor >= session.position
        if not known or not known.turn or self.cursor < session.position:
            return False
        return session.turns > known.turn or not session.is_live

    def requests(self) -> list[Request]:
        """Return the requests for the shell, in order, once."""
        requests, self._requests = self._requests, []
        return requests

    @property
    def has_frames(self) -> bool:
        """Whether there is something to send."""
        return bool(self._frames)

    def frames_to_send(self) -> list[bytes]:
        """Return the encoded frames to send, in order, once."""
        frames, self._frames = self._frames, []
        return frames

    def next_deadline(self) -> Deadline | None:
        """Return when to call `handle_deadline`, and why; None while there is no deadline."""
        if self._deadline is not None or not self.is_admitted:
            return self._deadline
        return Deadline(self._spoke_at + self._terms.heartbeat_s, "the client expects a sign of life")

    # --- inlets -------------------------------------------------------------------------------------------------

    def receive(self, body: bytes, *, now: float) -> None:
        """Take one frame off the wire.

        Never raises for what the peer did: a broken rule queues an `error` frame and closes (STREAM-33).
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
            session: The fold of the journal, as far as it has gone.
            epoch_at: Epoch of the record at the position of the client's event id; None where it sent none or where
                there is no such record, or no more.
            pruned_to: The last event that was pruned, as far as is known.
            secret_digest: What stands for the client's secret in this session; None for a digest of it.
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
        """Queue the ack of a command. Call it when the append has returned, never before (STREAM-13)."""
        self._in_flight.discard(seqno)
        if not self.is_closed:
            self._queue(Ack(seqno), now=now)

    def refuse(self, seqno: int, error: MidstreamError, *, now: float) -> None:
        """Queue the refusal of a command; the connection goes on."""
        self._in_flight.discard(seqno)
        if not self.is_closed:
            self._queue(_frame_of(error, seqno), now=now)

    def deliver(self, records: Sequence[tuple[EventId, bytes]], *, now: float) -> None:
        """Queue records as events; the first one follows `cursor`, each other one the one before it."""
        if records:
            self.pass_on(self.wire.page(records), now=now)

    def pass_on(self, page: EncodedPage, *, now: float) -> None:
        """Queue the events of a page that was encoded for this `wire`; the first one follows `cursor`."""
        if self._state is _State.CLOSED:
            return
        self._advance_over(page)
        self._frames += page.pieces
        self._note_traffic(now)

    def lose(self, pruned_to: EventId, *, now: float) -> None:
        """Send that the next events up to this one were pruned; continue behind it."""
        if self.is_closed:
            return
        self.cursor = pruned_to.position
        has_snapshot = self._open.snapshots is not SnapshotWhen.NEVER
        self.snapshot_due = SnapshotDue.BEGINNING if has_snapshot else None
        oldest = pruned_to.position + 1
        reason = f"the events before position {oldest} are no longer kept"
        self._queue(Gone(str(pruned_to), reason, oldest, has_snapshot), now=now)

    def show(self, session: Session, event_id: EventId, body: bytes, *, now: float) -> None:
        """Queue the snapshot that is due, and go on behind it.

        Args:
            session: The fold at `event_id`.
            body: It as clients are shown it, in JSON.
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
        """Do what is owed by now; harmless when it is early.

        Args:
            newest: The newest event of the session, for the heartbeat.
            waiting_on: What the turn waits for, see `waiting_on`.
        """
        deadline = self.next_deadline()
        if deadline is None or now < deadline.at:
            return
        if self._state is _State.OPENING:
            # Not the client's fault: a bad network may hold its first frame back. It tries again.
            self.fail(ConnectionLostError(f"no open frame came within {OPEN_WITHIN_S:g} s"), now=now)
            return
        self._queue(HeartbeatFrame(str(newest), waiting_on), now=now)

    def fail(self, error: MidstreamError, *, now: float) -> None:
        """End the connection with an `error` frame: draining, fenced, a store that does not answer."""
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
        # STREAM-56: the client may have sent those that it counted in its `open` before it received the welcome.
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
        """Return why a client is not admitted to its stream."""
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
            # STREAM-6. Without an event id it is a client whose first command never arrived: it plays it back.
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
    """Return the digest of the secret that a client shows: of the old one where its stream was opened with that."""
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
    """Return a decoded command, ready for `session.decide`.

    Raises:
        MalformedFrameError: It is no payload of this protocol, or its number does not fit it.
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
    """Return the command that a person's answer is."""
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
    """Return how a stream's turn stands, see `Welcome.turn_status`."""
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
    told = {} if stalls is None else asdict(stalls)
    return {name: seconds if math.isfinite(seconds) else None for name, seconds in told.items()}


def waiting_on(session: Session, children: Collection[str] = ()) -> str:
    """Return what the turn waits for: model, tool, client, person, nothing.

    Args:
        children: The same of each sub-agent that works for it, as far as is known. A sub-agent is a tool, unless it
            rests on a person itself.
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
