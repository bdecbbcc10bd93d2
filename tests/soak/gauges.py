"""Gauges of a process that is watched in a soak, and how its lines of commands are answered.

Only the test programs of this folder import it: nothing of the library counts for a soak.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from midstream.cli.listening import tune_garbage_collector
from midstream.environment import World

_ROLLUP = Path("/proc/self/smaps_rollup")
_DESCRIPTORS = Path("/proc/self/fd")
LEAKED: list[bytearray] = []
"""Memory that the mutant keeps."""


SETTLE_LOOKS, SETTLE_LOOK_S = 10, 0.05


class Gauges(Struct):
    """State of one process between two windows of turns. A value that this system does not offer is None."""

    turns: int
    anonymous_bytes: int | None
    """Measured after a full collection, so that only retained objects are left."""
    descriptors: int | None
    tasks: int
    timers: int
    objects: int
    """Objects that the garbage collector tracks after a full collection."""
    cyclic: int
    """Objects in cycles that the collector has had to find since the process started."""
    uncollected_bytes: int | None = None
    """Anonymous memory before that collection: with the garbage that the thresholds of a server permit."""


def read_gauges(turns: int) -> Gauges:
    """Collect all garbage, then read the gauges of this process. The event loop must be asyncio's own."""
    uncollected_bytes = _anonymous_bytes()
    gc.collect()
    timers = asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]
    return Gauges(
        turns=turns,
        anonymous_bytes=_anonymous_bytes(),
        descriptors=sum(1 for _ in _DESCRIPTORS.iterdir()) if _DESCRIPTORS.is_dir() else None,
        tasks=len(asyncio.all_tasks()),
        timers=sum(not each.cancelled() for each in timers),
        objects=len(gc.get_objects()),
        cyclic=sum(each["collected"] for each in gc.get_stats()),
        uncollected_bytes=uncollected_bytes,
    )


def _anonymous_bytes() -> int | None:
    try:
        lines = _ROLLUP.read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


def answer_commands(run: Callable[[str, int], Awaitable[int]]) -> None:
    """Answer each line `NAME COUNT` of stdin with the gauges after `run`, which returns the turns so far.

    Calls `run` on the running loop, from a thread that ends with the process.
    """
    loop = asyncio.get_running_loop()
    tune_garbage_collector()  # The thresholds of a serving process.

    least = 0

    async def answered(name: str, count: int) -> Gauges:
        nonlocal least
        turns = await run(name, count)
        # Recent connections still end: wait for them, for half a second at most. A leak does not end.
        for _ in range(SETTLE_LOOKS):
            if len(asyncio.all_tasks()) <= least:
                break
            await World().sleep(SETTLE_LOOK_S)
        gauges = read_gauges(turns)
        least = min(least or gauges.tasks, gauges.tasks)
        return gauges

    def read() -> None:
        for line in sys.stdin:
            name, count = line.split()
            gauges = asyncio.run_coroutine_threadsafe(answered(name, int(count)), loop).result()
            print(msgspec.json.encode(gauges).decode(), flush=True)  # noqa: T201 - for the driver

    threading.Thread(target=read, daemon=True).start()
