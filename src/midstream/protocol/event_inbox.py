"""The events of one stream for the application: each once, in order, from the cursor on."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from midstream.errors import ProtocolError, RecordUndecodableError
from midstream.protocol.checkpoint import Checkpoint, CursorMoved
from midstream.protocol.durable_positions import (
    KnownEpoch,
    durable_position_after,
    newest_epoch_after,
    require_durable_position,
)
from midstream.protocol.frames import EventFrame, EventId, Gone, SnapshotFrame, Welcome
from midstream.session import records
from midstream.session.records import (
    EpochStarted,
    MessageAccepted,
    MessageQueued,
    Record,
    StallNoticed,
    StreamOpened,
    TurnResumed,
)

TURN_OVER = frozenset(("completed", "cancelled", "failed", "interrupted", "ended"))
"""Values of `Welcome.turn_status` for a turn that has ended, and for a withdrawn message."""


class Applied(Struct, frozen=True):
    """The next record of the session's journal."""

    event_id: EventId
    record: Record


class Forget(Struct, frozen=True):
    """Events after `event_id` are no longer in the journal; the existing ones follow."""

    event_id: EventId
    reason: str
    has_snapshot: bool = False
    """Whether a snapshot follows, which replaces everything."""


class Replaced(Struct, frozen=True):
    """The session at `event_id`, which replaces all earlier events; see `frames.SnapshotFrame`."""

    event_id: EventId
    session: msgspec.Raw
    turn: int | None = None


ClientEvent = Applied | Forget | Replaced


class Inbox:
    """The position of a stream in the journal, and the state of its turn.

    Args:
        stream: The stream key; "" for a reader, whose events begin at once.
        after: The last event that the application has; None before the first.
    """

    def __init__(self, stream: str, after: EventId | None) -> None:
        self._stream = stream
        self.received = self.handled = after
        self.is_begun = not stream
        """Whether the stream's first record was read; earlier records are not delivered."""
        self.is_queued = False
        """Whether its message waits for earlier turns, which are not delivered."""
        self.turn = 0
        self.end: EventId | None = None
        """The event that ended the stream's turn."""
        self._promised: EventId | None = None
        """The newest event that the server must not lose."""
        self._known: KnownEpoch | None = None
        """The newest epoch whose begin is known from the server."""
        self._announced: EventId | None = None
        """The event in the last heartbeat, which must arrive before the next one."""
        self._over_by: EventId | None = None
        """The session's newest event at the welcome, if the stream's turn had ended by then."""
        self._is_moving = True
        """Whether an event, a `gone` or a snapshot must come before `received` is valid."""

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Inbox:
        """Return the inbox at the checkpoint of an earlier process."""
        inbox = cls(checkpoint.stream, checkpoint.event_id)
        inbox.is_begun = checkpoint.event_id is not None
        inbox._promised, inbox._known = checkpoint.promised, checkpoint.known
        return inbox

    @property
    def cursor(self) -> str | None:
        """The event id for an `open`; None if the stream begins with this connection."""
        return str(self.received) if self.is_begun and self.received is not None else None

    @property
    def is_past_turn(self) -> bool:
        """Whether the turn had ended by the welcome, and all events up to then were received (STREAM-26)."""
        if self._over_by is None or self.received is None or self._is_moving:
            return False
        return self.received.position >= self._over_by.position

    @property
    def is_all_handled(self) -> bool:
        """Whether the application has handled every event that was received."""
        return self.received == self.handled

    def moved_to(self, event_id: EventId | None) -> CursorMoved:
        """Return the change of the checkpoint after the application handled an event; None begins again."""
        return CursorMoved(event_id, self._promised, self._known)

    def require_same_journal(self, frame: Welcome) -> None:
        """Check that the server's journal has every promised event that was received (STREAM-100, STREAM-105).

        Raises:
            StoreDamagedError: An event is missing.
        """
        require_durable_position(self._promised, EventId.parse(frame.event_id), is_owned=bool(self._stream))
        epoch = EventId.parse(frame.resume_from).epoch
        self._known = newest_epoch_after(self._known, self._promised, epoch, frame.began_at)

    def begin(self, frame: Welcome) -> None:
        """Set the position and the turn from a welcome."""
        resume_from = EventId.parse(frame.resume_from)
        self._is_moving = not self.is_begun or self.received != resume_from
        if not self.is_begun or self.received is None:
            self.received = resume_from
        self._over_by = EventId.parse(frame.event_id) if frame.turn_status in TURN_OVER else None
        self._announced = None
        self.turn = frame.turn or self.turn

    def take(self, frame: EventFrame) -> Applied | None:
        """Return the next event.

        None for a repeated event (STREAM-21), and for one of an unknown type, which counts as received (STREAM-34).

        Raises:
            ProtocolError: There is a gap before it.
            StoreDamagedError: Its record is of a known type and cannot be decoded.
        """
        assert self.received is not None
        event_id = EventId.parse(frame.id)
        if event_id.position <= self.received.position and event_id.epoch <= self.received.epoch:
            return None
        if event_id.position != self.received.position + 1 or event_id.epoch < self.received.epoch:
            raise ProtocolError(f"event {event_id} does not follow {self.received}")
        self.received = event_id
        self._is_moving = False
        try:
            record = records.decode(bytes(frame.record))
        except RecordUndecodableError:
            if records.is_of_unknown_type(bytes(frame.record)):
                return None
            raise
        if isinstance(record, EpochStarted):
            self._known = newest_epoch_after(self._known, self._promised, event_id.epoch, record.at)
        self._promised = durable_position_after(self._promised, event_id, record, is_owned=bool(self._stream))
        return Applied(event_id, record)

    def delivers(self, record: Record) -> bool:
        """Whether the application gets a record: not if it precedes the stream or its queued message."""
        is_own = bool(self._stream) and getattr(record, "stream", None) == self._stream
        if isinstance(record, StreamOpened) and is_own:
            self.is_begun = True
        if not self.is_begun:
            return False
        if is_own and isinstance(record, MessageQueued | MessageAccepted):
            self.is_queued = isinstance(record, MessageQueued)
        if is_own and isinstance(record, MessageAccepted | TurnResumed):
            self.turn = record.turn
        return is_own or not self.is_queued

    def go_back(self, frame: Gone) -> Forget:
        """Move to the place where the journal continues, because later events are gone."""
        self.received = EventId.parse(frame.resume_from)
        self.is_begun = not self._stream
        self._is_moving = frame.has_snapshot
        self._announced = None
        return Forget(self.received, frame.reason, frame.has_snapshot)

    def replace(self, frame: SnapshotFrame) -> Replaced:
        """Move to a snapshot, which includes the begin of the stream."""
        self.received = EventId.parse(frame.event_id)
        self.is_begun = True
        self._is_moving = False
        self._announced = None
        if frame.turn:
            self.turn, self.is_queued = frame.turn, False
        return Replaced(self.received, frame.session, frame.turn)

    def announce(self, newest: EventId) -> None:
        """Store the newest event of a heartbeat.

        Raises:
            ProtocolError: The event of the previous heartbeat has not arrived.
        """
        assert self.received is not None
        if self._announced is not None and self.received.position < self._announced.position:
            raise ProtocolError(f"the event {self._announced} was announced and did not come")
        self._announced = newest


def is_silence(events: list[ClientEvent]) -> bool:
    """Whether the events only report a silence."""
    return bool(events) and all(isinstance(e, Applied) and isinstance(e.record, StallNoticed) for e in events)
