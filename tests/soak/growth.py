"""Judge gauges: after the warm-up, nothing may grow with the number of turns."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

from msgspec import Struct

from tests.soak.gauges import Gauges


class Bounds(Struct, frozen=True):
    """Growth allowed for each turn. The median of the slopes between all windows counts: one peak changes nothing."""

    anonymous_bytes: float = 12 * 1024
    """Half of a leak that was found once. SQLite's page caches, 2 MB a connection, fill up during a short soak."""
    uncollected_bytes: float = 12 * 1024
    descriptors: float = 0.1
    tasks: float = 0.1
    timers: float = 0.3
    """Recently ended connections still have some: 50 to 80 at once, which is a random slope of 0.15."""
    objects: float = 10.0
    """A retained turn has about 60."""
    cyclic: float = 50.0
    """Cycles wait for a full collection, which a server makes rarely. asyncio's own make some seven objects a turn."""


SHORT = Bounds()
LONG = Bounds(anonymous_bytes=2 * 1024, uncollected_bytes=2 * 1024)
"""For thousands of turns, when all caches are full."""
WINDOWS_MIN = 3


def growing(gauges: Sequence[Gauges], bounds: Bounds = SHORT) -> dict[str, float]:
    """Return each gauge that grows faster than its bound, with its growth for each turn.

    The first third of the windows is the warm-up. A gauge that this system does not offer is left out.
    """
    steady = gauges[len(gauges) // 3 :]
    assert len(steady) >= WINDOWS_MIN, f"{len(gauges)} windows are too few to judge"
    slopes = {name: slope(steady, name) for name in Bounds.__struct_fields__}
    return {name: each for name, each in slopes.items() if each is not None and each > getattr(bounds, name)}


def slope(gauges: Sequence[Gauges], name: str) -> float | None:
    """Return the growth of a gauge for each turn; None where it was not read."""
    if any(getattr(each, name) is None for each in gauges):
        return None
    slopes = [
        (getattr(later, name) - getattr(earlier, name)) / (later.turns - earlier.turns)
        for earlier, later in itertools.combinations(gauges, 2)
    ]
    return float(statistics.median(slopes))
