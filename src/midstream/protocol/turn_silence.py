"""The silence of a turn, as a client measures it: when a turn that waits for a machine has stalled (STREAM-47)."""

from __future__ import annotations

_MACHINES = ("model", "tool", "client")
"""What a turn should not wait for in silence; a person may take days."""


class TurnSilence:
    """Measures how long no event came on a connection.

    What the turn waits for stands in heartbeats only. Where none came since the last event, one is requested.

    Args:
        stall_after_s: Seconds without an event after which the turn counts as stalled.
    """

    def __init__(self, stall_after_s: float) -> None:
        self.is_stalled = False
        self.waiting_on = "nothing"
        """What the turn waited for at the last heartbeat."""
        self.due_at: float | None = None
        """When to call `judge`; None without a connection, while a heartbeat is awaited, and once it is stalled."""
        self._stall_after_s = stall_after_s
        self._is_known = False
        """Whether a heartbeat came since the last event."""
        self._is_asked = False
        """Whether one was requested, and is overdue."""

    def begin(self, now: float) -> None:
        """Start again: an event came, or a connection began."""
        self.stop()
        self._is_known = self._is_asked = False
        self.due_at = now + self._stall_after_s

    def stop(self) -> None:
        """Stop: there is no connection, or no turn."""
        self.is_stalled = False
        self.due_at = None

    def pause(self, now: float) -> None:
        """Start the count again, as the connection was not read for a while."""
        if self.due_at is not None:
            self.due_at = now + self._stall_after_s

    def heartbeat(self, waiting_on: str, now: float) -> None:
        """Take note of a heartbeat."""
        self.waiting_on, self._is_known = waiting_on, True
        if self._is_asked:
            self._is_asked = False
            self._decide(now)

    def judge(self, now: float) -> bool:
        """Do what is due; return whether a heartbeat is to be requested. Harmless when it is early."""
        if self.due_at is None or now < self.due_at:
            return False
        if self._is_known:
            self._decide(now)
            return False
        self.due_at, self._is_asked = None, True
        return True

    def _decide(self, now: float) -> None:
        # A person may be waited for; then it is decided again later.
        self.is_stalled = self.waiting_on in _MACHINES
        self.due_at = None if self.is_stalled else now + self._stall_after_s
