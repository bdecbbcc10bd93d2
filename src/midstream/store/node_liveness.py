"""Rules by which nodes judge one another. They are pure; stores on servers and simulations of fleets share them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Generic, TypeVar

LATE_BEATS = 2
"""Missing beats after which a node is late: it may be dead, and the node that should notice this may be stopped."""

N = TypeVar("N", int, str)
"""Number or name of a node."""


def next_node(own: N, others: Collection[N]) -> N | None:
    """Return the node that this one watches: the next one in order, or the first one; None without others."""
    return min((each for each in others if own < each), default=min(others, default=None))


class NodeSilences(Generic[N]):
    """The silence of each other node in seconds, measured by one observer's clock.

    No two clocks are compared. A gap between two observations (observer stopped, clock set) counts as one beat.

    Args:
        lease_s: Seconds without a beat after which a node counts as frozen.
        beat_s: Seconds between two beats of a node.
    """

    def __init__(self, *, lease_s: float, beat_s: float) -> None:
        self._lease_s = lease_s
        self._beat_s = beat_s
        self._observed_at: float | None = None
        self._silent_s: dict[N, tuple[float, float]] = {}
        """The last beat of each node, and the seconds since."""

    def observe(self, beats: Mapping[N, float], *, now: float) -> None:
        """Record the newest beat of each other node; a missing node has left."""
        passed_s = 0.0 if self._observed_at is None else min(now - self._observed_at, self._beat_s)
        self._observed_at = now
        silent_s: dict[N, tuple[float, float]] = {}
        for node, beat in beats.items():
            last, silent = self._silent_s.get(node, (beat, 0.0))
            silent_s[node] = (beat, silent + passed_s if beat == last else 0.0)
        self._silent_s = silent_s

    def drop(self, node: N) -> None:
        """Remove a node that is known to be dead."""
        self._silent_s.pop(node, None)

    @property
    def known(self) -> Collection[N]:
        """The other nodes, frozen ones too."""
        return self._silent_s.keys()

    @property
    def late(self) -> frozenset[N]:
        """Nodes without a beat for `LATE_BEATS`, frozen ones too."""
        return self._silent_for(LATE_BEATS * self._beat_s)

    @property
    def frozen(self) -> frozenset[N]:
        """Nodes without a beat for a whole lease."""
        return self._silent_for(self._lease_s)

    def _silent_for(self, seconds: float) -> frozenset[N]:
        return frozenset(node for node, (_, silent) in self._silent_s.items() if silent >= seconds)
