"""Thousands of readers who wait: what each holds in memory, what their heartbeats cost, how soon a word reaches all."""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path
from typing import cast

import msgspec

from bench.streams import processes, wire
from bench.streams.commands import ENDED, SSE_WELCOME, WELCOME, Writer, post_writer
from bench.streams.processes import Served

READERS = 5000
SESSIONS = (1, 1000)
"""How many sessions they follow."""
QUIET_S = 25.0
"""Seconds in which only heartbeats go out: two of each reader, and a ping of the WebSocket layer."""
EVENTS = 20
"""Events that are sent to all of one session."""
PATIENCE_S = 120.0
HEARTBEAT = b'"heartbeat"'


class Figure(msgspec.Struct):
    """One kind of reader."""

    transport: str
    readers: int
    sessions: int
    connects_per_core_s: float
    bytes_per_reader: float
    idle_cores: float
    """Share of a core that their heartbeats cost."""
    heartbeats: float
    """Heartbeats that each of them was sent in a minute."""
    reach_all_ms: float
    """Milliseconds of processor time until one event has reached all readers of one session."""
    reach_all_wall_ms: float


async def connected(served: Served, transport: str, sessions: int, readers: int) -> list[wire.Searched]:
    """Open readers, some at a time; return them when all were welcomed."""
    lines: list[wire.Searched] = []
    for start in range(0, readers, wire.BURST):
        names = [f"idle-{number % sessions}" for number in range(start, start + wire.BURST)]
        lines += await asyncio.gather(*(_reader(served, transport, name) for name in names))
    return lines


async def _reader(served: Served, transport: str, session: str) -> wire.Searched:
    target = f"/v1/sessions/{session}"
    if transport == "SSE":
        hello = wire.request("GET", f"{target}/events")
        made = wire.Searched(hello, SSE_WELCOME, ENDED, HEARTBEAT)
    else:
        made = wire.Socket(f"{target}/stream", b'{"type":"open"}', WELCOME, ENDED, HEARTBEAT)
    line = cast("wire.Searched", await wire.dial(served.port, lambda: made))
    await line.until(SSE_WELCOME if transport == "SSE" else WELCOME, 1)
    return line


async def measured(served: Served, transport: str, sessions: int) -> Figure:
    """Open the readers, let them wait, let something be said."""
    writers = [await post_writer(served, f"idle-{number}") for number in range(sessions)]
    await writers[0].step()
    served.ask("collect")
    before, cpu_s = served.resident_bytes(), served.cpu_s()
    lines = await connected(served, transport, sessions, READERS)
    connecting_s = served.cpu_s() - cpu_s
    cpu_s, beats = served.cpu_s(), _beats(lines)
    await asyncio.sleep(QUIET_S)
    idle_cores = (served.cpu_s() - cpu_s) / QUIET_S
    beats = _beats(lines) - beats
    grown = served.resident_bytes() - before
    spent_s, wall_s = await _reach(served, writers[0], lines[::sessions])
    if any(line.is_lost for line in lines):
        raise wire.RefusedError("a reader was sent away")
    for line in lines:
        line.close()
    for writer in writers:
        writer.close()
    return Figure(
        transport,
        READERS,
        sessions,
        READERS / connecting_s,
        grown / READERS,
        idle_cores,
        beats / READERS * 60 / QUIET_S,
        spent_s * 1000,
        wall_s * 1000,
    )


def _beats(lines: list[wire.Searched]) -> int:
    return sum(line.seen[HEARTBEAT] for line in lines)


async def _reach(served: Served, writer: Writer, lines: list[wire.Searched]) -> tuple[float, float]:
    """Return CPU seconds and seconds until an event has reached all of these, the medians of `EVENTS`."""
    spent, walls = [], []
    for _ in range(EVENTS):
        counts = [line.seen[ENDED] + 1 for line in lines]
        cpu_s, began = served.cpu_s(), time.monotonic()
        async with asyncio.timeout(PATIENCE_S):
            await writer.step()
            await asyncio.gather(
                *(line.until(ENDED, count) for line, count in zip(lines, counts, strict=True))
            )
        walls.append(time.monotonic() - began)
        spent.append(served.cpu_s() - cpu_s)
    return statistics.median(spent), statistics.median(walls)


def measure(folder: Path) -> list[Figure]:
    """Measure each kind in a fresh server."""
    processes.allow_files(2 * READERS)
    figures = []
    with processes.on_last_core():
        for transport in ("WebSocket", "SSE"):
            for sessions in SESSIONS:
                served = processes.midstream(folder / f"{transport}-{sessions}")
                try:
                    figures.append(asyncio.run(measured(served, transport, sessions)))
                finally:
                    served.stop()
    return figures


def table(figures: list[Figure]) -> str:
    """Return the figures as text for a terminal."""
    lines = [
        "           readers  sessions  KiB each  connects/core-s  idle cores  one event to all: CPU ms      ms"
    ]
    lines += [
        f"{f.transport:10}{f.readers:8,}{f.sessions:10,}{f.bytes_per_reader / 1024:10.1f}{f.connects_per_core_s:17,.0f}"
        f"{f.idle_cores:12.3f}{f.reach_all_ms:26.1f}{f.reach_all_wall_ms:8.1f}"
        for f in figures
    ]
    return "\n".join(lines)


def run(folder: Path) -> list[Figure]:
    """Measure, print, return."""
    figures = measure(folder)
    print(table(figures))
    return figures
