"""The whole loop with 1, 2 and 4 workers: steps a second of all sessions, and the ratio to one worker.

A step is a model call that requests a tool, and the run of that tool: two appends. The model answers at once, so that
the server has all the work. Each session has turns, one after the other; the end of one is a datagram of its last tool,
so that the load costs little.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from midstream.local_keys import headers_for

SESSIONS, STEPS_A_TURN, TURNS, ROUNDS = 64, 20, 4, 3
COUNTS = (1, 2, 4)
APP = """
import socket

from midstream import Agent
from midstream.testing import ScriptedModel, calls, text
from midstream.tools.function_tools import tool

done = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)


@tool
async def run_command(command: str) -> str:
    '''Run a command.'''
    if command.startswith("last "):
        done.sendto(command.removeprefix("last ").encode(), ("127.0.0.1", PORT))
    return "collected 311 items; 311 passed in 4.2 s. " * 6


def response(request):
    results = 0
    for entry in reversed(request.history.entries):
        if hasattr(entry, "parts"):
            session = entry.parts[0].text
            break
        results += 1
    if results == STEPS:
        return text("done")
    command = f"last {session}" if results == STEPS - 1 else "make"
    return calls(("run_command", '{"command": "%s"}' % command))


agent = Agent(ScriptedModel(response), tools=[run_command], name="bench")
"""


class _Ends(asyncio.DatagramProtocol):
    """Receives the names of sessions whose turns have ended."""

    def __init__(self) -> None:
        self.of = {f"s{number}": asyncio.Event() for number in range(SESSIONS)}

    def datagram_received(self, data: bytes, addr: object) -> None:  # noqa: ARG002 - asyncio's interface
        self.of[data.decode()].set()


class _Client:
    """Sends the messages of one session.

    Args:
        is_kept: Whether its requests share one connection, as with any HTTP client, so that all of them reach one
            worker. Otherwise each has a connection of its own and reaches any worker.
    """

    def __init__(self, url: str, session: str, headers: dict[str, str], *, is_kept: bool) -> None:
        self._host, _, self._port = url.removeprefix("http://").partition(":")
        self._session = session
        self._headers = headers
        self._is_kept = is_kept
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, stream: str) -> None:
        """Send a message and wait until it is accepted."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, int(self._port))
        reader, writer = self._streams
        payload = {"type": "send", "parts": [{"type": "text", "text": self._session}]}
        body = json.dumps({"type": "command", "seqno": 0, "payload": payload}).encode()
        lines = {
            "host": f"{self._host}:{self._port}",
            "content-type": "application/json",
            "content-length": str(len(body)),
            "x-idempotency-key": stream,
            "x-idempotent-encryption-key": "s" * 43,
            **self._headers,
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        writer.write(f"POST /v1/sessions/{self._session}/commands HTTP/1.1\r\n{head}\r\n".encode() + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert b" 200 " in answer, answer
        await reader.readexactly(int(answer.partition(b"content-length: ")[2].split(b"\r")[0]))
        if not self._is_kept:
            self.close()

    def close(self) -> None:
        """Close its connection."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def _rounds(url: str, ends: _Ends, number: int, *, is_kept: bool) -> float:
    """Run turns in each session, one after the other, twice; return the steps a second of the second time."""
    headers = await asyncio.to_thread(headers_for, url)
    clients = {session: _Client(url, session, headers, is_kept=is_kept) for session in ends.of}

    async def run_turns(session: str, prefix: str) -> None:
        for turn in range(TURNS):
            ends.of[session].clear()
            await clients[session].send(f"{prefix}.{turn}.{session}")
            await ends.of[session].wait()

    began_at = 0.0
    for prefix in (f"a{number}", f"b{number}"):  # all sessions are awake after the first time
        began_at = time.perf_counter()
        async with asyncio.timeout(120):
            await asyncio.gather(*(run_turns(session, prefix) for session in ends.of))
    took_s = time.perf_counter() - began_at
    for client in clients.values():
        client.close()
    return SESSIONS * TURNS * STEPS_A_TURN / took_s


async def _measure(folder: Path, stores: dict[int, str], *, is_kept: bool) -> dict[int, float]:
    """Return the median steps a second by the number of workers.

    The counts alternate. One server is up at a time: idle workers look at the store, too.
    """
    loop = asyncio.get_running_loop()
    transport, ends = await loop.create_datagram_endpoint(_Ends, local_addr=("127.0.0.1", 0))
    port = transport.get_extra_info("sockname")[1]
    app = APP.replace("PORT", str(port)).replace("STEPS", str(STEPS_A_TURN))
    (folder / "bench_app.py").write_text(app)
    found: dict[int, list[float]] = {count: [] for count in stores}
    try:
        for number in range(ROUNDS):
            for count, store in stores.items():
                with _serving(folder, count, store) as url:
                    found[count].append(await _rounds(url, ends, number, is_kept=is_kept))
    finally:
        transport.close()
    return {count: statistics.median(each) for count, each in found.items()}


@contextmanager
def _serving(folder: Path, count: int, store: str) -> Iterator[str]:
    """Serve with so many workers; yield the URL."""
    command = [sys.executable, "-m", "midstream", "serve", "bench_app:agent", "--json", "--port", "0"]
    options = ["--workers", str(count), "--store", store]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True, cwd=folder) as server:
        try:
            assert server.stdout is not None
            yield json.loads(server.stdout.readline())["url"]
        finally:
            server.terminate()
            server.wait(30)


def measure_workers(folder: Path, prefix: str = "", *, is_kept: bool = True) -> dict[str, float]:
    """Return the steps a second for each number of workers, and the ratios to one worker.

    Args:
        prefix: URL of a store, up to the name of its schema; "" uses SQLite files in `folder`.
        is_kept: Whether each client keeps its connection.
    """
    folder = folder.resolve()
    name = "workers_kept" if is_kept else "workers_unkept"
    stores = {
        count: f"{prefix}{name}_{count}" if prefix else str(folder / f"{name}_{count}.db") for count in COUNTS
    }
    found = asyncio.run(_measure(folder, stores, is_kept=is_kept))
    result = {f"steps_per_s_{count}": round(value) for count, value in found.items()}
    ratios = {f"of_one_{count}": round(found[count] / found[1], 2) for count in COUNTS[1:]}
    return {**result, **ratios}
