"""Cost of a turn in a long session: bytes and syncs of turns 1 to 1000, which must not grow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from bench.steps import Counting
from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.models.responses import Finished, ModelEvent, ModelRequest, TextDelta
from midstream.store.sqlite import SQLiteStore
from midstream.testing import run_turn

TURNS = 1000
WINDOW = 100
"""Turns in one average. SQLite makes a checkpoint every few dozen turns."""
WORDS = (
    "A short answer of about a hundred characters, as a person would get it in a conversation like this one. "
)


class Window(msgspec.Struct):
    """Averages over `WINDOW` turns."""

    first: int
    last: int
    bytes_per_turn: float
    syncs_per_turn: float


class Brief:
    """A model with one short answer."""

    name = "brief"

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:  # noqa: ARG002 - the protocol
        """Return the answer word by word."""
        for word in WORDS.split(" "):
            yield TextDelta(word + " ")
        yield Finished()


async def measure(folder: Path) -> list[Window]:
    """Run one session of `TURNS` turns; return the bytes and syncs of each window."""
    counting = Counting("counting-turns")
    host = Host(Agent(Brief()), SQLiteStore(folder / "turns.db", vfs=counting.name))
    await host.start()
    windows = []
    for first in range(1, TURNS + 1, WINDOW):
        written, syncs = counting.written, counting.syncs
        for _ in range(WINDOW):
            await run_turn(host, "s", "and then?")
        bytes_per_turn = (counting.written - written) / WINDOW
        windows.append(Window(first, first + WINDOW - 1, bytes_per_turn, (counting.syncs - syncs) / WINDOW))
    await host.stop()
    return windows


def table(windows: list[Window]) -> str:
    """Return the windows as text for a terminal."""
    lines = [f"{'turns':>12}{'KB/turn':>10}{'syncs/turn':>12}"]
    lines += [
        f"{f'{w.first}-{w.last}':>12}{w.bytes_per_turn / 1000:10.1f}{w.syncs_per_turn:12.2f}" for w in windows
    ]
    return "\n".join(lines)


def run(folder: Path) -> list[Window]:
    """Measure, print, return."""
    windows = asyncio.run(measure(folder))
    print(table(windows))
    return windows
