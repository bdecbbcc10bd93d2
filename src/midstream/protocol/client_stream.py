"""The client's half of the stream protocol, without I/O: one stream, over as many connections as it takes.

After every call that changes something: do `writes()`, send `frames_to_send()`, deliver `events()`, and arm one
timer for `next_deadline()`. The order is the promise: a command is in the checkpoint before it is on the wire, so
that its number never means two things (STREAM-11).

    waiting ──deadline──▶ connecting ──connected()──▶ opening ──welcome──▶ live
       ▲                       │                         │                  │
       └────disconnected()─────┴──────── dropping ◀──────┴── fault, silence ┘
    any of them ──turn ended, refused for good, detached──▶ ended

The shell keeps a transport open while `is_connection_wanted`, closes it as soon as that is False, and says
`disconnected` whenever a transport is gone, whoever closed it. While it `wants_secret`, the shell reads what opens
the session anew and says so by `show`, before any connection. Clause numbers refer to `docs/spec/stream.md`.
"""

from __future__ import annotations

from enum import Enum
from typing import assert_never

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from midstream.errors import (
    ConnectionLostError,
    FrameTooLargeError,
    MidstreamError,
    ProtocolError,
    SeqnoGapError,
    SeqnoReusedError,
    SessionBusyError,
    StoreDamagedError,
    StreamNotFoundError,
    UsageError,
)
from midstream.protocol.checkpoint import (
    FILLER,
    Checkpoint,
    CommandKept,
    CommandsAcked,
    CursorMoved,
    Forgotten,
    Write,
)
from midstream.protocol.durable_positions import KnownEpoch, known_after, promised_after, require_promised
from midstream.protocol.frame_errors import KEEPS_CHECKPOINT, error_of
from midstream.protocol.frames import (
    FRAME_BYTES_MAX,
    HEARTBEAT_S,
    IN_FLIGHT_MAX,
    Ack,
    CancelPayload,
    ClientFrame,
    Close,
    CommandFrame,
    Error,
    EventId,
    Events,
    Gone,
    HeartbeatFrame,
    Open,
    Payload,
    Ping,
    ServerFrame,
    SnapshotFrame,
    SnapshotWhen,
    Welcome,
    decode_payload,
    decode_server,
    encode,
)
from midstream.protocol.shown_secrets import ShownSecrets
from midstream.protocol.stream_settings import HEARTBEAT_S_MAX
from midstream.protocol.turn_silence import TurnSilence
from midstream.retries import (
    HEARTBEATS_MISSED_MAX,
    RECONNECT_BACKOFF,
    STOPPED_PATIENCE_S,
    Backoff,
    pause_s,
)
from midstream.session import records
from midstream.session.records import (
    CommandAccepted,
    EpochStarted,
    MessageAccepted,
    MessageQueued,
    MessageWithdrawn,
    Record,
    StallNoticed,
    StreamOpened,
    TurnEnded,
    TurnResumed,
)
from midstream.session.session import COMMANDS_MAX
from midstream.session.turn.states import LOOK_BACK_S
from midstream.timing import Deadline

STALL_AFTER_S = 60.0
"""Seconds without an event after which a turn that waits for a machine counts as stalled: six heartbeats."""
CONNECTIONS_OF_A_LIFE = 2**24
"""Connections one process makes of a stream: the numbers of the next process begin above them."""
COMMAND_OVERHEAD_BYTES = 64
"""What a command's frame adds to its payload, at most."""
_NEXT_TRY = "the next try to connect"


# --- what is to be delivered to the application ---------------------------------------------------------------------


class Applied(Struct, frozen=True):
    """The next record of the session's line."""

    event_id: EventId
    record: Record


class Forget(Struct, frozen=True):
    """What came after `event_id` is not on the line any more; what is follows."""

    event_id: EventId
    reason: str
    has_snapshot: bool = False
    """A snapshot follows, which says all there is to know."""


class Replaced(Struct, frozen=True):
    """The session as it was at `event_id`, in the place of all that came before; see `frames.Snapshot`."""

    event_id: EventId
    session: msgspec.Raw


ClientEvent = Applied | Forget | Replaced


class _State(Enum):
    WAITING = "waiting"
    CONNECTING = "connecting"
    OPENING = "opening"
    LIVE = "live"
    DROPPING = "dropping"
    ENDED = "ended"


class ClientStream:
    """One stream, seen from the client. See the module's text for the order of calls.

    Args:
        stream: The stream key; "" for a reader, who says nothing and never ends by itself.
        secret: The stream's secret, which a reader may need too.
        old_secret: What the secret was before it was changed.
        after: Where a reader begins: after this event, or at the session's end where it is None.
        cancel_after_s: See `Open`: the server stops the turn when this client was gone for so long.
        life: A number above those of the processes that had this stream before.
        snapshots: When a snapshot is taken in the place of events.
        patience_s: Seconds without any working connection after which the stream ends with
            `ConnectionLostError`; it can still be resumed.
        stall_after_s: Seconds without an event after which `is_stalled` says so.
    """

    is_encrypted: bool | None = None
    """Whether the server encrypts the session under its client's secret; None until it said so."""
    _known: KnownEpoch | None = None
    """The newest epoch of which the server said when it began."""

    def __init__(
        self,
        stream: str = "",
        secret: str = "",
        *,
        old_secret: str = "",
        after: EventId | None = None,
        cancel_after_s: float | None = None,
        life: int = 0,
        snapshots: SnapshotWhen = SnapshotWhen.NEVER,
        backoff: Backoff = RECONNECT_BACKOFF,
        patience_s: float = LOOK_BACK_S,
        stall_after_s: float = STALL_AFTER_S,
        now: float,
    ) -> None:
        self._stream = stream
        self._shown = ShownSecrets(secret, old_secret, own=secret if stream else "")
        self._cancel_after_s = cancel_after_s
        self._backoff = backoff
        self._patience_s = patience_s
        self._silence = TurnSilence(stall_after_s)
        self._state = _State.WAITING
        self._deadline: Deadline | None = Deadline(now, "the first connection")
        self._error: MidstreamError | None = None
        # Outbound: commands below `_acked` are done, those below `_sent` were sent on this connection.
        self._acked = self._sent = self._next_seqno = 0
        self._unacked: dict[int, bytes] = {}
        self._acked_apart: set[int] = set()
        """Commands above `_acked` that were acknowledged one by one; after a restart they are played back once more."""
        self._in_flight_max = IN_FLIGHT_MAX
        self._abort_seqno: int | None = None
        self._is_finishing = False
        # Inbound.
        self._promised: EventId | None = None  # the newest one that was seen of those the server may not lose
        self._received, self._snapshots = after, snapshots
        self._is_begun = not stream
        """Whether the stream's first record was seen: what stands before it is not the stream's business."""
        self._turn = 0
        self._is_queued = False
        """Its message waits for the turns before it, which are not its business."""
        self._end: EventId | None = None
        # Connection.
        self._connection = life * CONNECTIONS_OF_A_LIFE
        self._is_kept = bool(stream)
        self._is_degraded = False
        self._is_reconnecting = False
        self._trouble: MidstreamError | None = None
        self._failures, self._retry_after_s, self._retry_at = 0, 0.0, now
        self._lost_at = now
        self._silence_s = HEARTBEATS_MISSED_MAX * HEARTBEAT_S
        self._announced: EventId | None = None
        """The event a heartbeat spoke of before it came; if it has not come by the next one, it is lost."""
        self._unanswered = 0
        """Heartbeats that came while an ack was owed."""
        self._writes: list[Write] = []
        self._frames: list[bytes] = []
        self._events: list[ClientEvent] = []

    @classmethod
    def resume(
        cls,
        checkpoint: Checkpoint,
        *,
        life: int = 0,
        snapshots: SnapshotWhen = SnapshotWhen.NEVER,
        backoff: Backoff = RECONNECT_BACKOFF,
        patience_s: float = LOOK_BACK_S,
        stall_after_s: float = STALL_AFTER_S,
        now: float,
    ) -> ClientStream:
        """Go on with a stream of an earlier process, which had a lower `life`."""
        stream = cls(
            checkpoint.stream,
            checkpoint.secret,
            after=checkpoint.event_id,
            life=life,
            snapshots=snapshots,
            backoff=backoff,
            patience_s=patience_s,
            stall_after_s=stall_after_s,
            now=now,
        )
        stream._is_begun = checkpoint.event_id is not None
        stream._promised, stream._known = checkpoint.promised, checkpoint.known
        stream._next_seqno = checkpoint.next_seqno
        stream._unacked = dict(checkpoint.unacked)
        stream._acked = checkpoint.next_seqno - len(checkpoint.unacked)
        aborts = [n for n, said in checkpoint.unacked if isinstance(decode_payload(said), CancelPayload)]
        stream._abort_seqno = aborts[0] if aborts else None
        stream._is_finishing = checkpoint.is_finishing
        return stream

    # --- what the shell may ask ---------------------------------------------------------------------------------

    @property
    def stream(self) -> str:
        """The stream key; "" for a reader."""
        return self._stream

    @property
    def secret(self) -> str:
        """The secret that is shown; "" where there is none."""
        return self._shown.secret

    @property
    def wants_secret(self) -> bool:
        """Whether what opens the session is to be read anew and given to `show`, before a connection is made.

        So it is with each connection but the first, unless the server said that no secret opens the session, and when
        the server refused what was shown (STREAM-96).
        """
        is_due = self._state is _State.CONNECTING and self._shown.is_due
        return not self.is_ended and (self._shown.refusal is not None or is_due)

    @property
    def is_connection_wanted(self) -> bool:
        """Whether there should be a transport: open one, or close the one there is."""
        return self._state in (_State.CONNECTING, _State.OPENING, _State.LIVE)

    @property
    def is_ended(self) -> bool:
        """Whether the stream is over; `error` says whether well."""
        return self._state is _State.ENDED

    @property
    def error(self) -> MidstreamError | None:
        """Why the stream ended, or None where it ended well or has not ended."""
        return self._error

    @property
    def is_reconnecting(self) -> bool:
        """Whether a connection was lost and not made again: for a user's eyes. Never in degraded mode."""
        return self._is_reconnecting

    @property
    def is_stalled(self) -> bool:
        """Whether no event came for long while the turn waits for a machine: for a user's eyes (STREAM-47)."""
        return self._silence.is_stalled

    @property
    def trouble(self) -> MidstreamError | None:
        """What the server last said it cannot do now, until something gets through again: for a user's eyes."""
        return self._trouble

    @property
    def is_degraded(self) -> bool:
        """Whether the server said that nothing can be resumed here."""
        return self._is_degraded

    @property
    def is_kept(self) -> bool:
        """Whether there is a checkpoint of this stream: not for a reader, a degraded or a forgotten one."""
        return self._is_kept

    @property
    def is_unread(self) -> bool:
        """Whether the application has received nothing of this stream; never so for a reader."""
        return bool(self._stream) and self._received is None

    @property
    def is_acknowledged(self) -> bool:
        """Whether everything that was said is in the journal."""
        return not self._unacked

    @property
    def end(self) -> EventId | None:
        """The event that ended the stream's turn, once it came."""
        return self._end

    @property
    def is_finishing(self) -> bool:
        """Whether it only waits for acks: a stream that stops, answers or takes back, and has no turn of its own."""
        return self._is_finishing

    @property
    def turn(self) -> int:
        """The stream's turn; 0 until it is known."""
        return self._turn

    @property
    def is_queued(self) -> bool:
        """Whether its message waits for the turns before it."""
        return self._is_queued

    def may_stop(self, turn: int | None) -> bool:
        """Whether `cancel` stops this turn; or where it is None, one of its own, or what is to be one."""
        if not self._stream or self.is_ended or self._is_finishing:
            return False
        return turn is None or turn == self._turn

    @property
    def waiting_on(self) -> str:
        """What the turn waited for at the last heartbeat: model, tool, client, person, nothing."""
        return self._silence.waiting_on

    def writes(self) -> list[Write]:
        """Return what to write into the checkpoint, in one transaction, before any frame is sent."""
        writes, self._writes = self._writes, []
        return writes

    def frames_to_send(self) -> list[bytes]:
        """Return the encoded frames to send, in order, and forget them. Do `writes()` first."""
        assert not self._writes, "a frame must not leave before the checkpoint is written"
        frames, self._frames = self._frames, []
        return frames

    def events(self) -> list[ClientEvent]:
        """Return what to deliver to the application, in order, and forget it."""
        events, self._events = self._events, []
        return events

    def next_deadline(self) -> Deadline | None:
        """Say when to call `handle_deadline`, and why, or None while nothing is owed."""
        if self._silence.due_at is None or self._deadline is None:
            return self._deadline
        return min(self._deadline, Deadline(self._silence.due_at, "the turn owes an event"))

    # --- what the application does ------------------------------------------------------------------------------

    def submit(self, payload: Payload) -> int:
        """Number a payload, keep it and send it until it is acknowledged; return its number.

        On a stream that was left and can be resumed it is kept for the one who does. After the end of the turn it is
        numbered and goes nowhere.

        Raises:
            FrameTooLargeError: It does not fit a frame. Nothing was changed.
            UsageError: This is a reader, or the stream has no numbers left. Nothing was changed.
        """
        body = encode(payload)
        if len(body) > FRAME_BYTES_MAX - COMMAND_OVERHEAD_BYTES:
            raise FrameTooLargeError(f"a payload of {len(body)} bytes does not fit a frame")
        if not self._stream:
            raise UsageError("a reader of a session has no stream to say anything on")
        if self._next_seqno >= COMMANDS_MAX:
            raise UsageError(f"a stream takes {COMMANDS_MAX} commands at most")
        seqno = self._next_seqno
        self._next_seqno += 1
        if not self.is_ended or (self._is_kept and self._end is None):
            self._unacked[seqno] = body
            self._keep(CommandKept(seqno, body))
            self._send_commands()
        return seqno

    def abort(self) -> None:
        """Stop the stream's turn, or on a stream without one whichever runs. Asking twice is harmless.

        Somebody is looking: where the next try to connect is waited for, it comes as soon as the server lets it.
        """
        if self._abort_seqno is not None or self.is_ended:
            return
        self._abort_seqno = self.submit(CancelPayload(self._turn or None))
        if self._state is _State.WAITING:
            self._deadline = Deadline(self._retry_at, _NEXT_TRY)

    def finish(self) -> None:
        """End as soon as everything said is acknowledged, without waiting for a turn."""
        self._is_finishing = True
        self._end_if_finished()

    def detach(self) -> None:
        """Leave. The turn goes on without this client, and the stream can be resumed (STREAM-25)."""
        if self.is_ended:
            return
        if self._state is _State.LIVE:
            self._queue(Close())
        self._end_with(None, is_resumable=True)

    def handled(self, event_id: EventId) -> None:
        """The application is done with this event: it will not be delivered again (STREAM-24)."""
        if event_id == self._end:
            self._forget()
        else:
            self._keep(CursorMoved(event_id, self._promised, self._known))

    def show(self, secret: str, old_secret: str = "") -> None:
        """Show these secrets from the next connection on; "" leaves it at what was shown before.

        Where the server has refused just these, the stream ends with what it said.
        """
        self._shown = self._shown.learnt(secret, old_secret)
        if self._shown.refusal is not None:
            self._end_with(self._shown.refusal)

    # --- what the transport does --------------------------------------------------------------------------------

    def connected(self, *, now: float) -> None:
        """There is a transport. The `open` goes first, and at once behind it all that was not acknowledged."""
        if self._state is not _State.CONNECTING:
            return
        if self._shown.refusal is not None:
            self._end_with(self._shown.refusal)
            return
        self._state = _State.OPENING
        self._sent = self._acked
        event_id = str(self._received) if self._is_begun and self._received is not None else None
        self._connection += 1
        self._queue(
            Open(
                self._stream,
                self._shown.secret,
                event_id,
                self._next_seqno,
                self._connection if self._stream else 0,
                self._cancel_after_s,
                snapshots=self._snapshots,
                old_secret=self._shown.old_secret,
            )
        )
        self._send_commands()
        self.was_heard(now=now)

    def disconnected(self, error: MidstreamError | None = None, *, chance: float, now: float) -> None:
        """The transport is gone or could not be made.

        Args:
            error: What the transport says of it; one whose `retry` is never ends the stream.
            chance: A random number in [0, 1), for the wait before the next try.
        """
        if self.is_ended or self._state is _State.WAITING:
            return
        self._frames = []
        self._was_moved(None)
        if self._is_degraded:
            # STREAM-9: nothing was kept on either side, so that there is nothing to go on with.
            self._end_with(error or ConnectionLostError("the connection to a degraded server broke"))
            return
        is_final = error is not None and error.retry in ("never", "ask")
        if is_final and not self._has_doubts(error):
            self._end_with(error)
            return
        self._shown = replace(self._shown, is_due=self.is_encrypted is not False)
        if error is not None and not isinstance(error, ConnectionLostError):
            self._trouble = error
        if self._failures == 0:
            self._lost_at = now
        self._failures += 1
        is_stopped = self._abort_seqno is not None and self._abort_seqno < self._acked
        patience_s = min(self._patience_s, STOPPED_PATIENCE_S) if is_stopped else self._patience_s
        if self._failures > 1 and now - self._lost_at >= patience_s:
            message = f"no connection could be kept for {patience_s:g} s"
            self._end_with(ConnectionLostError(message))
            return
        # The first try comes at once: most cuts are short. The last one comes when patience ends, and not after that.
        wait_s = self._backoff.wait_s(self._failures - 1, chance=chance)
        wait_s = min(wait_s, self._lost_at + patience_s - now)
        asked_s = max(self._retry_after_s, (error.retry_after_s or 0.0) if error else 0.0)
        self._retry_after_s = 0.0
        self._is_reconnecting = True
        self._state = _State.WAITING
        self._retry_at = now + pause_s(asked_s)
        self._deadline = Deadline(max(now + wait_s, self._retry_at), _NEXT_TRY)

    def receive(self, body: bytes, *, now: float) -> None:
        """Take one frame off the wire. Acks are cumulative and may repeat.

        Never raises for what the peer did: a broken rule drops the connection and the next one resumes.
        """
        if self._state not in (_State.OPENING, _State.LIVE):
            return
        before, told = (self._state, self._received), len(self._events)
        try:
            self._take(decode_server(body), now)
        except ProtocolError:
            self._drop()
        except StoreDamagedError as error:  # a record that cannot be read, or is not there any more
            self._end_with(error)
        if before != (self._state, self._received) and not _is_silence(self._events[told:]):
            self._was_moved(now)
        self.was_heard(now=now)

    def was_heard(self, *, now: float) -> None:
        """Count the server's silence from now on; for a shell that heard a part of a frame (STREAM-46)."""
        if self._state in (_State.OPENING, _State.LIVE):
            self._deadline = Deadline(now + self._silence_s, "the server owes a sign of life")

    def listens_again(self, *, now: float) -> None:
        """Count all silence from now on; for a shell that did not read for a while."""
        self.was_heard(now=now)
        self._silence.pause(now)

    def handle_deadline(self, *, now: float) -> None:
        """Do what is owed by now; harmless when it is early."""
        if self._silence.judge(now):  # STREAM-47: reported, and nothing else
            self._queue(Ping())
        if self._deadline is None or now < self._deadline.at:
            return
        if self._state is _State.WAITING:
            self._state = _State.CONNECTING
            self._deadline = None
        else:
            self._drop()

    def _was_moved(self, now: float | None) -> None:
        """Count the turn's silence anew: an event came, or a connection began, or there is none to hear it on."""
        if now is not None and self._state is _State.LIVE and self._stream:
            self._silence.begin(now)
        else:
            self._silence.stop()

    # --- frames -------------------------------------------------------------------------------------------------

    def _take(self, frame: ServerFrame, now: float) -> None:
        if isinstance(frame, Error):
            self._take_error(frame)
            return
        if isinstance(frame, Welcome) is not (self._state is _State.OPENING):
            raise ProtocolError("a welcome comes first and once")
        match frame:
            case Welcome():
                self._take_welcome(frame)
            case Ack():
                self._take_one_ack(frame.seqno) if frame.is_single else self._take_ack(frame.seqno)
            case Events():
                self._take_events(frame)
            case Gone():
                self._take_gone(frame)
            case SnapshotFrame():
                self._take_snapshot(frame)
            case HeartbeatFrame():
                self._take_heartbeat(frame, now)
            case _:
                assert_never(frame)

    def _take_welcome(self, frame: Welcome) -> None:
        if frame.acked > self._next_seqno:
            # The checkpoint is older than what was sent: its numbers would be given out again (STREAM-11).
            what = f"the server has {frame.acked} commands of this stream, we numbered {self._next_seqno}"
            self._end_with(SeqnoReusedError(what))
            return
        require_promised(self._promised, EventId.parse(frame.event_id), is_owned=bool(self._stream))
        resume_from = EventId.parse(frame.resume_from)
        self._known = known_after(self._known, self._promised, resume_from.epoch, frame.began_at)
        if frame.acked < self._acked:
            self._end_with(StreamNotFoundError("the server does not know what it had acknowledged"))
            return
        if not self._is_begun or self._received is None:
            self._received = resume_from
        self._state = _State.LIVE
        self._shown = self._shown.taken()
        self._is_reconnecting = False
        self._announced = None
        self._unanswered = 0
        self._turn = frame.turn or self._turn
        self._is_queued = bool(self._stream and frame.acked) and not (self._turn or self._is_finishing)
        if frame.heartbeat_s > 0:
            self._silence_s = HEARTBEATS_MISSED_MAX * min(frame.heartbeat_s, HEARTBEAT_S_MAX)
        self._in_flight_max = max(1, min(frame.in_flight_max, IN_FLIGHT_MAX))
        self.is_encrypted = frame.is_encrypted
        if frame.is_degraded:
            self._is_degraded = True
            self._forget()
        self._take_ack(frame.acked - 1)

    def _take_ack(self, seqno: int) -> None:
        if seqno >= self._next_seqno:
            raise ProtocolError(f"command {seqno} was acknowledged and never sent")
        if seqno >= self._acked:
            for each in range(self._acked, seqno + 1):
                del self._unacked[each]
            self._acked = seqno + 1
            self._acked_apart = {each for each in self._acked_apart if each > seqno}
            self._sent = max(self._sent, self._acked)
            self._keep(CommandsAcked(seqno))
            self._failures = self._unanswered = 0
            self._trouble = None
        self._send_commands()
        self._end_if_finished()

    def _take_one_ack(self, seqno: int) -> None:
        """Take an ack of one command alone (STREAM-53)."""
        if not 0 <= seqno < self._next_seqno:
            raise ProtocolError(f"command {seqno} was acknowledged and never sent")
        if seqno > self._acked:
            self._acked_apart.add(seqno)
            return
        while seqno + 1 in self._acked_apart:
            seqno += 1
        self._take_ack(seqno)

    def _take_events(self, frame: Events) -> None:
        for event in frame.events:
            if self.is_ended:
                return  # what follows the end of the turn is not the stream's business
            event_id = EventId.parse(event.id)
            if self._is_next(event_id):
                self._received = event_id
                self._failures = 0
                self._trouble = None
                record = records.decode(bytes(event.record))
                if isinstance(record, EpochStarted):
                    self._known = known_after(self._known, self._promised, event_id.epoch, record.at)
                self._promised = promised_after(self._promised, event_id, record, is_owned=bool(self._stream))
                self._apply(Applied(event_id, record))

    def _is_next(self, event_id: EventId) -> bool:
        """Tell the next event from one that was applied before; anything else breaks the line."""
        assert self._received is not None
        if event_id.position <= self._received.position and event_id.epoch <= self._received.epoch:
            return False  # STREAM-21: applied before
        if event_id.position != self._received.position + 1 or event_id.epoch < self._received.epoch:
            raise ProtocolError(f"event {event_id} does not follow {self._received}")
        return True

    def _apply(self, event: Applied) -> None:
        record = event.record
        if isinstance(record, StreamOpened) and record.stream == self._stream:
            self._is_begun = True
        if not self._is_begun or not self._is_ours(record):
            return
        self._events.append(event)
        if not self._stream:
            return
        match record:
            case CommandAccepted() if record.stream == self._stream:
                self._take_ack(record.seqno)
            case MessageAccepted() | TurnResumed() if record.stream == self._stream:
                self._turn = record.turn
            case MessageWithdrawn() if record.stream == self._stream:
                self._finish_at(event.event_id)
            case TurnEnded() if record.turn == self._turn:
                self._finish_at(event.event_id)
            case _:
                pass

    def _is_ours(self, record: Record) -> bool:
        """Whether the application is shown a record: a stream whose message waits is not shown the turns before it."""
        is_own = bool(self._stream) and getattr(record, "stream", None) == self._stream
        if is_own and isinstance(record, MessageQueued | MessageAccepted):
            self._is_queued = isinstance(record, MessageQueued)
        return is_own or not self._is_queued

    def _finish_at(self, end: EventId) -> None:
        self._end = end
        self._queue(Close())
        self._end_with(None, is_resumable=True)  # until the application has handled it

    def _take_gone(self, frame: Gone) -> None:
        self._received = EventId.parse(frame.resume_from)
        self._is_begun = not self._stream
        self._announced = None
        self._events.append(Forget(self._received, frame.reason, frame.has_snapshot))
        self._keep(CursorMoved(None, self._promised, self._known))

    def _take_snapshot(self, frame: SnapshotFrame) -> None:
        self._received = EventId.parse(frame.event_id)
        self._is_begun = True  # what it was before is within
        self._announced = None
        self._failures = 0
        self._events.append(Replaced(self._received, frame.session))
        if frame.is_over and self._stream:
            self._finish_at(self._received)

    def _take_heartbeat(self, frame: HeartbeatFrame, now: float) -> None:
        newest = EventId.parse(frame.event_id)
        self._silence.heartbeat(frame.waiting_on, now)
        assert self._received is not None
        if self._announced is not None and self._received.position < self._announced.position:
            raise ProtocolError(f"the event {self._announced} was announced and did not come")
        self._announced = newest
        self._unanswered += self._sent > self._acked
        if self._unanswered >= HEARTBEATS_MISSED_MAX:
            raise ProtocolError(f"command {self._acked} was not acknowledged")  # STREAM-14
        self._failures = 0

    def _take_error(self, frame: Error) -> None:
        error = error_of(frame)
        self._retry_after_s = frame.retry_after_s or 0.0
        is_lost_order = isinstance(error, SeqnoGapError) and error.expected in self._unacked
        is_final = frame.retry in ("never", "ask") or isinstance(error, SessionBusyError)
        if self._is_degraded or (is_final and not (is_lost_order or self._has_doubts(error))):
            self._end_with(error)
        else:
            self._trouble = error
            self._drop()  # STREAM-28: the next connection plays back what was refused

    def _has_doubts(self, error: MidstreamError | None) -> bool:
        """Whether the secret may have been changed by another process: it is read once more before the stream ends."""
        doubted = None if self._is_degraded else self._shown.doubted(error)
        self._shown = doubted or self._shown
        return doubted is not None

    # --- ends ---------------------------------------------------------------------------------------------------

    def _drop(self) -> None:
        self._state = _State.DROPPING
        self._deadline = None

    def _end_if_finished(self) -> None:
        if self._is_finishing and not self._unacked and not self.is_ended:
            self._queue(Close())
            self._end_with(None)

    def _end_with(self, error: MidstreamError | None, *, is_resumable: bool = False) -> None:
        self._state = _State.ENDED
        self._deadline = None
        self._silence.stop()
        self._error = error
        self._is_reconnecting = False
        if not is_resumable and (error is None or error.code not in KEEPS_CHECKPOINT):
            self._forget()

    def _forget(self) -> None:
        self._keep(Forgotten())
        self._is_kept = False

    def _keep(self, write: Write) -> None:
        if self._is_kept:
            self._writes.append(write)

    # --- sending ------------------------------------------------------------------------------------------------

    def _send_commands(self) -> None:
        if self._state not in (_State.OPENING, _State.LIVE):
            return
        room = self._acked + len(self._acked_apart) + self._in_flight_max
        for seqno in range(self._sent, min(self._next_seqno, room)):
            if self._state is _State.OPENING and self._unacked[seqno] == FILLER:
                return  # STREAM-48: the server may have the command that was lost
            if seqno not in self._acked_apart:
                self._queue(CommandFrame(seqno, msgspec.Raw(self._unacked[seqno])))
            self._sent = seqno + 1

    def _queue(self, frame: ClientFrame) -> None:
        self._frames.append(encode(frame))


def _is_silence(events: list[ClientEvent]) -> bool:
    """Whether the events only report that nothing came."""
    return bool(events) and all(isinstance(e, Applied) and isinstance(e.record, StallNoticed) for e in events)
