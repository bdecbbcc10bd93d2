"""Tokens from a model to its readers, beside raw Starlette, and the Durable Streams reference where it is installed.

Every server is alone on one core, everything it needs included, and the load on another. Servers take turns within a
round, and each figure is compared with that of the raw server in the same round; of rounds the median counts. What is
said per core-second, or per event, is the server's time on a core, of all its threads, so that it holds where others
use the machine; latencies at a low rate are measured at a real-time priority for the same reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import uvloop

from bench.streaming_wire import RAW, REFERENCE, SSE, WEBSOCKET, Reader, Seen, Sender, Server, Wire, token

SECONDS = 2.0
PACED_S = 4.0
READERS = 500
REPLAY = 100_000
DEPTHS = (100, 10_000, 100_000)
RESUMES = 100
ROUNDS = 3
NODE_FOLDER = "BENCH_NODE_DIR"
"""The variable that names a folder with the npm package `@durable-streams/server`."""

Figures = dict[str, float]


class Figure(msgspec.Struct):
    """One figure of one server, the median over rounds, and the median of its ratios to the raw server's."""

    what: str
    server: str
    value: float
    of_raw: float | None = None


@contextlib.asynccontextmanager
async def _followed(
    server: Server, wire: Wire, name: str, count: int, *, is_timed: bool = False
) -> AsyncIterator[tuple[Seen, Sender, list[Reader]]]:
    """Make a stream with some readers, and a connection to append by."""
    sender = await server.sender()
    await sender.ask(wire.begin(name))
    seen = Seen()
    readers: list[Reader] = []
    for _ in range(count):
        readers.append(await server.reader(wire, name, seen, is_timed=is_timed))
    for _ in range(100):  # some say nothing before the first event
        if seen.answered == count:
            break
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.2)
    try:
        yield seen, sender, readers
    finally:
        for each in [sender, *readers]:
            each.transport.close()
        await asyncio.sleep(0.1)


async def _paced(ask: Callable[[], Awaitable[object]], rate: float, count: int) -> None:
    began = time.monotonic()
    for number in range(count):
        if (early_s := began + number / rate - time.monotonic()) > 0:
            await asyncio.sleep(early_s)
        await ask()


async def _flat_out(
    server: Server, seen: Seen, ask: Callable[[], Awaitable[object]], readers: int
) -> tuple[float, float]:
    """Append as fast as it is answered; return deliveries a second and per core-second."""
    before, sent = seen.tokens, 0
    began, cpu_s = time.monotonic(), server.cpu_s()
    while time.monotonic() < began + SECONDS:
        await ask()
        sent += 1
    await seen.until(before + sent * readers)
    count = sent * readers
    return count / (seen.last - began), count / (server.cpu_s() - cpu_s)


def _ms(latencies_ns: list[int], share: float) -> float:
    ordered = sorted(latencies_ns)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] / 1e6


async def one_to_one(server: Server, wire: Wire) -> Figures:
    """One token after the other, to one reader."""
    figures: Figures = {}
    async with _followed(server, wire, "one", 1) as (seen, sender, _):
        found = await _flat_out(server, seen, lambda: sender.ask(wire.append("one", token())), 1)
        figures["1:1 tokens/s"], figures["1:1 tokens/core-s"] = found
        if wire in (SSE, WEBSOCKET):
            ask = lambda: sender.ask(wire.append("one", token(), "?journaled"))  # noqa: E731
            _, figures["1:1 tokens/core-s, each in the journal first"] = await _flat_out(server, seen, ask, 1)
    return figures


async def live(server: Server, wire: Wire) -> Figures:
    """A token each 10 ms: how late does it come?"""
    async with _followed(server, wire, "live", 1, is_timed=True) as (seen, sender, _):
        ask = lambda: sender.ask(wire.append("live", token()))  # noqa: E731
        with server.at_real_time():
            await _paced(ask, 100, 50)
            await seen.until(50)
            seen.latencies_ns.clear()
            cpu_s = server.cpu_s()
            await _paced(ask, 100, int(100 * PACED_S))
            await seen.until(50 + int(100 * PACED_S))
        spent = (server.cpu_s() - cpu_s) / (100 * PACED_S)
    return {
        "live p50 ms": _ms(seen.latencies_ns, 0.5),
        "live p99 ms": _ms(seen.latencies_ns, 0.99),
        "live us a token": spent * 1e6,
    }


async def fan_out(server: Server, wire: Wire) -> Figures:
    """Many readers of one stream."""
    before = server.resident_mib()
    async with _followed(server, wire, "fan", READERS, is_timed=True) as (seen, sender, readers):
        ask = lambda: sender.ask(wire.append("fan", token()))  # noqa: E731
        with server.at_real_time():
            await _paced(ask, 10, 10)
            await seen.until(10 * READERS)
            seen.latencies_ns.clear()
            await _paced(ask, 20, int(20 * PACED_S))
            await seen.until((10 + int(20 * PACED_S)) * READERS)
        added = server.resident_mib() - before
        for each in readers:
            each.is_timed = False
        _, deliveries = await _flat_out(server, seen, ask, READERS)
    return {
        f"{READERS} readers p50 ms": _ms(seen.latencies_ns, 0.5),
        f"{READERS} readers p99 ms": _ms(seen.latencies_ns, 0.99),
        f"{READERS} readers deliveries/core-s": deliveries,
        f"{READERS} readers MiB": added,
    }


async def _filled(server: Server, wire: Wire, count: int) -> str:
    """Return the name of a stream of so many events."""
    if wire in (SSE, WEBSOCKET):
        return f"replayed{count}"  # it is there: each event is a record
    name = f"filled{count}"
    sender = await server.sender()
    await sender.ask(wire.begin(name))
    for _ in range(count // 20):
        await sender.ask(wire.append(name, b"[%b]" % b",".join([token()] * 20)))
    sender.transport.close()
    return name


async def replay(server: Server, wire: Wire) -> Figures:
    """All of a long turn for a reader who comes late."""
    name = await _filled(server, wire, REPLAY)
    rates, per_core = [], []
    for number in range(6):
        seen, began, cpu_s = Seen(), time.monotonic(), server.cpu_s()
        reader = await server.reader(wire, name, seen)
        await seen.until(REPLAY)
        reader.transport.close()
        if number:  # the first one wakes the session
            rates.append(REPLAY / (seen.last - began))
            per_core.append(REPLAY / (server.cpu_s() - cpu_s))
        await asyncio.sleep(0.05)
    return {
        "replay events/s": statistics.median(rates),
        "replay events/core-s": statistics.median(per_core),
        "replay bytes an event": seen.bytes / REPLAY,
    }


async def resume(server: Server, wire: Wire) -> Figures:
    """Ten events before the end of streams of different lengths: how long until they are there?"""
    figures: Figures = {}
    for depth in DEPTHS:
        name = await _filled(server, wire, depth)
        sender = await server.sender()
        after = await _end_of(server, wire, sender, name, depth)
        for _ in range(10):
            query = "?journaled" if wire in (SSE, WEBSOCKET) else ""
            await sender.ask(wire.append(name, token(), query))
        took: list[int] = []
        with server.at_real_time():
            for _ in range(RESUMES):
                seen, began = Seen(), time.monotonic_ns()
                reader = await server.reader(wire, name, seen, after=after)
                await seen.until(10)
                took.append(time.monotonic_ns() - began)
                reader.transport.close()
                await asyncio.sleep(0.002)
        sender.transport.close()
        figures[f"reconnect at {depth} p50 ms"] = _ms(took, 0.5)
    return figures


async def _end_of(server: Server, wire: Wire, sender: Sender, name: str, depth: int) -> str:
    if wire is RAW:
        return str(depth)
    if wire is REFERENCE:
        answer = await sender.ask(wire.begin(name))
        head = {line.partition(b":")[0].lower(): line.partition(b":")[2] for line in answer.split(b"\r\n")}
        return head[b"stream-next-offset"].strip().decode()
    answer = await sender.ask(wire.begin(name))  # a turn more
    return answer.rpartition(b"\r\n\r\n")[2].decode()


TESTS = (one_to_one, live, fan_out, replay, resume)


async def _measured(
    server: Server, tests: tuple[Callable[[Server, Wire], Awaitable[Figures]], ...]
) -> Figures:
    figures: Figures = {}
    for test in tests:
        figures |= await test(server, server.wire)
    return figures


def _servers(folder: Path) -> dict[str, Callable[[], Server]]:
    def ours(name: str, wire: Wire, *lengths: int) -> Server:
        own = folder / f"{name.replace(' ', '-')}-{time.monotonic_ns()}"
        own.mkdir()
        kind = "raw" if name == "raw" else "midstream"
        command = [sys.executable, "-m", "bench.streaming_server", kind, str(own), *map(str, lengths)]
        return Server(name, wire, command)

    found: dict[str, Callable[[], Server]] = {
        "raw": lambda: ours("raw", RAW),
        "midstream SSE": lambda: ours("midstream SSE", SSE, *DEPTHS),
        "midstream WebSocket": lambda: ours("midstream WebSocket", WEBSOCKET, *DEPTHS),
    }
    if os.environ.get(NODE_FOLDER) and (node := shutil.which("node")):
        script = str(Path(__file__).with_name("streaming_reference.mjs"))
        found["Durable Streams"] = lambda: Server("Durable Streams", REFERENCE, [node, script])
    return found


def main() -> None:
    only = sys.argv[1].split(",")
    tests = tuple(t for t in TESTS if t.__name__ in sys.argv[2].split(",")) if len(sys.argv) > 2 else TESTS
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    import tempfile

    os.sched_setaffinity(0, {1})
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, list[Figures]] = {}
        for _ in range(rounds):
            for name, make in _servers(Path(folder)).items():
                if name not in only:
                    continue
                server = make()
                try:
                    found.setdefault(name, []).append(uvloop.run(_measured(server, tests)))
                finally:
                    server.stop()
    keys = list(dict.fromkeys(k for v in found.values() for f in v for k in f))
    print(f"{'':45}" + "".join(f"{n:>28}" for n in found))
    for k in keys:
        cells = []
        for n, v in found.items():
            vals = [f[k] for f in v if k in f]
            if not vals:
                cells.append("")
                continue
            r = [f[k] / g[k] for f, g in zip(v, found.get("raw", [])) if k in f and k in g]
            cells.append(f"{statistics.median(vals):,.2f}" + (f" ({statistics.median(r):.2f})" if r else ""))
        print(f"{k:45}" + "".join(f"{c:>28}" for c in cells))


if __name__ == "__main__":
    main()
