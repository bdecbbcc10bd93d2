"""Tokens from the model to the reader, beside a bare server of the same stack in the same run.

Each server has one core and this process another. Latency is from the making of a token to its arrival here; CPU is the
server's. midstream journals what it sends; the bare server keeps a list.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
from websockets.asyncio.client import ClientConnection, connect

from midstream.core import frames
from midstream.core.frames import Chunk, Open, SayPayload
from midstream.core.messages import Text

TOKEN = re.compile(r"@(\d{20})")
FLAT_OUT = 20_000
REPLAY = 100_000
PACED_S = 4.0
ROUNDS = 3
PATIENCE_S = 120.0


class Figure(msgspec.Struct):
    """One measurement of one server; medians over rounds."""

    what: str
    server: str
    value: float
    unit: str
    of_bare: float = 1.0


class Server:
    """One server in a process of its own, on the first core."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        folder.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "bench.streaming_server", name, str(folder)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(self._process.pid, {cores[0]})

    def cpu_s(self) -> float:
        """Return the CPU seconds spent so far, all threads."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


class Reader:
    """A WebSocket that notes when each token came."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.count = 0
        self.latencies_ns: list[int] = []

    async def read(self, count: int) -> None:
        """Read until `count` tokens have come in all."""
        while self.count < count:
            text = await self.socket.recv(decode=True)
            now = time.monotonic_ns()
            # The whole reply comes once more behind its last token: it is not counted again.
            made = TOKEN.findall(text)[: count - self.count] if "@" in text else ()
            self.count += len(made)
            self.latencies_ns.extend(now - int(each) for each in made)


@contextlib.asynccontextmanager
async def _reader(server: Server, session: str, stream: str = "") -> AsyncIterator[Reader]:
    path = "/" if server.name == "bare" else f"/v1/sessions/{session}/stream"
    url = f"ws://127.0.0.1:{server.port}{path}"
    async with connect(url, compression=None, max_size=2**24, ping_interval=None, proxy=None) as socket:
        if server.name != "bare":
            await socket.send(frames.encode(Open(stream, "s" * 43 if stream else "")).decode())
        yield Reader(socket)


async def _order(server: Server, reader: Reader, count: int, rate: float) -> None:
    order = f"{count} {rate}"
    if server.name != "bare":
        payload = msgspec.Raw(frames.encode(SayPayload((Text(order),))))
        order = frames.encode(Chunk(0, payload)).decode()
    await reader.socket.send(order)


async def _one_reader(
    server: Server, session: str, count: int, rate: float
) -> tuple[float, float, list[int]]:
    """Return seconds, server CPU seconds and latencies of one stream to one reader."""
    async with _reader(server, session, f"k-{session}") as reader, asyncio.timeout(PATIENCE_S):
        began, cpu_s = time.monotonic(), server.cpu_s()
        await _order(server, reader, count, rate)
        await reader.read(count)
        return time.monotonic() - began, server.cpu_s() - cpu_s, reader.latencies_ns


async def _many_readers(server: Server, session: str, readers: int, rate: float) -> tuple[float, list[int]]:
    """Return server CPU seconds per delivery and latencies of one stream to many readers."""
    count = int(PACED_S * rate)
    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(PATIENCE_S):
        speaker = await stack.enter_async_context(_reader(server, session, f"k-{session}"))
        if server.name != "bare":  # a session can be followed from its first message on
            await _order(server, speaker, 1, 0)
            await speaker.read(1)
            stack.push_async_callback(speaker.socket.close)
            speaker = await stack.enter_async_context(_reader(server, session, f"k2-{session}"))
        others = [await stack.enter_async_context(_reader(server, session)) for _ in range(readers - 1)]
        cpu_s = server.cpu_s()
        await _order(server, speaker, count, rate)
        await asyncio.gather(*(each.read(count) for each in [speaker, *others]))
        spent = server.cpu_s() - cpu_s
        latencies = [ns for each in [speaker, *others] for ns in each.latencies_ns]
    return spent / (count * readers), latencies


async def _catch_up(server: Server, session: str, count: int) -> float:
    """Return tokens per second when a stream of `count` is read from its start over SSE."""
    target = "/" if server.name == "bare" else f"/v1/sessions/{session}/events?after=0-0"
    began = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=2**22)
    writer.write(f"GET {target} HTTP/1.1\r\nhost: 127.0.0.1:{server.port}\r\n\r\n".encode())
    seen = 0
    async with asyncio.timeout(PATIENCE_S):
        while seen < count:
            seen += (await reader.read(2**20)).count(b"@")
    writer.close()
    return count / (time.monotonic() - began)


def _ms(latencies_ns: list[int], share: float) -> float:
    ordered = sorted(latencies_ns)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] / 1e6


async def _round(server: Server) -> dict[tuple[str, str], float]:
    seconds, cpu_s, _ = await _one_reader(server, "flat", FLAT_OUT, 0)
    _, _, paced = await _one_reader(server, "paced", int(100 * PACED_S), 100)
    per_delivery, fanned = await _many_readers(server, "fan", 500, 20)
    figures = {
        ("1 reader, flat out", "tokens/s"): FLAT_OUT / seconds,
        ("1 reader, flat out", "tokens/core-s"): FLAT_OUT / max(cpu_s, 0.01),
        ("1 reader, 100/s, p50", "ms"): _ms(paced, 0.5),
        ("1 reader, 100/s, p99", "ms"): _ms(paced, 0.99),
        ("500 readers, 20/s, p50", "ms"): _ms(fanned, 0.5),
        ("500 readers, 20/s, p99", "ms"): _ms(fanned, 0.99),
        ("500 readers, CPU per delivery", "us"): per_delivery * 1e6,
    }
    if server.name == "bare":
        count = FLAT_OUT + int(100 * PACED_S) + int(20 * PACED_S)
        figures["catch-up over SSE", "tokens/s"] = await _catch_up(server, "", count)
    else:
        await _one_reader(server, "long", REPLAY, 0)
        figures["catch-up over SSE", "tokens/s"] = await _catch_up(server, "long", REPLAY)
    return figures


def measure(folder: Path) -> list[Figure]:
    """Measure both servers, taking turns."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1]})
    found: dict[str, list[dict[tuple[str, str], float]]] = {"bare": [], "midstream": []}
    try:
        for number in range(ROUNDS):
            for name, rounds in found.items():
                server = Server(name, folder / f"{name}-{number}")
                try:
                    rounds.append(asyncio.run(_round(server)))
                finally:
                    server.stop()
    finally:
        os.sched_setaffinity(0, set(cores))
    median: Callable[[str, tuple[str, str]], float] = lambda name, key: statistics.median(  # noqa: E731
        each[key] for each in found[name]
    )
    return [
        Figure(*key[:1], name, median(name, key), key[1], median(name, key) / median("bare", key))
        for key in found["bare"][0]
        for name in found
    ]


def table(figures: list[Figure]) -> str:
    """Return the figures as text for a terminal."""
    lines = [f"{'':32}{'server':>10}{'value':>12}  {'':14}{'of bare':>8}"]
    lines += [f"{f.what:32}{f.server:>10}{f.value:12,.1f}  {f.unit:14}{f.of_bare:8.2f}" for f in figures]
    return "\n".join(lines)


def run(folder: Path) -> list[Figure]:
    """Measure, print, return."""
    figures = measure(folder)
    print(table(figures))
    return figures
