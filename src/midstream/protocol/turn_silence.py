"""A client's measurement of a turn's silence, to detect a stall of a turn that waits for a machine (STREAM-47)."""

from __future__ import annotations

_MACHINES = ("model", "tool", "client")
"""Kinds of work that should not be silent for long; a person may take days."""


class TurnSilence:
    """Measures the time without an event on a connection.

    Only heartbeats contain the work that the turn waits for. If none came since the last event, one is requested.

    Args:
        stall_after_s: Seconds without an event after which the turn counts as stalled.
    """

    def __init__(self, stall_after_s: float) -> None:
        self.is_stalled = False
        self.waiting_on = "nothing"
        """The work that the turn waited for at the last heartbeat."""
        self.due_at: float | None = None
        """The time for the next `judge`; None without a connection, while a heartbeat is awaited, and after a stall."""
        self._stall_after_s = stall_after_s
        self._is_known = False
        """Whether a heartbeat came since the last event."""
        self._is_requested = False
        """Whether a heartbeat was requested, and is overdue."""

    def begin(self, now: float) -> None:
        """Restart: an event came, or a connection began."""
        self.stop()
        self._is_known = self._is_requested = False
        self.due_at = now + self._stall_after_s

    def stop(self) -> None:
        """Stop: there is no connection, or no turn."""
        self.is_stalled = False
        self.due_at = None

    def pause(self, now: float) -> None:
        """Restart, because the connection was not read for a while."""
        if self.due_at is not None:
            self.due_at = now + self._stall_after_s

    def heartbeat(self, waiting_on: str, now: float) -> None:
        """Process a heartbeat."""
        self.waiting_on, self._is_known = waiting_on, True
        if self._is_requested:
            self._is_requested = False
            self._decide(now)

    def judge(self, now: float) -> bool:
        """Do the due work; return whether to request a heartbeat. Without effect if it is not due."""
        if self.due_at is None or now < self.due_at:
            return False
        if self._is_known:
            self._decide(now)
            return False
        self.due_at, self._is_requested = None, True
        return True

    def _decide(self, now: float) -> None:
        # A person may be waited for; then the check is repeated later.
        self.is_stalled = self.waiting_on in _MACHINES
        self.due_at = None if self.is_stalled else now + self._stall_after_s
