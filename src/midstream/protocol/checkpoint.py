"""Checkpoint of a client's stream, from which it resumes, and the writes of each change.

The shell stores it: `client/checkpoint_file.py` in files, midstream.js in IndexedDB.
"""

from __future__ import annotations

from msgspec import Struct

from midstream.history.messages import Outcome, ToolResult
from midstream.protocol.durable_positions import KnownEpoch
from midstream.protocol.frames import (
    AnswerPayload,
    CancelPayload,
    EventId,
    ResultPayload,
    WithdrawPayload,
    decode_payload,
    encode,
)

FILLER = encode(ResultPayload(0, 0, ToolResult("", "", Outcome.UNKNOWN)))
"""Sent in place of a command that cannot be read: an outcome of no call, which a server accepts and drops. It is sent
only after the welcome, and not if the server has the command itself."""


class Checkpoint(Struct, frozen=True):
    """State from which a client resumes.

    Args:
        stream: The stream key.
        secret: The stream secret.
        event_id: The last event that the application has handled; None before the first.
        next_seqno: The number of the next command.
        unacked: Number and payload of the unacknowledged commands, in order and without gap.
        promised: The newest promised event; None if there was none.
        known: The newest epoch whose begin is known from the server; None if there is none.
    """

    stream: str
    secret: str
    event_id: EventId | None = None
    next_seqno: int = 0
    unacked: tuple[tuple[int, bytes], ...] = ()
    promised: EventId | None = None
    known: KnownEpoch | None = None

    def __repr__(self) -> str:
        return f"Checkpoint(stream={self.stream!r}, event_id={self.event_id!r}, next_seqno={self.next_seqno})"

    @property
    def is_finishing(self) -> bool:
        """Whether only acks are awaited: the stream cancelled, answered or withdrew, and follows no turn."""
        first = decode_payload(self.unacked[0][1]) if self.unacked and self.unacked[0][0] == 0 else None
        return isinstance(first, CancelPayload | AnswerPayload | WithdrawPayload)


# --- changes of the checkpoint ------------------------------------------------------------------------------------


class CommandKept(Struct, frozen=True):
    """A command got its number. It must be on disk before it is sent."""

    seqno: int
    payload: bytes


class CommandsAcked(Struct, frozen=True):
    """The commands up to and including `seqno` are no longer needed."""

    seqno: int


class CursorMoved(Struct, frozen=True):
    """The application has handled this event and all before it; None: it must begin again.

    `promised` and `known` are as in `Checkpoint`.
    """

    event_id: EventId | None
    promised: EventId | None = None
    known: KnownEpoch | None = None


class Forgotten(Struct, frozen=True):
    """The stream cannot or need not be resumed: delete its checkpoint."""


Write = CommandKept | CommandsAcked | CursorMoved | Forgotten
