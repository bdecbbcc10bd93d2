"""Worlds for tests: one with a clock that only the test advances, one that dies at a named point."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from typing_extensions import override

from midstream.environment import Fault, World

T = TypeVar("T")

SETTLE_TURNS = 50
"""Iterations of the event loop that `FakeWorld.advance` gives to the tasks that it woke."""


class Crashed(Exception):  # noqa: N818 - an event of the process, not an error of the program
    """A process would have died at this fault point. Every later fault point of the same `FakeWorld` raises it too."""


class FakeWorld(World):
    """Clock, random numbers, ids and tasks under the control of a test: it moves the clock and gives the seed.

    Args:
        seed: Source of random numbers and ids; print it where you draw it.
        at: The first time, in seconds since 1970.

    `crash_at` ends it at a fault point, within the test's process: `reach` raises `Crashed` there and at every later
    point, so that a runner of this world ends as if killed, and never appends again.
    """

    def __init__(self, seed: int = 0, *, at: float = 1_000_000.0) -> None:
        self.reached: Counter[Fault] = Counter()
        """Number of times that each fault point was reached."""
        self._now = at
        self._chance = random.Random(seed)  # noqa: S311 - chance of a test
        self._numbers = itertools.count(1)
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._crash: tuple[Fault, int] | None = None
        self._is_dead = False

    @override
    def now(self) -> float:
        return self._now

    def monotonic(self) -> float:
        """See `World.monotonic`: the same clock as `now`."""
        return self._now

    def chance(self) -> float:
        """See `World.chance`: the same numbers for the same seed."""
        return self._chance.random()

    def new_id(self, kind: str) -> str:
        """See `World.new_id`: kind and a number from the seed, so that two worlds rarely agree."""
        return f"{kind}-{next(self._numbers)}-{self._chance.getrandbits(32):08x}"

    def new_secret(self) -> str:
        """See `World.new_secret`. It is not secret."""
        return f"{self._chance.getrandbits(256):064x}"

    async def sleep(self, seconds: float) -> None:
        """Wait until `advance` has moved the clock to the time."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        await self._wakes_in(seconds)

    def later(self, seconds: float, do: Callable[[], None]) -> asyncio.Future[None]:
        """See `World.later`: called when `advance` has moved the clock to the time."""
        wakes = self._wakes_in(seconds)
        wakes.add_done_callback(lambda _: None if wakes.cancelled() else do())
        return wakes

    def _wakes_in(self, seconds: float) -> asyncio.Future[None]:
        wakes: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._numbers), wakes))
        return wakes

    @property
    def next_wake_at(self) -> float | None:
        """The time of the next sleeper, or None."""
        while self._sleepers and self._sleepers[0][2].done():
            heapq.heappop(self._sleepers)  # its task was cancelled
        return self._sleepers[0][0] if self._sleepers else None

    async def advance(self, seconds: float) -> None:
        """Advance the clock; sleepers run in order, each at its own time."""
        until = self._now + seconds
        while (at := self.next_wake_at) is not None and at <= until:
            self._now = at
            heapq.heappop(self._sleepers)[2].set_result(None)
            await self.settle()
        self._now = until
        await self.settle()

    async def settle(self) -> None:
        """Run all ready tasks for a few iterations of the event loop."""
        for _ in range(SETTLE_TURNS):
            await asyncio.sleep(0)

    async def live_through(self, work: Coroutine[Any, Any, T], *, wakes_max: int = 1000) -> T:
        """Await `work`, and advance the clock to the next sleeper whenever no task is ready.

        Only for work that waits for this world and for other tasks: threads and sockets count as idle.

        Raises:
            Crashed: The world ended first.
            TimeoutError: The work waits and there is no sleeper, or more than `wakes_max` sleepers were woken.
        """
        task = self.spawn(work, name="live through")
        try:
            for _ in range(wakes_max):
                await self.settle()
                if task.done():
                    return task.result()
                if self._is_dead:
                    raise Crashed("the world ended before the work")
                if (at := self.next_wake_at) is None:
                    raise TimeoutError("all tasks wait and none sleeps")
                await self.advance(at - self._now)
            raise TimeoutError(f"not done after {wakes_max} sleepers were woken")
        finally:
            task.cancel()

    def crash_at(self, point: Fault, *, count: int = 1) -> None:
        """End this world when `point` is reached for the `count`-th time."""
        self._crash = (point, count)

    @property
    def is_dead(self) -> bool:
        """Whether the world has ended."""
        return self._is_dead

    def reach(self, point: Fault) -> None:
        """See `World.reach`.

        Raises:
            Crashed: The world ends or has ended.
        """
        self.reached[point] += 1
        self._is_dead = self._is_dead or self._crash == (point, self.reached[point])
        if self._is_dead:
            raise Crashed(f"{point.value}, time {self.reached[point]}")


class KillingWorld(World):
    """The real clock and random numbers; the process kills itself when it reaches a fault point the `count`-th time.

    Args:
        point: The point of death by SIGKILL; None only counts.
        count: The occurrence at which it dies, from 1.
        report_to: A file descriptor for every point reached, one line `name number time` each.
    """

    def __init__(self, point: Fault | None, count: int = 1, *, report_to: int | None = None) -> None:
        self.reached: Counter[Fault] = Counter()
        """Number of times that each fault point was reached."""
        self._death = (point, count)
        self._report_to = report_to

    def reach(self, point: Fault) -> None:
        """Count, report, and die if required: then no more code of this process runs."""
        self.reached[point] += 1
        if self._report_to is not None:
            os.write(self._report_to, f"{point.value} {self.reached[point]} {self.now():.6f}\n".encode())
        if self._death == (point, self.reached[point]):
            os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()  # another thread may receive the signal; this one must not continue
