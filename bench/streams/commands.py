"""Durable commands, on disk when they are acknowledged: midstream and the reference, alternating, on one disk.

A command of midstream is the result of a client's tool. It is two records (`command_accepted` and `call_ended`), which
are decided, appended, synced and acknowledged. Every twentieth command starts a model call. A command of the reference
is an append of the same 50 bytes. A writer waits for each ack before the next command.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import cast

import msgspec

from bench.streams import processes, wire
from bench.streams.processes import Served
from bench.streams.server import CALLS

SECONDS = 2.0
ROUNDS = 5
WRITERS = (1, 16, 500)
READERS = 500
PATIENCE_S = 120.0
PAYLOAD = "x" * 50
SECRET = "s" * 43

WELCOME = b'"type":"welcome"'
SSE_WELCOME = b"event: welcome"
ACK = b'"type":"ack"'
ERROR = b'"type":"error"'
CALL_STARTED = b'"type":"call_started"'
ENDED = b'"type":"call_ended"'


class Figure(msgspec.Struct):
    """One measurement of one contestant; medians over rounds."""

    what: str
    who: str
    writers: int
    per_core_s: float
    of_reference: float
    """Median of the ratios within one round; 0 without the reference."""
    per_s: float
    p50_ms: float
    refused: int
    """Refused commands in all rounds."""
    syncs: float
    """Syncs per command, in a separate run; below 0 if they cannot be counted."""
    other_cores: float
    """Cores that other work on the machine used."""


class Run(msgspec.Struct):
    """One measured run."""

    done: int
    cpu_s: float
    wall_s: float
    other_s: float
    p50_ms: float = 0.0
    refused: int = 0


class Writer:
    """Sends one command after the other. `step` raises `RefusedError` if a command is refused."""

    def __init__(self, step: Callable[[], Awaitable[None]], close: Callable[[], None]) -> None:
        self.step = step
        self.close = close


# --- the contestants' writers


def _result(seqno: int, turn: int = 1) -> bytes:
    """Return the command with the next result. Response `n` follows `n` entries of the history."""
    response, number = divmod(seqno - 1, CALLS)
    result = f'{{"call_id":"c{response + 1}-{number}","content":"{PAYLOAD}"}}'
    payload = f'{{"type":"result","turn":{turn},"response":{response + 1},"result":{result}}}'
    return f'{{"type":"command","seqno":{seqno},"payload":{payload}}}'.encode()


NOTE = '{"spec":{"name":"note","description":"","parameters":{"type":"object"}},"has_effects":false}'
GO = '[{"type":"text","text":"go"}]'
SEND = f'{{"type":"command","seqno":0,"payload":{{"type":"send","parts":{GO},"tools":[{NOTE}]}}}}'.encode()


def _opening(stream: str) -> bytes:
    secret = SECRET if stream else ""
    return f'{{"type":"open","stream":"{stream}","secret":"{secret}"}}'.encode()


async def websocket_writer(served: Served, session: str) -> Writer:
    """Open a writer to midstream over a WebSocket."""
    target, opening = f"/v1/sessions/{session}/stream", _opening(f"k-{session}")
    searched = (ACK, ERROR, CALL_STARTED)
    connection = cast(
        "wire.Socket",
        await wire.connect(served.port, lambda: wire.Socket(target, opening, WELCOME, *searched)),
    )
    await connection.until(WELCOME, 1)
    seqno = 0

    async def step() -> None:
        nonlocal seqno
        text = _result(seqno) if seqno else SEND
        if seqno % CALLS == 1 or CALLS == 1:
            await connection.until(CALL_STARTED, CALLS * (1 + seqno // CALLS))
        refused = connection.counts[ERROR]
        connection.transport.write(wire.message(text))
        seqno += 1
        await connection.until(ACK, seqno)
        if connection.counts[ERROR] > refused:
            raise wire.RefusedError

    await step()
    return Writer(step, connection.close)


async def post_writer(served: Served, session: str) -> Writer:
    """Open a writer to midstream over plain HTTP."""
    connection = wire.HttpClient(served.port)
    target = f"/v1/sessions/{session}/commands"
    seqno = 0

    async def post(text: bytes) -> bytes:
        headers = {"x_idempotency_key": f"k-{session}", "x_idempotent_encryption_key": SECRET}
        status, body = await connection.send(wire.request("POST", target, text, **headers))
        if status != HTTPStatus.OK:
            raise wire.RefusedError(status, body)
        return body

    async def step() -> None:
        nonlocal seqno
        if seqno % CALLS == 1:
            while b'"client"' not in await post(b'{"type":"ping"}'):
                pass
        await post(_result(seqno) if seqno else SEND)
        seqno += 1

    await step()
    return Writer(step, connection.close)


async def reference_writer(served: Served, session: str) -> Writer:
    """Open a writer to the reference."""
    connection = wire.HttpClient(served.port)
    target = f"/v1/stream/{session}"
    await connection.send(wire.request("PUT", target))
    body = f'{{"p":"{PAYLOAD}"}}'.encode()

    async def step() -> None:
        status, answer = await connection.send(wire.request("POST", target, body))
        if status >= HTTPStatus.MULTIPLE_CHOICES:
            raise wire.RefusedError(status, answer)

    return Writer(step, connection.close)


Open = Callable[[Served, str], Awaitable[Writer]]


# --- measuring


@asynccontextmanager
async def _meter(served: Served) -> AsyncIterator[Run]:
    run = Run(
        0, served.cpu_s(), time.monotonic(), processes.others_busy_s(served.cpu_s() + time.process_time())
    )
    yield run
    run.cpu_s = served.cpu_s() - run.cpu_s
    run.wall_s = time.monotonic() - run.wall_s
    run.other_s = processes.others_busy_s(served.cpu_s() + time.process_time()) - run.other_s


async def measure_writers(served: Served, make: Open, writers: int, name: str) -> Run:
    """Measure writers for `SECONDS`, each on its own stream."""
    ready: list[Writer] = []
    for start in range(0, writers, wire.BURST):
        numbers = range(start, min(start + wire.BURST, writers))
        ready += await asyncio.gather(*(make(served, f"{name}-{number}") for number in numbers))
    times_s: list[float] = []
    refused = 0

    async def write(writer: Writer, end_at: float) -> None:
        nonlocal refused
        while (began := time.monotonic()) < end_at:
            try:
                await writer.step()
            except wire.RefusedError:
                refused += 1
            else:
                times_s.append(time.monotonic() - began)

    async with _meter(served) as run:
        await asyncio.gather(*(write(writer, time.monotonic() + SECONDS) for writer in ready))
    for writer in ready:
        writer.close()
    run.done, run.refused, run.p50_ms = len(times_s), refused, statistics.median(times_s or [0.0]) * 1000
    return run


async def measure_fan_out(served: Served, who: Contestant, name: str) -> Run:
    """Measure one writer with `READERS` readers for `SECONDS`; count the deliveries."""
    writer = await who.writer(served, name)
    ready: list[wire.CountingConnection] = []
    for _ in range(0, READERS, wire.BURST):
        connections = [wire.connect(served.port, lambda: who.reader(name)) for _ in range(wire.BURST)]
        ready += cast("list[wire.CountingConnection]", await asyncio.gather(*connections))
    await asyncio.gather(*(connection.until(who.first, 1) for connection in ready))
    before = [connection.counts[who.event] for connection in ready]
    async with _meter(served) as run, asyncio.timeout(PATIENCE_S):
        end_at = time.monotonic() + SECONDS
        while time.monotonic() < end_at:
            await writer.step()
            run.done += 1
        ends = zip(ready, before, strict=True)
        await asyncio.gather(*(connection.until(who.event, seen + run.done) for connection, seen in ends))
    for connection in ready:
        connection.close()
    writer.close()
    run.done *= READERS
    return run


class Contestant(msgspec.Struct):
    """A server with a kind of writer and a kind of reader."""

    name: str
    start: Callable[[Path], Served | None]
    writer: Open
    reader: Callable[[str], wire.CountingConnection]
    first: bytes
    """Bytes that a reader receives first."""
    event: bytes
    """Bytes that a reader receives once for each command."""


def _websocket_reader(session: str) -> wire.CountingConnection:
    return wire.Socket(f"/v1/sessions/{session}/stream", _opening(""), WELCOME, ENDED)


def _sse_reader(session: str) -> wire.CountingConnection:
    return wire.CountingConnection(wire.request("GET", f"/v1/sessions/{session}/events"), SSE_WELCOME, ENDED)


def _reference_reader(stream: str) -> wire.CountingConnection:
    return wire.CountingConnection(
        wire.request("GET", f"/v1/stream/{stream}?offset=-1&live=sse"), b"200 OK", b'"p":'
    )


CONTESTANTS = (
    Contestant("reference", processes.reference, reference_writer, _reference_reader, b"200 OK", b'"p":'),
    Contestant("WebSocket", processes.midstream, websocket_writer, _websocket_reader, WELCOME, ENDED),
    Contestant("POST and SSE", processes.midstream, post_writer, _sse_reader, SSE_WELCOME, ENDED),
)


async def _round(served: Served, who: Contestant) -> dict[tuple[str, int], Run]:
    # The reference is slower after 500 streams, so they come last.
    runs = {
        ("commands", count): await measure_writers(served, who.writer, count, f"w{count}")
        for count in WRITERS[:-1]
    }
    runs["deliveries", 1] = await measure_fan_out(served, who, "fan")
    runs["commands", WRITERS[-1]] = await measure_writers(served, who.writer, WRITERS[-1], "last")
    return runs


def _count_syncs(who: Contestant, folder: Path) -> dict[int, float]:
    """Return the syncs per command, for each number of writers."""
    if who.name == "reference":
        return {}
    served = processes.midstream(folder, "counting")
    try:

        async def count(writers: int) -> float:
            before = int(served.query("syncs"))
            run = await measure_writers(served, who.writer, writers, f"s{writers}")
            return (int(served.query("syncs")) - before) / run.done

        return {writers: asyncio.run(count(writers)) for writers in WRITERS}
    finally:
        served.stop()


def measure(folder: Path) -> list[Figure]:
    """Measure all contestants, alternating."""
    processes.raise_file_limit(4 * max(WRITERS))
    found: dict[str, list[dict[tuple[str, int], Run]]] = {}
    with processes.on_last_core():
        for number in range(ROUNDS):
            for who in CONTESTANTS:
                served = who.start(folder / f"{who.name}-{number}")
                if served is None:
                    continue
                try:
                    found.setdefault(who.name, []).append(asyncio.run(_round(served, who)))
                finally:
                    served.stop()
        syncs = {who.name: _count_syncs(who, folder / f"{who.name}-counted") for who in CONTESTANTS}
    return [
        _figure(what, name, rounds, found.get("reference"), syncs[name])
        for what in found["WebSocket"][0]
        for name, rounds in found.items()
    ]


def _figure(
    what: tuple[str, int],
    name: str,
    rounds: Sequence[dict[tuple[str, int], Run]],
    reference: Sequence[dict[tuple[str, int], Run]] | None,
    syncs: dict[int, float],
) -> Figure:
    runs = [each[what] for each in rounds]
    rates = [run.done / run.cpu_s for run in runs]
    theirs = [each[what].done / each[what].cpu_s for each in reference or ()]
    return Figure(
        what=what[0],
        who=name,
        writers=what[1],
        per_core_s=statistics.median(rates),
        of_reference=statistics.median(ours / their for ours, their in zip(rates, theirs, strict=True))
        if theirs
        else 0.0,
        per_s=statistics.median(run.done / run.wall_s for run in runs),
        p50_ms=statistics.median(run.p50_ms for run in runs),
        refused=sum(run.refused for run in runs),
        syncs=syncs.get(what[1], -1.0) if what[0] == "commands" else -1.0,
        other_cores=statistics.median(run.other_s / run.wall_s for run in runs),
    )


def table(figures: Sequence[Figure]) -> str:
    """Return the figures as text for a terminal."""
    lines = [
        f"{'':12}{'':14}writers  per core-s  of reference     per s   p50 ms  refused  syncs  other cores"
    ]
    lines += [
        f"{f.what:12}{f.who:14}{f.writers:7}{f.per_core_s:12,.0f}{f.of_reference:14.2f}{f.per_s:10,.0f}"
        f"{f.p50_ms:9.2f}{f.refused:9,}{f.syncs:7.2f}{f.other_cores:13.2f}"
        for f in figures
    ]
    return "\n".join(lines)


def run(folder: Path) -> list[Figure]:
    """Measure, print, return."""
    figures = measure(folder)
    print(table(figures))
    return figures
