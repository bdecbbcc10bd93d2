"""The client's half of the stream protocol, without I/O: one stream over any number of connections.

After every call that changes something: do `writes()`, send `frames_to_send()`, deliver `events()`, and arm one timer
for `next_deadline()`. In this order a command is in the checkpoint before it is sent, so that its number identifies
only one command (STREAM-11).

The shell keeps a transport open while `is_connection_wanted`, closes it when that is False, and calls `end_connection`
when a transport has ended, on either side. While `needs_secret`, the shell reads the session's secrets again and calls
`show`, before any connection. Clause numbers refer to `docs/spec/stream.md`.

Commands are in `command_outbox`, events in `event_inbox`, connections in `link`; this module connects them.
"""

from __future__ import annotations

from typing import assert_never

import msgspec
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
from midstream.number_checks import require_seconds
from midstream.protocol.checkpoint import Checkpoint, CommandKept, CommandsAcked, Forgotten, Write
from midstream.protocol.command_outbox import Outbox
from midstream.protocol.event_inbox import Applied, ClientEvent, Inbox, is_silence
from midstream.protocol.frame_errors import KEEPS_CHECKPOINT, error_of
from midstream.protocol.frames import (
    CANCEL_AFTER_S_MAX,
    FRAME_BYTES_MAX,
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
    decode_server,
    encode,
    encode_payload,
    is_of_unknown_type,
)
from midstream.protocol.link import Link, LinkState
from midstream.protocol.sent_secrets import SentSecrets
from midstream.protocol.turn_silence import TurnSilence
from midstream.retries import RECONNECT_BACKOFF, Backoff
from midstream.session.records import CommandAccepted, MessageWithdrawn, TurnEnded
from midstream.session.turn.states import LOOK_BACK_S
from midstream.timing import Deadline

STALL_AFTER_S = 60.0
"""Seconds without an event after which a turn that waits for a machine counts as stalled: six heartbeats."""
COMMAND_OVERHEAD_BYTES = 64
"""Greatest number of bytes that a command's frame adds to its payload."""


class ClientStream:
    """One stream at its client. The module's docstring has the order of calls.

    Args:
        stream: The stream key; "" for a reader, which sends no commands and has no end of its own.
        secret: The stream's secret, which a reader may also need.
        old_secret: The secret before it was changed.
        after: The event after which a reader begins; None for the session's end.
        cancel_after_s: See `Open`: the server cancels the turn after so many seconds without this client.
        life: A number above those of the earlier processes of this stream.
        snapshots: When the client accepts a snapshot instead of events.
        patience_s: Seconds without any working connection after which the stream ends with
            `ConnectionLostError`; it can still be resumed.
        stall_after_s: Seconds without an event after which `is_stalled` is True.

    Raises:
        UsageError: `cancel_after_s` is out of its range.
    """

    def __init__(
        self,
        stream: str = "",
        secret: str = "",
        *,
        old_secret: str = "",
        after: EventId | None = None,
        cancel_after_s: float | None = None,
        life: int = 0,
        snapshots: SnapshotWhen = SnapshotWhen.GONE,
        backoff: Backoff = RECONNECT_BACKOFF,
        patience_s: float = LOOK_BACK_S,
        stall_after_s: float = STALL_AFTER_S,
        now: float,
    ) -> None:
        if cancel_after_s is not None:
            require_seconds("cancel_after_s", cancel_after_s, most=CANCEL_AFTER_S_MAX)
        self._stream = stream
        self._shown = SentSecrets(secret, old_secret, own=secret if stream else "")
        self._cancel_after_s = cancel_after_s
        self._snapshots = snapshots
        self._outbox = Outbox()
        self._inbox = Inbox(stream, after)
        self._link = Link(life=life, backoff=backoff, patience_s=patience_s, now=now)
        self._silence = TurnSilence(stall_after_s)
        self._error: MidstreamError | None = None
        self._is_kept = bool(stream)
        self._is_degraded = False
        self.is_encrypted: bool | None = None
        """Whether the session is encrypted under its client's secret; None before a welcome."""
        self._writes: list[Write] = []
        self._frames: list[bytes] = []
        self._events: list[ClientEvent] = []

    @classmethod
    def resume(
        cls,
        checkpoint: Checkpoint,
        *,
        life: int = 0,
        snapshots: SnapshotWhen = SnapshotWhen.GONE,
        backoff: Backoff = RECONNECT_BACKOFF,
        patience_s: float = LOOK_BACK_S,
        stall_after_s: float = STALL_AFTER_S,
        now: float,
    ) -> ClientStream:
        """Continue a stream of an earlier process, which had a lower `life`."""
        stream = cls(
            checkpoint.stream,
            checkpoint.secret,
            life=life,
            snapshots=snapshots,
            backoff=backoff,
            patience_s=patience_s,
            stall_after_s=stall_after_s,
            now=now,
        )
        stream._outbox = Outbox.of(checkpoint)
        stream._inbox = Inbox.of(checkpoint)
        return stream

    # --- the state, for the shell and the application -----------------------------------------------------------

    @property
    def stream(self) -> str:
        """The stream key; "" for a reader."""
        return self._stream

    @property
    def secret(self) -> str:
        """The secret to send; "" if there is none."""
        return self._shown.secret

    @property
    def needs_secret(self) -> bool:
        """Whether the shell must read the session's secrets again and call `show`, before a connection is made.

        True before each connection but the first, unless the server does not require a secret, and after the server
        refused the secrets that were shown (STREAM-96).
        """
        is_due = self._link.state is LinkState.CONNECTING and self._shown.is_due
        return not self.is_ended and (self._shown.refusal is not None or is_due)

    @property
    def is_connection_wanted(self) -> bool:
        """Whether there should be a transport: open one, or close the existing one."""
        return self._link.is_wanted

    @property
    def is_ended(self) -> bool:
        """Whether the stream has ended; without an error if `error` is None."""
        return self._link.state is LinkState.ENDED

    @property
    def error(self) -> MidstreamError | None:
        """The error that ended the stream, or None."""
        return self._error

    @property
    def is_reconnecting(self) -> bool:
        """Whether a lost connection was not replaced yet, for display. Never in degraded mode."""
        return self._link.is_reconnecting

    @property
    def is_stalled(self) -> bool:
        """Whether no event came for long while the turn waits for a machine, for display (STREAM-47)."""
        return self._silence.is_stalled

    @property
    def trouble(self) -> MidstreamError | None:
        """The server's last temporary refusal, until a connection works again, for display."""
        return self._link.trouble

    @property
    def is_degraded(self) -> bool:
        """Whether streams cannot be resumed at this server."""
        return self._is_degraded

    @property
    def is_kept(self) -> bool:
        """Whether this stream has a checkpoint: not for a reader, a degraded or a forgotten one."""
        return self._is_kept

    @property
    def is_unread(self) -> bool:
        """Whether the application has received no event of this stream; always False for a reader."""
        return bool(self._stream) and self._inbox.received is None

    @property
    def is_acknowledged(self) -> bool:
        """Whether every command is in the journal."""
        return not self._outbox.unacked

    @property
    def end(self) -> EventId | None:
        """The event that ended the stream's turn, or None."""
        return self._inbox.end

    @property
    def is_finishing(self) -> bool:
        """Whether the stream only waits for acks: it cancels, answers or withdraws, and has no turn."""
        return self._outbox.is_finishing

    @property
    def turn(self) -> int:
        """The stream's turn; 0 before the server has sent it."""
        return self._inbox.turn

    @property
    def is_queued(self) -> bool:
        """Whether its message waits for earlier turns."""
        return self._inbox.is_queued

    def may_stop(self, turn: int | None) -> bool:
        """Return whether `abort` cancels this turn; for None, whether it cancels a turn of this stream."""
        if not self._stream or self.is_ended or self._outbox.is_finishing:
            return False
        return turn is None or turn == self._inbox.turn

    @property
    def waiting_on(self) -> str:
        """The kind of work that the turn waited for at the last heartbeat: model, tool, client, person, nothing."""
        return self._silence.waiting_on

    def writes(self) -> list[Write]:
        """Return the changes of the checkpoint, for one transaction, before any frame is sent."""
        writes, self._writes = self._writes, []
        return writes

    def frames_to_send(self) -> list[bytes]:
        """Return the new encoded frames, in order. Do `writes()` first."""
        assert not self._writes, "a frame must not leave before the checkpoint is written"
        frames, self._frames = self._frames, []
        return frames

    def events(self) -> list[ClientEvent]:
        """Return the new events for the application, in order."""
        events, self._events = self._events, []
        return events

    def next_deadline(self) -> Deadline | None:
        """Return the time and the reason for the next `handle_deadline`, or None."""
        if self._silence.due_at is None or self._link.deadline is None:
            return self._link.deadline
        return min(self._link.deadline, Deadline(self._silence.due_at, "the next event of the turn"))

    # --- calls of the application -------------------------------------------------------------------------------

    def submit(self, payload: Payload) -> int:
        """Number a payload, store it and send it until it is acknowledged; return its number.

        On a detached stream it is stored for the next process. After the end of the turn it is numbered and not sent.

        Raises:
            FrameTooLargeError: The payload does not fit into a frame. Nothing was changed.
            UsageError: This is a reader, the stream has used all its numbers, or a text has a lone surrogate. Nothing
                was changed.
        """
        body = encode_payload(payload)
        if len(body) > FRAME_BYTES_MAX - COMMAND_OVERHEAD_BYTES:
            raise FrameTooLargeError(f"a payload of {len(body)} bytes does not fit a frame")
        if not self._stream:
            raise UsageError("a reader of a session cannot send commands")
        seqno = self._outbox.number()
        if not self.is_ended or (self._is_kept and self._inbox.end is None):
            self._outbox.store(seqno, body)
            self._keep(CommandKept(seqno, body))
            self._send_commands()
        return seqno

    def abort(self) -> None:
        """Cancel the stream's turn, or the running turn if it has none. A second call has no effect.

        The next connection is tried as soon as the server permits, because a user is waiting.
        """
        if self._outbox.cancel_seqno is not None or self.is_ended:
            return
        self._outbox.cancel_seqno = self.submit(CancelPayload(self._inbox.turn or None))
        self._link.hurry()

    def finish(self) -> None:
        """End as soon as every command is acknowledged, without waiting for a turn."""
        self._outbox.is_finishing = True
        self._end_if_finished()

    def detach(self) -> None:
        """Detach. The turn continues without this client, and the stream can be resumed (STREAM-25)."""
        if self.is_ended:
            return
        if self._link.state is LinkState.LIVE:
            self._queue(Close())
        self._end_with(None, is_resumable=True)

    def mark_handled(self, event_id: EventId) -> None:
        """Store that the application has handled this event, which is not delivered again (STREAM-24)."""
        if event_id == self._inbox.end:
            self._drop_checkpoint()
        else:
            self._inbox.handled = event_id
            self._keep(self._inbox.moved_to(event_id))

    def show(self, secret: str, old_secret: str = "") -> None:
        """Send these secrets from the next connection on; "" keeps the present ones.

        If the server has refused exactly these, the stream ends with its error.
        """
        self._shown = self._shown.with_secrets(secret, old_secret)
        if self._shown.refusal is not None:
            self._end_with(self._shown.refusal)

    # --- calls of the transport ---------------------------------------------------------------------------------

    def begin_connection(self, *, now: float) -> None:
        """Use a new transport: send the `open`, and all unacknowledged commands directly after it."""
        if self._link.state is not LinkState.CONNECTING:
            return
        if self._shown.refusal is not None:
            self._end_with(self._shown.refusal)
            return
        self._link.open(now)
        self._outbox.play_back()
        self._queue(
            Open(
                self._stream,
                self._shown.secret,
                self._inbox.cursor,
                self._outbox.next_seqno,
                self._link.number if self._stream else 0,
                self._cancel_after_s,
                snapshots=self._snapshots,
                old_secret=self._shown.old_secret,
            )
        )
        self._send_commands()

    def end_connection(self, error: MidstreamError | None = None, *, chance: float, now: float) -> None:
        """Plan the next connection after a transport has ended or could not be opened.

        Args:
            error: The error of the transport; one whose `retry` is never ends the stream.
            chance: A random number in [0, 1), for the wait before the next try.
        """
        if self.is_ended or self._link.state is LinkState.WAITING:
            return
        self._frames = []
        self._silence.stop()
        if self._is_degraded:
            # STREAM-9: neither side has stored anything, so the stream cannot be resumed.
            self._end_with(error or ConnectionLostError("the connection to a degraded server was lost"))
            return
        is_final = error is not None and error.retry in ("never", "ask")
        if is_final and not self._has_doubts(error):
            self._end_with(error)
            return
        self._shown = replace(self._shown, is_due=self.is_encrypted is not False)
        is_cancelled = self._outbox.is_cancel_acked
        if ended := self._link.lose(error, is_cancelled=is_cancelled, chance=chance, now=now):
            self._end_with(ended)

    def receive(self, body: bytes, *, now: float) -> None:
        """Process one received frame. Acks are cumulative and may be repeated.

        Never raises for a fault of the peer: a violation drops the connection, and the next one resumes.
        """
        if not self._link.is_open:
            return
        before, count = (self._link.state, self._inbox.received), len(self._events)
        try:
            self._take(decode_server(body), now)
        except ProtocolError:
            if not is_of_unknown_type(body):  # frames of later versions are ignored (STREAM-34)
                self._link.drop()
        except StoreDamagedError as error:  # the record cannot be decoded, or no longer exists
            self._end_with(error)
        if before != (self._link.state, self._inbox.received) and not is_silence(self._events[count:]):
            self._restart_silence(now)
        self._link.note_traffic(now)

    def note_traffic(self, *, now: float) -> None:
        """Restart the server's silence: a part of a frame arrived (STREAM-46)."""
        self._link.note_traffic(now)

    def resume_reading(self, *, now: float) -> None:
        """Restart all silences, because the shell did not read for a while."""
        self._link.note_traffic(now)
        self._silence.pause(now)

    def handle_deadline(self, *, now: float) -> None:
        """Do the due work; without effect if none is due."""
        if self._silence.judge(now):  # STREAM-47: a stall is only reported
            self._queue(Ping())
        self._link.handle_deadline(now)

    def _restart_silence(self, now: float) -> None:
        """Restart the turn's silence, if there is a connection."""
        if self._link.state is LinkState.LIVE and self._stream:
            self._silence.begin(now)
        else:
            self._silence.stop()

    # --- frames -------------------------------------------------------------------------------------------------

    def _take(self, frame: ServerFrame, now: float) -> None:
        if isinstance(frame, Error):
            self._take_error(frame)
            return
        if isinstance(frame, Welcome) is not (self._link.state is LinkState.OPENING):
            raise ProtocolError("a welcome must come first, and once")
        match frame:
            case Welcome():
                self._take_welcome(frame)
            case Ack():
                self._take_ack(frame.seqno, is_single=frame.is_single)
            case Events():
                self._take_events(frame)
            case Gone():
                self._events.append(self._inbox.go_back(frame))
                self._keep(self._inbox.moved_to(None))
            case SnapshotFrame():
                self._take_snapshot(frame)
            case HeartbeatFrame():
                self._silence.heartbeat(frame.waiting_on, now)
                self._inbox.announce(EventId.parse(frame.event_id))
                self._link.heartbeat(is_awaiting_ack=self._outbox.is_awaiting_ack, acked=self._outbox.acked)
            case _:
                assert_never(frame)
        self._end_if_past_turn()

    def _take_welcome(self, frame: Welcome) -> None:
        outbox, inbox = self._outbox, self._inbox
        if frame.acked > outbox.next_seqno:
            # The checkpoint is older than the sent commands: their numbers would be reused (STREAM-11).
            what = f"the server has {frame.acked} commands of this stream; this client numbered {outbox.next_seqno}"
            self._end_with(SeqnoReusedError(what))
            return
        inbox.require_same_journal(frame)
        if frame.acked < outbox.acked:
            self._end_with(StreamNotFoundError("the server has lost commands that it had acknowledged"))
            return
        inbox.begin(frame)
        inbox.is_queued = bool(self._stream and frame.acked) and not (inbox.turn or outbox.is_finishing)
        self._link.welcome(frame.heartbeat_s)
        self._shown = self._shown.with_acceptance()
        outbox.in_flight_max = max(1, min(frame.in_flight_max, IN_FLIGHT_MAX))
        self.is_encrypted = frame.is_encrypted
        if frame.is_degraded:
            self._is_degraded = True
            self._drop_checkpoint()
        self._take_ack(frame.acked - 1)

    def _take_ack(self, seqno: int, *, is_single: bool = False) -> None:
        acked = self._outbox.acknowledge(seqno, is_single=is_single)
        if acked is not None:
            self._keep(CommandsAcked(acked))
            self._link.note_ack()
        self._send_commands()
        self._end_if_finished()

    def _take_events(self, frame: Events) -> None:
        for each in frame.events:
            if self.is_ended:
                return  # events after the end of the turn are not delivered
            before = self._inbox.received
            event = self._inbox.take(each)
            if self._inbox.received != before:
                self._link.note_progress()
            if event is not None:
                self._apply(event)

    def _apply(self, event: Applied) -> None:
        if not self._inbox.delivers(event.record):
            return
        self._events.append(event)
        if not self._stream:
            return
        match event.record:
            case CommandAccepted(stream=self._stream, seqno=seqno):
                self._take_ack(seqno)
            case MessageWithdrawn(stream=self._stream):
                self._finish_at(event.event_id)
            case TurnEnded(turn=self._inbox.turn):
                self._finish_at(event.event_id)
            case _:
                pass

    def _take_snapshot(self, frame: SnapshotFrame) -> None:
        self._link.note_progress()
        replaced = self._inbox.replace(frame)
        self._events.append(replaced)
        if frame.is_over and self._stream and not self.is_ended:
            self._finish_at(replaced.event_id)

    def _take_error(self, frame: Error) -> None:
        error = error_of(frame)
        is_lost_order = isinstance(error, SeqnoGapError) and error.expected in self._outbox.unacked
        is_final = frame.retry in ("never", "ask") or isinstance(error, SessionBusyError)
        if self._is_degraded or (is_final and not (is_lost_order or self._has_doubts(error))):
            self._end_with(error)
        else:
            self._link.refuse(error, frame.retry_after_s)

    def _has_doubts(self, error: MidstreamError | None) -> bool:
        """Whether another process may have changed the secret, so that it must be read again before the stream ends."""
        doubted = None if self._is_degraded else self._shown.with_doubt(error)
        self._shown = doubted or self._shown
        return doubted is not None

    # --- the end ------------------------------------------------------------------------------------------------

    def _finish_at(self, end: EventId) -> None:
        self._inbox.end = end
        self._queue(Close())
        self._end_with(None, is_resumable=True)  # until the application has handled the event

    def _end_if_past_turn(self) -> None:
        """End the stream if its turn ended before this connection and its end is not sent again (STREAM-26)."""
        received = self._inbox.received
        if self.is_ended or not self._stream or self._outbox.unacked or received is None:
            return
        if self._inbox.is_past_turn:
            self._finish_at(received)
            if self._inbox.is_all_handled:
                self._drop_checkpoint()

    def _end_if_finished(self) -> None:
        if self._outbox.is_finishing and not self._outbox.unacked and not self.is_ended:
            self._queue(Close())
            self._end_with(None)

    def _end_with(self, error: MidstreamError | None, *, is_resumable: bool = False) -> None:
        self._link.end()
        self._silence.stop()
        self._error = error
        if not is_resumable and (error is None or error.code not in KEEPS_CHECKPOINT):
            self._drop_checkpoint()

    def _drop_checkpoint(self) -> None:
        self._keep(Forgotten())
        self._is_kept = False

    def _keep(self, write: Write) -> None:
        if self._is_kept:
            self._writes.append(write)

    # --- sending ------------------------------------------------------------------------------------------------

    def _send_commands(self) -> None:
        if self._link.is_open:
            is_welcomed = self._link.state is LinkState.LIVE
            for seqno, body in self._outbox.due(is_welcomed=is_welcomed):
                self._queue(CommandFrame(seqno, msgspec.Raw(body)))

    def _queue(self, frame: ClientFrame) -> None:
        self._frames.append(encode(frame))
