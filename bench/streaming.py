"""Tokens from a model to its readers, compared with raw Starlette, and with the Durable Streams reference if installed.

Every server runs alone on one core, and the load on another. Servers alternate within a round. Each figure is compared
with that of the raw server in the same round, and the result is the median over rounds. Figures per core-second or per
event use the CPU time of all threads of the server: other work on the machine changes them little. Rates and latencies
are measured at a real-time priority for the same reason.
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
    Received,
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
"""Environment variable with a folder that has the npm package `@durable-streams/server`."""
TESTS_WANTED, ROUNDS_WANTED = "STREAMING_TESTS", "STREAMING_ROUNDS"
"""Environment variables with the tests to run, and the number of rounds."""

RAW_WIRES = (RAW, RAW_WEBSOCKET)
OUR_WIRES = (SSE, WEBSOCKET)

Figures = dict[str, float]


class Figure(msgspec.Struct):
    """One figure of one server: the median over rounds, and the median of the ratios to the raw server."""

    what: str
    server: str
    value: float
    of_raw: float | None = None


@contextlib.asynccontextmanager
async def _with_readers(
    server: Server, wire: Wire, name: str, count: int, *, is_timed: bool = False
) -> AsyncIterator[tuple[Received, Sender, list[Reader]]]:
    """Create a stream with readers, and a connection that appends to it."""
    sender = await server.sender()
    await sender.send(wire.begin(name))
    received = Received()
    readers = [await server.reader(wire, name, received, is_timed=is_timed) for _ in range(count)]
    for _ in range(100):  # some servers send nothing before the first event
        if received.answered == count:
            break
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.2)
    try:
        yield received, sender, readers
    finally:
        sender.transport.close()
        for each in readers:
            each.transport.close()
        await asyncio.sleep(0.1)


async def _paced(append: Callable[[], Awaitable[object]], rate: float, count: int) -> None:
    began = time.monotonic()
    for number in range(count):
        if (early_s := began + number / rate - time.monotonic()) > 0:
            await asyncio.sleep(early_s)
        await append()


async def _saturate(
    server: Server, received: Received, append: Callable[[], Awaitable[object]], readers: int
) -> tuple[float, float]:
    """Append as fast as the server responds; return deliveries per second and per core-second."""
    before, sent = received.tokens, 0
    with server.at_real_time():
        began, cpu_s = time.monotonic(), server.cpu_s()
        while time.monotonic() < began + SECONDS:
            await append()
            sent += 1
        await received.until(before + sent * readers)
    count = sent * readers
    return count / (received.last - began), count / (server.cpu_s() - cpu_s)


def _ms(latencies_ns: list[int], share: float) -> float:
    ordered = sorted(latencies_ns)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] / 1e6


async def one_to_one(server: Server, wire: Wire) -> Figures:
    """Measure one token after the other, with one reader."""
    figures: Figures = {}
    async with _with_readers(server, wire, "one", 1) as (received, sender, _):
        found = await _saturate(server, received, lambda: sender.send(wire.append("one", token())), 1)
        figures["1:1 tokens/s"], figures["1:1 tokens/core-s"] = found
    return figures


async def live(server: Server, wire: Wire) -> Figures:
    """Measure the latency of a token each 10 ms."""
    async with _with_readers(server, wire, "live", 1, is_timed=True) as (received, sender, _):
        query = "?journaled" if wire in OUR_WIRES else ""  # all servers respond when the token is stored
        append = lambda: sender.send(wire.append("live", token(), query))  # noqa: E731
        with server.at_real_time():
            await _paced(append, 100, 50)
            await received.until(50)
            received.latencies_ns.clear()
            cpu_s = server.cpu_s()
            await _paced(append, 100, int(100 * PACED_S))
            await received.until(50 + int(100 * PACED_S))
        spent = (server.cpu_s() - cpu_s) / (100 * PACED_S)
    return {
        "live p50 ms": _ms(received.latencies_ns, 0.5),
        "live p99 ms": _ms(received.latencies_ns, 0.99),
        "live us a token": spent * 1e6,
    }


async def fan_out(server: Server, wire: Wire) -> Figures:
    """Measure many readers of one stream."""
    before = server.resident_mib()
    async with _with_readers(server, wire, "fan", READERS, is_timed=True) as (received, sender, readers):
        append = lambda: sender.send(wire.append("fan", token()))  # noqa: E731
        with server.at_real_time():
            await _paced(append, 10, 10)
            await received.until(10 * READERS)
            received.latencies_ns.clear()
            await _paced(append, 20, int(20 * PACED_S))
            await received.until((10 + int(20 * PACED_S)) * READERS)
        added = server.resident_mib() - before
        for each in readers:
            each.is_timed = False
        _, deliveries = await _saturate(server, received, append, READERS)
    return {
        f"{READERS} readers p50 ms": _ms(received.latencies_ns, 0.5),
        f"{READERS} readers p99 ms": _ms(received.latencies_ns, 0.99),
        f"{READERS} readers deliveries/core-s": deliveries,
        f"{READERS} readers MiB": added,
    }


async def _fill(server: Server, wire: Wire, count: int) -> str:
    """Return the name of a stream with `count` events."""
    if wire in OUR_WIRES:
        return f"replayed{count}"  # it exists from the start, and each event is a record
    name = f"filled{count}"
    sender = await server.sender()
    await sender.send(wire.begin(name))
    for _ in range(count // 20):
        await sender.send(wire.append(name, b"[%b]" % b",".join([token()] * 20)))
    sender.transport.close()
    return name


async def replay(server: Server, wire: Wire) -> Figures:
    """Measure the replay of a long turn."""
    name = await _fill(server, wire, REPLAY)
    rates, per_core = [], []
    for number in range(REPLAYS):
        with server.at_real_time():
            received, began, cpu_s = Received(), time.monotonic(), server.cpu_s()
            reader = await server.reader(wire, name, received)
            await received.until(REPLAY)
            spent = server.cpu_s() - cpu_s
        reader.transport.close()
        if number:  # the first replay loads the session
            rates.append(REPLAY / (received.last - began))
            per_core.append(REPLAY / spent)
        await asyncio.sleep(0.05)
    return {
        "replay events/s": statistics.median(rates),
        "replay events/core-s": statistics.median(per_core),
        "replay bytes an event": received.bytes / REPLAY,
    }


async def resume(server: Server, wire: Wire) -> Figures:
    """Measure reconnects ten events before the end of streams of different lengths, and the cost of the next token.

    The streams alternate, as the speed of a machine changes within seconds, which would look like an effect of length.
    """
    at: dict[int, tuple[str, str]] = {}
    for depth in DEPTHS:
        name = await _fill(server, wire, depth)
        sender = await server.sender()
        at[depth] = name, await _end_of(wire, sender, name, depth)
        query = "?journaled" if wire in OUR_WIRES else ""
        for _ in range(10):
            await sender.send(wire.append(name, token(), query))
        sender.transport.close()
    times_ns: dict[int, list[int]] = {depth: [] for depth in DEPTHS}
    with server.at_real_time():
        for depth in DEPTHS * RESUMES:
            name, after = at[depth]
            received, began = Received(), time.monotonic_ns()
            reader = await server.reader(wire, name, received, after=after)
            await received.until(10)
            times_ns[depth].append(time.monotonic_ns() - began)
            reader.transport.close()
            await asyncio.sleep(0.002)
    figures: Figures = {}
    for depth, (name, after) in at.items():
        figures[f"reconnect to {depth:,} events p50 ms"] = _ms(times_ns[depth], 0.5)
        received, sender = Received(), await server.sender()
        reader = await server.reader(wire, name, received, after=after)
        await received.until(10)
        append = lambda name=name, sender=sender: sender.send(wire.append(name, token()))  # noqa: E731
        _, figures[f"1:1 tokens/core-s behind {depth:,} events"] = await _saturate(
            server, received, append, 1
        )
        sender.transport.close()
        reader.transport.close()
    return figures


async def others(server: Server, wire: Wire) -> Figures:
    """Measure many streams with a reader each: one more stream while they are silent, and all of them active."""
    names = [f"other{number}" for number in range(OTHERS)]
    received, opener = Received(), await server.sender()
    for name in names:
        await opener.send(wire.begin(name))
    opener.transport.close()
    readers = [await server.reader(wire, name, received, is_timed=True) for name in names]
    await asyncio.sleep(0.5)
    async with _with_readers(server, wire, "beside", 1) as (alone, sender, _):
        append = lambda: sender.send(wire.append("beside", token()))  # noqa: E731
        _, beside = await _saturate(server, alone, append, 1)
    senders = [await server.sender() for _ in names]
    turns = iter(range(2 * OTHERS * int(PACED_S)))
    pending: set[asyncio.Future[bytes]] = set()

    async def one() -> None:
        at = next(turns) % OTHERS
        pending.add(asyncio.ensure_future(senders[at].send(wire.append(names[at], token()))))

    with server.at_real_time():
        cpu_s = server.cpu_s()
        await _paced(one, 2 * OTHERS, 2 * OTHERS * int(PACED_S))
        await received.until(2 * OTHERS * int(PACED_S))
        spent = (server.cpu_s() - cpu_s) / (2 * OTHERS * int(PACED_S))
    await asyncio.gather(*pending)
    for sender in senders:
        sender.transport.close()
    for reader in readers:
        reader.transport.close()
    return {
        f"1:1 tokens/core-s beside {OTHERS} streams": beside,
        f"{OTHERS} streams, 1,000 tokens/s in all, p50 ms": _ms(received.latencies_ns, 0.5),
        f"{OTHERS} streams, 1,000 tokens/s in all, us a token": spent * 1e6,
    }


async def _measure_growth(server: Server, wire: Wire, readers: int) -> float:
    """Append much data, with a reader that has stopped reading, or without a reader; return the growth of memory."""
    async with _with_readers(server, wire, "stalled", readers) as (_, sender, stalled):
        for each in stalled:
            each.stall()
        before = server.resident_mib()
        body = b'"%b"' % (b"." * STALLED_BYTES)
        for _ in range(STALLED_MIB * 2**20 // STALLED_BYTES):
            await sender.send(wire.append("stalled", body, "?journaled" if wire in OUR_WIRES else ""))
        return server.resident_mib() - before


async def _end_of(wire: Wire, sender: Sender, name: str, depth: int) -> str:
    if wire in RAW_WIRES:
        return str(depth)
    if wire is REFERENCE:
        answer = await sender.send(wire.begin(name))
        head = {line.partition(b":")[0].lower(): line.partition(b":")[2] for line in answer.split(b"\r\n")}
        return head[b"stream-next-offset"].strip().decode()
    answer = await sender.send(wire.begin(name))  # one more turn
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
        wire: Its requests.
        command: The command that starts it. The last argument is a folder for the server.
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
def _serve(name: str, kind: Kind, folder: Path) -> Iterator[Server]:
    own = folder / str(time.monotonic_ns())
    own.mkdir()
    server = Server(name, kind.wire, [*kind.command, str(own)], core=0)
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(own)


def _run_test(name: str, kind: Kind, folder: Path, test: str) -> Figures:
    if test != "stalled":
        with _serve(name, kind, folder) as server:
            return uvloop.run(TESTS[test](server, server.wire))
    grown = []
    for readers in (0, 1):
        with _serve(name, kind, folder) as server:
            grown.append(uvloop.run(_measure_growth(server, kind.wire, readers)))
    return {STALLED: grown[1] - grown[0]}


def measure(folder: Path) -> list[Figure]:
    """Measure all servers. They alternate with each test, as other work on the machine changes with time."""
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
                    rounds[-1][name] |= _run_test(name, kind, folder, test)
    finally:
        os.sched_setaffinity(0, cores)
    return [_figure(what, name, rounds) for name in kinds for what in rounds[0][name]]


def _figure(what: str, name: str, rounds: list[dict[str, Figures]]) -> Figure:
    value = statistics.median(each[name][what] for each in rounds)
    if name == "raw" or what == STALLED or what not in rounds[0]["raw"]:
        return Figure(what, name, value, None)
    return Figure(
        what, name, value, statistics.median(each[name][what] / each["raw"][what] for each in rounds)
    )


def table(figures: list[Figure]) -> str:
    """Return the figures as text for a terminal, with their ratios to the raw server."""
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
