"""The successive connections of one stream: the state of the current one, and the time of the next try.

waiting ──deadline──▶ connecting ──open()──▶ opening ──welcome()──▶ live
▲                       │                    │                    │
└────────lose()─────────┴──── dropping ◀─────┴── fault, silence ──┘
any of them ──end()──▶ ended
"""

from __future__ import annotations

from enum import Enum

from midstream.errors import ConnectionLostError, MidstreamError, ProtocolError
from midstream.protocol.frames import HEARTBEAT_S
from midstream.protocol.stream_settings import HEARTBEAT_S_MAX
from midstream.retries import HEARTBEATS_MISSED_MAX, STOPPED_PATIENCE_S, Backoff, pause_s
from midstream.timing import Deadline

CONNECTIONS_OF_A_LIFE = 2**24
"""Greatest number of connections of one process and stream: the next process uses higher numbers."""
_NEXT_TRY = "the next try to connect"


class LinkState(Enum):
    """The state of a stream's connection."""

    WAITING = "waiting"
    CONNECTING = "connecting"
    OPENING = "opening"
    LIVE = "live"
    DROPPING = "dropping"
    ENDED = "ended"


class Link:
    """The current connection, and the tries to open the next one.

    Args:
        life: A number above those of the earlier processes of this stream.
        patience_s: Seconds without a working connection after which no further one is tried.
    """

    def __init__(self, *, life: int, backoff: Backoff, patience_s: float, now: float) -> None:
        self.state = LinkState.WAITING
        self.deadline: Deadline | None = Deadline(now, "the first connection")
        self.number = life * CONNECTIONS_OF_A_LIFE
        """The number of the newest connection."""
        self.is_reconnecting = False
        """Whether a lost connection was not replaced yet."""
        self.trouble: MidstreamError | None = None
        """The server's last refusal, until a connection works again."""
        self._retry_after_s = 0.0
        self._backoff = backoff
        self._patience_s = patience_s
        self._failures, self._retry_at, self._lost_at = 0, now, now
        self._silence_s = HEARTBEATS_MISSED_MAX * HEARTBEAT_S
        self._unanswered = 0
        """Heartbeats since an ack became due."""

    @property
    def is_wanted(self) -> bool:
        """Whether there should be a transport."""
        return self.state is LinkState.CONNECTING or self.is_open

    @property
    def is_open(self) -> bool:
        """Whether frames are exchanged."""
        return self.state in (LinkState.OPENING, LinkState.LIVE)

    def open(self, now: float) -> None:
        """Begin with a new transport."""
        self.state = LinkState.OPENING
        self.number += 1
        self.note_traffic(now)

    def welcome(self, heartbeat_s: float) -> None:
        """Change to the live state after the server's welcome."""
        self.state = LinkState.LIVE
        self.is_reconnecting = False
        self._unanswered = 0
        if heartbeat_s > 0:
            self._silence_s = HEARTBEATS_MISSED_MAX * min(heartbeat_s, HEARTBEAT_S_MAX)

    def note_traffic(self, now: float) -> None:
        """Restart the server's silence."""
        if self.is_open:
            self.deadline = Deadline(now + self._silence_s, "a sign of life of the server")

    def note_progress(self) -> None:
        """Reset failures and trouble: an event, a snapshot or an ack arrived."""
        self._failures = 0
        self.trouble = None

    def note_ack(self) -> None:
        """Reset the count of heartbeats without an ack."""
        self._unanswered = 0
        self.note_progress()

    def heartbeat(self, *, is_awaiting_ack: bool, acked: int) -> None:
        """Count a heartbeat.

        Raises:
            ProtocolError: Too many arrived while an ack was due (STREAM-14).
        """
        self._unanswered += is_awaiting_ack
        if self._unanswered >= HEARTBEATS_MISSED_MAX:
            raise ProtocolError(f"command {acked} was not acknowledged")
        self._failures = 0

    def refuse(self, error: MidstreamError, retry_after_s: float | None) -> None:
        """Drop the connection after a temporary refusal; the next one plays the command back (STREAM-28)."""
        self.trouble = error
        self._retry_after_s = retry_after_s or 0.0
        self.drop()

    def drop(self) -> None:
        """Request the end of the transport."""
        self.state = LinkState.DROPPING
        self.deadline = None

    def end(self) -> None:
        """Open no more connections."""
        self.state = LinkState.ENDED
        self.deadline = None
        self.is_reconnecting = False
        self.trouble = None

    def lose(
        self, error: MidstreamError | None, *, is_cancelled: bool, chance: float, now: float
    ) -> MidstreamError | None:
        """Plan the next try after the end of a transport; return the error if patience has ended.

        The first try is immediate, because most cuts are short. The last one is at the end of patience.

        Args:
            is_cancelled: Whether the turn is cancelled, which needs less patience.
            chance: A random number in [0, 1).
        """
        if error is not None and not isinstance(error, ConnectionLostError):
            self.trouble = error
        if self._failures == 0:
            self._lost_at = now
        self._failures += 1
        patience_s = min(self._patience_s, STOPPED_PATIENCE_S) if is_cancelled else self._patience_s
        if self._failures > 1 and now - self._lost_at >= patience_s:
            return ConnectionLostError(f"no connection could be kept for {patience_s:g} s")
        wait_s = self._backoff.wait_s(self._failures - 1, chance=chance, outage_s=now - self._lost_at)
        wait_s = min(wait_s, self._lost_at + patience_s - now)
        retry_after_s = max(self._retry_after_s, (error.retry_after_s or 0.0) if error else 0.0)
        self._retry_after_s = 0.0
        self.is_reconnecting = True
        self.state = LinkState.WAITING
        self._retry_at = now + pause_s(retry_after_s)
        self.deadline = Deadline(max(now + wait_s, self._retry_at), _NEXT_TRY)
        return None

    def hurry(self) -> None:
        """Make the next try as soon as the server permits."""
        if self.state is LinkState.WAITING:
            self.deadline = Deadline(self._retry_at, _NEXT_TRY)

    def handle_deadline(self, now: float) -> None:
        """Connect, or drop a silent connection; without effect if it is not due."""
        if self.deadline is None or now < self.deadline.at:
            return
        if self.state is LinkState.WAITING:
            self.state = LinkState.CONNECTING
            self.deadline = None
        else:
            self.drop()
