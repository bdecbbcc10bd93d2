"""Cost of an event for the whole server: with an operator's key or without, in a long stream, and among many others."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast

import msgspec

from bench.streams import processes, wire
from bench.streams.commands import SECRET, WELCOME, Writer, websocket_writer
from bench.streams.idle import connect_readers
from bench.streams.processes import Served
from bench.streams.server import WORD

WINDOWS = 7
COMMANDS = 300
"""Commands in one window."""
WARM = 100
"""Commands of a writer before it is measured."""
LONG = 7_000
"""Commands of the long stream before it is measured. A stream accepts 10,000."""
OTHERS = 1000
"""Other sessions, each with an open turn and a reader."""
WORDS = 20_000
PATIENCE_S = 120.0


class Figure(msgspec.Struct):
    """Microseconds of the server's CPU time for one event, in two cases; medians over alternating windows."""

    what: str
    usual_us: float
    other_us: float
    ratio: float
    """Median of the ratios of neighbouring windows."""


Window = Callable[[], Awaitable[float]]
"""Returns the microseconds for one event."""


async def _compare(what: str, usual: Window, other: Window) -> Figure:
    pairs = [(await usual(), await other()) for _ in range(WINDOWS)]
    return Figure(
        what,
        statistics.median(one for one, _ in pairs),
        statistics.median(two for _, two in pairs),
        statistics.median(two / one for one, two in pairs),
    )


async def _spent_us(served: Served, step: Callable[[], Awaitable[None]], count: int) -> float:
    cpu_s = served.cpu_s()
    for _ in range(count):
        await step()
    return (served.cpu_s() - cpu_s) / count * 1e6


async def _warm(served: Served, session: str, count: int = WARM) -> Writer:
    writer = await websocket_writer(served, session)
    for _ in range(count):
        await writer.step()
    return writer


def _commands(served: Served, name: str) -> Window:
    """Return windows of commands, each in its own session."""
    sessions = iter(range(WINDOWS))

    async def window() -> float:
        writer = await _warm(served, f"{name}-{next(sessions)}")
        spent = await _spent_us(served, writer.step, COMMANDS)
        writer.close()
        return spent

    return window


def _words(served: Served) -> Window:
    """Return windows of words, each in its own turn with one reader."""
    sessions = iter(range(WINDOWS))

    async def window() -> float:
        session = f"words-{next(sessions)}"
        opening = f'{{"type":"open","stream":"k-{session}","secret":"{SECRET}"}}'.encode()
        target, word = f"/v1/sessions/{session}/stream", WORD[:1].encode()
        connection = cast(
            "wire.Socket",
            await wire.connect(served.port, lambda: wire.Socket(target, opening, WELCOME, word)),
        )
        await connection.until(WELCOME, 1)
        parts = f'[{{"type":"text","text":"{WORDS}"}}]'
        command = f'{{"type":"command","seqno":0,"payload":{{"type":"send","parts":{parts}}}}}'.encode()
        cpu_s = served.cpu_s()
        connection.transport.write(wire.message(command))
        async with asyncio.timeout(PATIENCE_S):
            await connection.until(word, WORDS)
        spent_s = served.cpu_s() - cpu_s
        connection.close()
        return spent_s / WORDS * 1e6

    return window


async def _encryption(plain: Served, encrypted: Served) -> list[Figure]:
    return [
        await _compare(
            "command, plain / under the operator's key", _commands(plain, "e"), _commands(encrypted, "e")
        ),
        await _compare("word, plain / under the operator's key", _words(plain), _words(encrypted)),
    ]


async def _length(served: Served) -> Figure:
    long = await _warm(served, "long", LONG)
    what = f"command, in a new stream / after {LONG:,} in the same one"
    return await _compare(what, _commands(served, "new"), lambda: _spent_us(served, long.step, COMMANDS))


async def _crowd(alone: Served, crowded: Served) -> Figure:
    for number in range(OTHERS):
        (await websocket_writer(crowded, f"idle-{number}")).close()
    readers = await connect_readers(crowded, "WebSocket", OTHERS, OTHERS)
    one, other = await _warm(alone, "one"), await _warm(crowded, "one")
    figure = await _compare(
        f"command, alone / among {OTHERS:,} sessions with open turns and readers",
        lambda: _spent_us(alone, one.step, COMMANDS),
        lambda: _spent_us(crowded, other.step, COMMANDS),
    )
    for reader in readers:
        reader.close()
    return figure


def measure(folder: Path) -> list[Figure]:
    """Measure the cases of each figure, alternating."""
    processes.raise_file_limit(8 * OTHERS)
    servers = [processes.midstream(folder / "plain"), processes.midstream(folder / "encrypted", "encrypted")]
    try:
        with processes.on_last_core():
            figures = asyncio.run(_encryption(*servers))
            figures.append(asyncio.run(_length(servers[0])))
            servers.append(processes.midstream(folder / "crowded"))
            figures.append(asyncio.run(_crowd(servers[0], servers[2])))
    finally:
        for served in servers:
            served.stop()
    return figures


def table(figures: list[Figure]) -> str:
    """Return the figures as text for a terminal."""
    lines = [f"{'microseconds of CPU':80}{'usual':>8}{'other':>8}{'ratio':>7}"]
    lines += [f"{f.what:80}{f.usual_us:8.1f}{f.other_us:8.1f}{f.ratio:7.2f}" for f in figures]
    return "\n".join(lines)


def run(folder: Path) -> list[Figure]:
    """Measure, print, return."""
    figures = measure(folder)
    print(table(figures))
    return figures
