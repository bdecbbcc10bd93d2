"""Sessions that go to sleep: those that are idle for a while, and idle ones when memory is short.

A sleeping session uses no memory; the next request wakes it. A session with running work or readers stays awake.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from msgspec import Struct

from midstream.background_loops import spawn_loop
from midstream.engine.runner import Runner
from midstream.environment import World
from midstream.number_checks import require_count, require_seconds

SESSIONS_AWAKE_MAX = 1000
"""Sessions kept in memory: a limit on the cost of a sweep."""
SWEEPS_PER_IDLE = 6
"""Sweeps within the time after which an idle session goes to sleep."""
SWEEP_S_MAX = 5.0
"""Seconds between two sweeps while something changes."""
RARE_SWEEPS = 10
"""While nothing changes and no session is idle, sweeps become as rare as one in this many times `idle_s`."""
TAIL_BYTES_MIN = 64 * 1024
"""Bytes of its newest events that a busy session keeps when memory is short."""

_log = logging.getLogger(__name__)


class MemoryLimits(Struct, frozen=True):
    """Limits on the awake sessions of one process.

    Args:
        bytes_max: Bytes of all awake sessions together, estimated from their journals.
        idle_s: Seconds without a turn, a request and readers after which a session goes to sleep.

    Raises:
        UsageError: A number is not above 0.
    """

    bytes_max: int = 512 * 2**20
    idle_s: float = 60.0

    def __post_init__(self) -> None:
        require_count("bytes_max", self.bytes_max, least=1)
        require_seconds("idle_s", self.idle_s, most=math.inf, is_positive=True)


class Sleeping:
    """Choose the sessions of one host that go to sleep.

    Args:
        awake: The awake sessions by their ids, the longest unused first.
        send_to_sleep: Take sessions out of `awake` and end them.
    """

    def __init__(
        self,
        awake: Mapping[str, Runner],
        limits: MemoryLimits,
        world: World,
        send_to_sleep: Callable[[Iterable[str]], Coroutine[Any, Any, None]],
    ) -> None:
        self.limits = limits
        self._awake = awake
        self._world = world
        self._send_to_sleep = send_to_sleep
        self._idle_since: dict[str, float] = {}
        self._sweeping: asyncio.Task[None] | None = None
        self._is_used = asyncio.Event()
        self._is_short = False

    def start(self) -> None:
        """Begin to sweep."""
        self._sweeping = spawn_loop(self._world, self._sweep, name="sleeping")

    async def stop(self) -> None:
        """Stop the sweeps."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.wait([self._sweeping])

    def touch(self, session_id: str) -> None:
        """Record that a session is used now."""
        self._idle_since.pop(session_id, None)
        self._is_used.set()

    @property
    def bytes_held(self) -> int:
        """Estimated bytes of all awake sessions."""
        # Computed for each session that opens: a generator takes twice as long.
        return sum([runner.journal.bytes_held for runner in self._awake.values()])

    def surplus(self) -> list[str]:
        """Return the sessions that must go to sleep before one more can be opened, the longest unused first."""
        count = len(self._awake) + 1 - SESSIONS_AWAKE_MAX
        held = self.bytes_held
        found: list[str] = []
        if count <= 0 and held <= self.limits.bytes_max:
            return found
        for session_id, runner in self._awake.items():
            if count <= 0 and held <= self.limits.bytes_max:
                break
            if runner.is_idle or runner.has_failed:
                found.append(session_id)
                count -= 1
                held -= runner.journal.bytes_held
        return found

    async def _sweep(self) -> None:
        shortest_s = min(SWEEP_S_MAX, self.limits.idle_s / SWEEPS_PER_IDLE)
        period_s, before = shortest_s, None
        while True:
            if not self._awake:
                self._is_used.clear()
                await self._is_used.wait()
            await self._world.sleep(min(period_s, self._due_in_s()))
            now = (len(self._awake), self.bytes_held, len(self._idle_since))
            period_s = min(2 * period_s, RARE_SWEEPS * self.limits.idle_s) if now == before else shortest_s
            before = now
            await self._send_to_sleep([*self._idle_too_long(), *self.surplus()])
            self._shorten_tails()

    def _due_in_s(self) -> float:
        """Return the seconds until the next idle session goes to sleep."""
        first = min(self._idle_since.values(), default=math.inf)
        return max(0.0, first + self.limits.idle_s - self._world.monotonic())

    def _idle_too_long(self) -> list[str]:
        now = self._world.monotonic()
        idle = [key for key, runner in self._awake.items() if runner.is_idle or runner.has_failed]
        self._idle_since = {key: self._idle_since.get(key, now) for key in idle}
        return [key for key, since in self._idle_since.items() if now - since >= self.limits.idle_s]

    def _shorten_tails(self) -> None:
        """Reduce the events in memory of busy sessions when memory is short: readers then get them from the store."""
        is_short = self.bytes_held > self.limits.bytes_max
        if is_short:
            share = max(TAIL_BYTES_MIN, self.limits.bytes_max // (2 * len(self._awake)))
            for runner in self._awake.values():
                runner.journal.shorten_tail(share)
        if is_short and not self._is_short:
            _log.warning(
                "%d busy sessions hold more than %d MiB: their newest events are read from the store. "
                "Raise --memory-mib, or spread the sessions over more servers",
                len(self._awake),
                self.limits.bytes_max // 2**20,
            )
        self._is_short = is_short
