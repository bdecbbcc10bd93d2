"""Tokens from a model to its readers, beside raw Starlette, and the Durable Streams reference where it is installed.

Every server is alone on one core, everything it needs included, and the load on another. Servers take turns within a
round, and each figure is compared with that of the raw server in the same round; of rounds the median counts. What is
said per core-second, or per event, is the server's time on a core, of all its threads, so that it holds where others
use the machine; what has a rate or a latency is measured at a real-time priority for the same reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import uvloop

from bench.streaming_wire import (
    RAW,
    RAW_WEBSOCKET,
    REFERENCE,
    SSE,
    WEBSOCKET,
    Reader,
    Seen,
    Sender,
    Server,
    Wire,
    token,
)

SECONDS = 2.0
PACED_S = 4.0
READERS = 500
REPLAY = 100_000
REPLAYS = 8
DEPTHS = (100, 10_000, 100_000)
RESUMES = 100
OTHERS = 500
STALLED_MIB = 20
STALLED_BYTES = 100_000
ROUNDS = 3
NODE_FOLDER = "BENCH_NODE_DIR"
"""The variable that names a folder with the npm package `@durable-streams/server`."""
TESTS_WANTED, ROUNDS_WANTED = "STREAMING_TESTS", "STREAMING_ROUNDS"
"""Variables that name some of the tests, and how often to repeat them."""

RAWS = (RAW, RAW_WEBSOCKET)
OURS = (SSE, WEBSOCKET)

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
    readers = [await server.reader(wire, name, seen, is_timed=is_timed) for _ in range(count)]
    for _ in range(100):  # some say nothing before the first event
        if seen.answered == count:
            break
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.2)
    try:
        yield seen, sender, readers
    finally:
        sender.transport.close()
        for each in readers:
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
    with server.at_real_time():
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
    return figures


async def live(server: Server, wire: Wire) -> Figures:
    """A token each 10 ms: how late does it come?"""
    async with _followed(server, wire, "live", 1, is_timed=True) as (seen, sender, _):
        query = "?journaled" if wire in OURS else ""  # what is answered was kept, here as there
        ask = lambda: sender.ask(wire.append("live", token(), query))  # noqa: E731
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
    if wire in OURS:
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
    for number in range(REPLAYS):
        with server.at_real_time():
            seen, began, cpu_s = Seen(), time.monotonic(), server.cpu_s()
            reader = await server.reader(wire, name, seen)
            await seen.until(REPLAY)
            spent = server.cpu_s() - cpu_s
        reader.transport.close()
        if number:  # the first one wakes the session
            rates.append(REPLAY / (seen.last - began))
            per_core.append(REPLAY / spent)
        await asyncio.sleep(0.05)
    return {
        "replay events/s": statistics.median(rates),
        "replay events/core-s": statistics.median(per_core),
        "replay bytes an event": seen.bytes / REPLAY,
    }


async def resume(server: Server, wire: Wire) -> Figures:
    """Ten events before the end of streams of different lengths: how long until they are there? What costs the next?

    The streams take turns: a machine is not the same a few seconds later, and that looked as if depth had a price.
    """
    at: dict[int, tuple[str, str]] = {}
    for depth in DEPTHS:
        name = await _filled(server, wire, depth)
        sender = await server.sender()
        at[depth] = name, await _end_of(wire, sender, name, depth)
        query = "?journaled" if wire in OURS else ""
        for _ in range(10):
            await sender.ask(wire.append(name, token(), query))
        sender.transport.close()
    took: dict[int, list[int]] = {depth: [] for depth in DEPTHS}
    with server.at_real_time():
        for depth in DEPTHS * RESUMES:
            name, after = at[depth]
            seen, began = Seen(), time.monotonic_ns()
            reader = await server.reader(wire, name, seen, after=after)
            await seen.until(10)
            took[depth].append(time.monotonic_ns() - began)
            reader.transport.close()
            await asyncio.sleep(0.002)
    figures: Figures = {}
    for depth, (name, after) in at.items():
        figures[f"reconnect to {depth:,} events p50 ms"] = _ms(took[depth], 0.5)
        seen, sender = Seen(), await server.sender()
        reader = await server.reader(wire, name, seen, after=after)
        await seen.until(10)
        ask = lambda name=name, sender=sender: sender.ask(wire.append(name, token()))  # noqa: E731
        _, figures[f"1:1 tokens/core-s behind {depth:,} events"] = await _flat_out(server, seen, ask, 1)
        sender.transport.close()
        reader.transport.close()
    return figures


async def others(server: Server, wire: Wire) -> Figures:
    """Many streams with a reader each: beside them when they are silent, and all of them speaking."""
    names = [f"other{number}" for number in range(OTHERS)]
    seen, opener = Seen(), await server.sender()
    for name in names:
        await opener.ask(wire.begin(name))
    opener.transport.close()
    readers = [await server.reader(wire, name, seen, is_timed=True) for name in names]
    await asyncio.sleep(0.5)
    async with _followed(server, wire, "beside", 1) as (alone, sender, _):
        ask = lambda: sender.ask(wire.append("beside", token()))  # noqa: E731
        _, beside = await _flat_out(server, alone, ask, 1)
    senders = [await server.sender() for _ in names]
    turns = iter(range(2 * OTHERS * int(PACED_S)))
    asked: set[asyncio.Future[bytes]] = set()

    async def one() -> None:
        at = next(turns) % OTHERS
        asked.add(asyncio.ensure_future(senders[at].ask(wire.append(names[at], token()))))

    with server.at_real_time():
        cpu_s = server.cpu_s()
        await _paced(one, 2 * OTHERS, 2 * OTHERS * int(PACED_S))
        await seen.until(2 * OTHERS * int(PACED_S))
        spent = (server.cpu_s() - cpu_s) / (2 * OTHERS * int(PACED_S))
    await asyncio.gather(*asked)
    for sender in senders:
        sender.transport.close()
    for reader in readers:
        reader.transport.close()
    return {
        f"1:1 tokens/core-s beside {OTHERS} streams": beside,
        f"{OTHERS} streams, 1,000 tokens/s in all, p50 ms": _ms(seen.latencies_ns, 0.5),
        f"{OTHERS} streams, 1,000 tokens/s in all, us a token": spent * 1e6,
    }


async def _grown(server: Server, wire: Wire, readers: int) -> float:
    """Append much, with a reader that has stopped to read, or none."""
    async with _followed(server, wire, "stalled", readers) as (_, sender, stalled):
        for each in stalled:
            each.stall()
        before = server.resident_mib()
        body = b'"%b"' % (b"." * STALLED_BYTES)
        for _ in range(STALLED_MIB * 2**20 // STALLED_BYTES):
            await sender.ask(wire.append("stalled", body, "?journaled" if wire in OURS else ""))
        return server.resident_mib() - before


async def _end_of(wire: Wire, sender: Sender, name: str, depth: int) -> str:
    if wire in RAWS:
        return str(depth)
    if wire is REFERENCE:
        answer = await sender.ask(wire.begin(name))
        head = {line.partition(b":")[0].lower(): line.partition(b":")[2] for line in answer.split(b"\r\n")}
        return head[b"stream-next-offset"].strip().decode()
    answer = await sender.ask(wire.begin(name))  # a turn more
    return answer.rpartition(b"\r\n\r\n")[2].decode()


TESTS = {
    "one": one_to_one,
    "live": live,
    "fan": fan_out,
    "replay": replay,
    "resume": resume,
    "others": others,
}
STALLED = "a stalled reader MiB"


class Kind(msgspec.Struct, frozen=True):
    """A kind of server.

    Args:
        wire: How it is asked.
        command: What starts it; a folder of its own is its last argument.
    """

    wire: Wire
    command: tuple[str, ...]


def _kinds() -> dict[str, Kind]:
    ours = (sys.executable, "-m", "bench.streaming_server")
    depths = ",".join(map(str, DEPTHS))
    kinds = {
        "raw": Kind(RAW, (*ours, "raw", depths)),
        "raw WebSocket": Kind(RAW_WEBSOCKET, (*ours, "raw", depths)),
        "midstream SSE": Kind(SSE, (*ours, "midstream", depths)),
        "midstream WebSocket": Kind(WEBSOCKET, (*ours, "midstream", depths)),
    }
    if os.environ.get(NODE_FOLDER) and (node := shutil.which("node")):
        script = str(Path(__file__).with_name("streaming_reference.mjs"))
        kinds["Durable Streams"] = Kind(REFERENCE, (node, script))
    return kinds


@contextlib.contextmanager
def _served(name: str, kind: Kind, folder: Path) -> Iterator[Server]:
    own = folder / str(time.monotonic_ns())
    own.mkdir()
    server = Server(name, kind.wire, [*kind.command, str(own)], core=0)
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(own)


def _tested(name: str, kind: Kind, folder: Path, test: str) -> Figures:
    if test != "stalled":
        with _served(name, kind, folder) as server:
            return uvloop.run(TESTS[test](server, server.wire))
    grown = []
    for readers in (0, 1):
        with _served(name, kind, folder) as server:
            grown.append(uvloop.run(_grown(server, kind.wire, readers)))
    return {STALLED: grown[1] - grown[0]}


def measure(folder: Path) -> list[Figure]:
    """Measure all servers, taking turns with each test: what else runs here changes from one minute to the next."""
    tests = os.environ.get(TESTS_WANTED, ",".join((*TESTS, "stalled"))).split(",")
    kinds = _kinds()
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    rounds: list[dict[str, Figures]] = []
    try:
        for number in range(int(os.environ.get(ROUNDS_WANTED, str(ROUNDS)))):
            rounds.append({name: {} for name in kinds})
            for test in tests:
                print(f"round {number + 1}, {test}", file=sys.stderr)
                for name, kind in kinds.items():
                    rounds[-1][name] |= _tested(name, kind, folder, test)
    finally:
        os.sched_setaffinity(0, cores)
    return [_figure(what, name, rounds) for name in kinds for what in rounds[0][name]]


def _figure(what: str, name: str, rounds: list[dict[str, Figures]]) -> Figure:
    value = statistics.median(each[name][what] for each in rounds)
    ratios = [each[name][what] / each["raw"][what] for each in rounds if what in each["raw"]]
    is_compared = name != "raw" and ratios and what != STALLED
    return Figure(what, name, value, statistics.median(ratios) if is_compared else None)


def table(figures: list[Figure]) -> str:
    """Return the figures as text for a terminal, with their ratios to the raw server's."""
    names = list(dict.fromkeys(each.server for each in figures))
    by = {(each.what, each.server): each for each in figures}
    lines = [f"{'':52}" + "".join(f"{name:>26}" for name in names)]
    for what in dict.fromkeys(each.what for each in figures):
        cells = [by.get((what, name)) for name in names]
        lines.append(f"{what:52}" + "".join(f"{_cell(each):>26}" for each in cells))
    return "\n".join(lines)


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return ""
    of_raw = "" if figure.of_raw is None else f" ({figure.of_raw:.2f})"
    return f"{figure.value:,.{0 if abs(figure.value) >= 1000 else 2}f}{of_raw}"  # noqa: PLR2004


def run(folder: Path) -> list[Figure]:
    """Measure, print, return."""
    figures = measure(folder)
    print(table(figures))
    return figures
