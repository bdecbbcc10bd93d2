"""Checkpoint of a client's stream, from which it resumes, and the writes of each change.

A shell keeps it where it likes: `client/checkpoint_file.py` in files, midstream.js in IndexedDB.
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
"""Sent under the number of a command that cannot be read: an outcome of no call, which a server takes and drops. It is
sent after the welcome only: a server that has taken the command itself is not sent it."""


class Checkpoint(Struct, frozen=True):
    """State from which a client resumes.

    Args:
        stream: The stream key.
        secret: Its secret.
        event_id: The last event the application has handled; None before the first.
        next_seqno: How many commands were numbered.
        unacked: Number and payload of the commands whose ack has not come, in order and without gap.
        promised: The newest event that was seen of those that the server may not lose; None where there was none.
        known: The newest epoch whose beginning the server has named; None where there is none.
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
        """Whether nothing but acks is owed: the stream stopped, answered or took back, and follows no turn."""
        first = decode_payload(self.unacked[0][1]) if self.unacked and self.unacked[0][0] == 0 else None
        return isinstance(first, CancelPayload | AnswerPayload | WithdrawPayload)


# --- what is to be written into the checkpoint --------------------------------------------------------------------


class CommandKept(Struct, frozen=True):
    """A command was numbered. On disk before it is sent."""

    seqno: int
    payload: bytes


class CommandsAcked(Struct, frozen=True):
    """The commands up to and with `seqno` need not be kept any more."""

    seqno: int


class CursorMoved(Struct, frozen=True):
    """The application has handled this event and all before it; None: it has to begin anew.

    `promised` and `known` are as in `Checkpoint`.
    """

    event_id: EventId | None
    promised: EventId | None = None
    known: KnownEpoch | None = None


class Forgotten(Struct, frozen=True):
    """The stream cannot or need not be resumed: remove all that was kept of it."""


Write = CommandKept | CommandsAcked | CursorMoved | Forgotten
