"""Cost of the gateway in time to the first word, at 100 concurrent streams.

A scripted peer speaks OpenAI's chat completions. The same load goes to it directly and through the gateway, in turns,
in one run: each of 100 connections sends a request, notes the time of the first word, reads to the end, pauses, and
repeats. The cost is the difference of the two distributions at their medians and at their 99th percentiles.

How the bar is read. "100 concurrent streams" is a closed loop: a hundred are open all the time (but for the pauses, a
twentieth of it), each receives 20 tokens a second, and new requests come among them as answers end, some 47 a second.
Not a hundred POSTs in the same millisecond: that would measure how long a hundred requests stand in line for one core,
with the peer's own queue in front of it. Requests before all hundred are open are not counted. No two requests are
equal: none is answered by the run of another. The gateway is the command that people start, with its key and its
database on disk, at the priority they start it with; peer, gateway and load are three processes on whatever cores
there are, and share them on both sides. The upstream is one that keeps no conversations: what a pool and an agent's
own SDK take comes on top, and an agent's first word comes after seconds.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from bench.gateway_server import TOKEN

STREAMS = 100
TOKENS = 40
TOKEN_S = 0.05
"""Seconds between tokens: each stream says 20 a second, all of them 2,000."""
OPENING_S = TOKENS * TOKEN_S
"""Seconds over which the streams of a round are opened: the length of one."""
ROUND_S = 12.0
ROUNDS = 3
PATIENCE_S = 300.0
P50_BAR_MS, P99_BAR_MS = 5.0, 15.0


class Figure(msgspec.Struct):
    """The time to the first word, in milliseconds; medians over rounds."""

    who: str
    streams: int
    asked: int
    p50_ms: float
    p99_ms: float


def run(folder: Path) -> list[Figure]:
    """Measure and compare with the bars."""
    figures = asyncio.run(_measure(folder))
    direct, through = figures
    for figure in figures:
        print(
            f"{figure.who:8} {figure.asked:6} requests  p50 {figure.p50_ms:7.2f} ms  p99 {figure.p99_ms:7.2f} ms"
        )
    for name, added, bar in (
        ("p50", through.p50_ms - direct.p50_ms, P50_BAR_MS),
        ("p99", through.p99_ms - direct.p99_ms, P99_BAR_MS),
    ):
        print(f"added at {name}: {added:.2f} ms (bar: {bar:.0f} ms) {'ok' if added < bar else 'MISSED'}")
    return figures


class _Program:
    """A server in a process of its own; it prints where it listens."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", *arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        listening = msgspec.json.decode(self._process.stdout.readline(), type=_Listening)
        self.port = int(listening.url.rpartition(":")[2])

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


class _Listening(msgspec.Struct):
    url: str


def _gateway(peer: int, model: str, folder: Path) -> _Program:
    upstream = f"openai-compatible:http://127.0.0.1:{peer}/v1"
    store = str(folder / "gateway.db")
    options = ("--model", model, "--token", TOKEN, "--port", "0", "--store", store, "--json")
    return _Program("midstream", "gateway", "--upstream", upstream, *options)


async def _measure(folder: Path) -> list[Figure]:
    model = f"{TOKENS}@{TOKEN_S}"
    peer = _Program("bench.gateway_server")
    through = _gateway(peer.port, model, folder)
    try:
        async with asyncio.timeout(PATIENCE_S):
            ports = {"direct": peer.port, "gateway": through.port}
            rounds: dict[str, list[list[float]]] = {who: [] for who in ports}
            await _load(through.port, model, "warm", OPENING_S)  # both are warm
            for number in range(ROUNDS):
                for who, port in ports.items():
                    rounds[who].append(await _load(port, model, f"{who} {number}", ROUND_S))
    finally:
        through.stop()
        peer.stop()
    return [_figure(who, measured) for who, measured in rounds.items()]


def _figure(who: str, rounds: list[list[float]]) -> Figure:
    cuts = [statistics.quantiles(times, n=100) for times in rounds]
    p50 = statistics.median(cut[49] for cut in cuts) * 1000
    p99 = statistics.median(cut[98] for cut in cuts) * 1000
    return Figure(who, STREAMS, sum(map(len, rounds)), p50, p99)


async def _load(port: int, model: str, name: str, seconds: float) -> list[float]:
    """Keep `STREAMS` streams open; return the seconds to the first word of what was asked while all were.

    Args:
        name: What this round's questions begin with.
        seconds: How long new ones are asked once all are open.
    """
    times: list[float] = []
    opened = time.monotonic() + OPENING_S
    streams = (
        _ask_on(port, model, f"{name} {number}", opened, opened + seconds, times) for number in range(STREAMS)
    )
    await asyncio.gather(*streams)
    return times


async def _ask_on(port: int, model: str, name: str, opened: float, until: float, times: list[float]) -> None:
    chance = random.Random(name)  # noqa: S311 - a load
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    await asyncio.sleep(chance.random() * OPENING_S)  # the connections start at different times
    turn = 0
    while (asked := time.monotonic()) < until:
        turn += 1
        messages = [{"role": "system", "content": "You are a coding agent. " * 50}]
        messages += [{"role": "user", "content": f"question {name} {turn} {'word ' * 100}"}]
        body = msgspec.json.encode({"model": model, "stream": True, "messages": messages})
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nauthorization: Bearer {TOKEN}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        began = time.perf_counter()
        writer.write(head.encode() + body)
        received = b""
        while b"token" not in received:
            received += await _some(reader)
        if asked >= opened:
            times.append(time.perf_counter() - began)
        while not received.endswith(b"0\r\n\r\n"):
            received = received[-8:] + await _some(reader)
        await asyncio.sleep(chance.random() * 0.2)
    writer.close()


async def _some(reader: asyncio.StreamReader) -> bytes:
    piece = await reader.read(65536)
    assert piece, "the server closed the connection"
    return piece
