"""Commands of one stream: their numbers, and the unacknowledged ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from midstream.errors import ProtocolError, UsageError
from midstream.protocol.checkpoint import FILLER, Checkpoint
from midstream.protocol.frames import IN_FLIGHT_MAX, CancelPayload, decode_payload
from midstream.session.session import COMMANDS_MAX


class Outbox:
    """Unacknowledged commands, and the numbers of all of them.

    Commands below `acked` are in the journal. Those below `sent` were sent on this connection.
    """

    def __init__(self) -> None:
        self.acked = self.sent = self.next_seqno = 0
        self.in_flight_max = IN_FLIGHT_MAX
        """Commands that may be sent and not acknowledged."""
        self.cancel_seqno: int | None = None
        """The number of the command that cancels the turn, or None."""
        self.is_finishing = False
        """Whether the stream ends with the last ack, without waiting for a turn."""
        self._unacked: dict[int, bytes] = {}
        self._acked_apart: set[int] = set()
        """Commands above `acked` with acks of their own; a new process sends them again."""

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Outbox:
        """Return the commands in the checkpoint of an earlier process."""
        outbox = cls()
        outbox.next_seqno = checkpoint.next_seqno
        outbox._unacked = dict(checkpoint.unacked)
        outbox.acked = checkpoint.next_seqno - len(checkpoint.unacked)
        cancels = (n for n, body in checkpoint.unacked if isinstance(decode_payload(body), CancelPayload))
        outbox.cancel_seqno = next(cancels, None)
        outbox.is_finishing = checkpoint.is_finishing
        return outbox

    @property
    def unacked(self) -> Mapping[int, bytes]:
        """The payloads of the unacknowledged commands."""
        return self._unacked

    @property
    def is_awaiting_ack(self) -> bool:
        """Whether a command of this connection is not acknowledged."""
        return self.sent > self.acked

    @property
    def is_cancel_acked(self) -> bool:
        """Whether the server has acknowledged the cancellation."""
        return self.cancel_seqno is not None and self.cancel_seqno < self.acked

    def number(self) -> int:
        """Return the next number.

        Raises:
            UsageError: The stream has used all its numbers. Nothing was changed.
        """
        if self.next_seqno >= COMMANDS_MAX:
            raise UsageError(f"a stream takes {COMMANDS_MAX} commands at most")
        self.next_seqno += 1
        return self.next_seqno - 1

    def store(self, seqno: int, body: bytes) -> None:
        """Store a payload until its command is acknowledged."""
        self._unacked[seqno] = body

    def acknowledge(self, seqno: int, *, is_single: bool = False) -> int | None:
        """Delete the commands up to `seqno`, or `seqno` alone where `is_single` (STREAM-53).

        Returns:
            The highest command up to which all are acknowledged, if it has risen; else None.

        Raises:
            ProtocolError: The command was never sent. Nothing was changed.
        """
        if seqno >= self.next_seqno or (is_single and seqno < 0):
            raise ProtocolError(f"command {seqno} was acknowledged and never sent")
        if is_single:
            if seqno > self.acked:
                self._acked_apart.add(seqno)
                return None
            while seqno + 1 in self._acked_apart:
                seqno += 1
        if seqno < self.acked:
            return None
        for each in range(self.acked, seqno + 1):
            del self._unacked[each]
        self.acked = seqno + 1
        self._acked_apart = {each for each in self._acked_apart if each > seqno}
        self.sent = max(self.sent, self.acked)
        return seqno

    def play_back(self) -> None:
        """Begin a connection: all unacknowledged commands are sent again."""
        self.sent = self.acked

    def due(self, *, is_welcomed: bool) -> Iterator[tuple[int, bytes]]:
        """Yield the commands to send now, up to the limit, and mark them as sent.

        Before the welcome, commands from a filler on are not sent: the server may have the lost command (STREAM-48).
        """
        room = self.acked + len(self._acked_apart) + self.in_flight_max
        for seqno in range(self.sent, min(self.next_seqno, room)):
            if not is_welcomed and self._unacked[seqno] == FILLER:
                return
            self.sent = seqno + 1
            if seqno not in self._acked_apart:
                yield seqno, self._unacked[seqno]
