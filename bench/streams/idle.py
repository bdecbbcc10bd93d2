"""Thousands of idle readers: memory of each, cost of their heartbeats, and time until an event reaches all."""

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
"""Numbers of sessions that the readers follow."""
QUIET_S = 25.0
"""Seconds in which only heartbeats are sent: two to each reader, and a ping of the WebSocket layer."""
EVENTS = 20
"""Events that are sent to all readers of one session."""
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
    """Share of a core that heartbeats use."""
    heartbeats: float
    """Heartbeats to each reader per minute."""
    reach_all_ms: float
    """Milliseconds of CPU time until one event has reached all readers of one session."""
    reach_all_wall_ms: float


async def connect_readers(
    served: Served, transport: str, sessions: int, readers: int
) -> list[wire.CountingConnection]:
    """Open readers in bursts; return them when all have their welcome."""
    connections: list[wire.CountingConnection] = []
    for start in range(0, readers, wire.BURST):
        names = [f"idle-{number % sessions}" for number in range(start, start + wire.BURST)]
        connections += await asyncio.gather(*(_reader(served, transport, name) for name in names))
    return connections


async def _reader(served: Served, transport: str, session: str) -> wire.CountingConnection:
    target = f"/v1/sessions/{session}"
    if transport == "SSE":
        opening = wire.request("GET", f"{target}/events")
        made = wire.CountingConnection(opening, SSE_WELCOME, ENDED, HEARTBEAT)
    else:
        made = wire.Socket(f"{target}/stream", b'{"type":"open"}', WELCOME, ENDED, HEARTBEAT)
    connection = cast("wire.CountingConnection", await wire.connect(served.port, lambda: made))
    await connection.until(SSE_WELCOME if transport == "SSE" else WELCOME, 1)
    return connection


async def measure_readers(served: Served, transport: str, sessions: int) -> Figure:
    """Open the readers, measure them while they are idle, and send events."""
    writers = [await post_writer(served, f"idle-{number}") for number in range(sessions)]
    await writers[0].step()
    served.query("collect")
    before, cpu_s = served.resident_bytes(), served.cpu_s()
    connections = await connect_readers(served, transport, sessions, READERS)
    connecting_s = served.cpu_s() - cpu_s
    cpu_s, beats = served.cpu_s(), _beats(connections)
    await asyncio.sleep(QUIET_S)
    idle_cores = (served.cpu_s() - cpu_s) / QUIET_S
    beats = _beats(connections) - beats
    grown = served.resident_bytes() - before
    spent_s, wall_s = await _reach(served, writers[0], connections[::sessions])
    if any(connection.is_lost for connection in connections):
        raise wire.RefusedError("the server closed the connection of a reader")
    for connection in connections:
        connection.close()
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


def _beats(connections: list[wire.CountingConnection]) -> int:
    return sum(connection.counts[HEARTBEAT] for connection in connections)


async def _reach(
    served: Served, writer: Writer, connections: list[wire.CountingConnection]
) -> tuple[float, float]:
    """Return the CPU seconds and the seconds until an event has reached all readers: medians of `EVENTS`."""
    spent, walls = [], []
    for _ in range(EVENTS):
        counts = [connection.counts[ENDED] + 1 for connection in connections]
        cpu_s, began = served.cpu_s(), time.monotonic()
        async with asyncio.timeout(PATIENCE_S):
            await writer.step()
            await asyncio.gather(
                *(
                    connection.until(ENDED, count)
                    for connection, count in zip(connections, counts, strict=True)
                )
            )
        walls.append(time.monotonic() - began)
        spent.append(served.cpu_s() - cpu_s)
    return statistics.median(spent), statistics.median(walls)


def measure(folder: Path) -> list[Figure]:
    """Measure each kind of reader with a new server."""
    processes.raise_file_limit(2 * READERS)
    figures = []
    with processes.on_last_core():
        for transport in ("WebSocket", "SSE"):
            for sessions in SESSIONS:
                served = processes.midstream(folder / f"{transport}-{sessions}")
                try:
                    figures.append(asyncio.run(measure_readers(served, transport, sessions)))
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
