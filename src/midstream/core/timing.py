"""Deadlines and backoff, as values. Time and chance come in as arguments."""

from __future__ import annotations

from msgspec import Struct


class Deadline(Struct, frozen=True, order=True):
    """An instant by which something is owed, and what, so that a log can say it."""

    at: float
    reason: str


class Backoff(Struct, frozen=True):
    """How long to wait between tries.

    Args:
        first_s: Seconds before the second try.
        most_s: No wait is longer.
        factor: Growth from one wait to the next.
        jitter: Share of the wait that chance decides: 0 none, 1 all of it ("full jitter").
    """

    first_s: float
    most_s: float
    factor: float = 2.0
    jitter: float = 0.0

    def wait_s(self, failures: int, *, chance: float) -> float:
        """Return the seconds to wait after `failures` failures in a row; `chance` is in [0, 1)."""
        if failures <= 0:
            return 0.0
        exponent = min(failures - 1, 64)
        wait = min(self.most_s, self.first_s * self.factor**exponent)
        return wait * (1.0 - self.jitter * chance)


MODEL_BACKOFF = Backoff(first_s=1.0, most_s=4.0, jitter=0.25)
"""Between attempts of one model call: 1, 2, 4 s (the originals' rule), a quarter of it by chance."""

RECONNECT_BACKOFF = Backoff(first_s=1.0, most_s=30.0, jitter=1.0)
"""Between reconnects of a client, after a first one at once: 1 s to 30 s with full jitter."""
