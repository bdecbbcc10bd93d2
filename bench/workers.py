"""The whole loop with 1, 2 and 4 workers: steps a second of all sessions, and the ratio to one worker.

A step is a model call that requests a tool, and the run of that tool: two appends. The model answers at once, so that
the server has all the work. The end of a turn is a datagram of its last tool, so that the load costs little.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from midstream.local_keys import headers_for

SESSIONS, STEPS_A_TURN, ROUNDS = 64, 20, 3
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
    if command == "last":
        done.sendto(b"x", ("127.0.0.1", PORT))
    return "collected 311 items; 311 passed in 4.2 s. " * 6


def response(request):
    results = 0
    for entry in reversed(request.history.entries):
        if hasattr(entry, "parts"):
            break
        results += 1
    if results == STEPS:
        return text("done")
    return calls(("run_command", '{"command": "last"}' if results == STEPS - 1 else '{"command": "make"}'))


agent = Agent(ScriptedModel(response), tools=[run_command], name="bench")
"""


class _Ends(asyncio.DatagramProtocol):
    """Counts the turns that have ended."""

    def __init__(self) -> None:
        self.count = 0
        self.wanted = 0
        self.reached = asyncio.Event()

    def datagram_received(self, data: bytes, addr: object) -> None:  # noqa: ARG002 - asyncio's interface
        self.count += 1
        if self.count >= self.wanted:
            self.reached.set()


async def _post(host: str, port: int, session: str, stream: str, headers: dict[str, str]) -> None:
    reader, writer = await asyncio.open_connection(host, port)
    payload = {"type": "send", "parts": [{"type": "text", "text": "go"}]}
    body = json.dumps({"type": "command", "seqno": 0, "payload": payload}).encode()
    lines = {
        "host": f"{host}:{port}",
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        "x-idempotency-key": stream,
        "x-idempotent-encryption-key": "s" * 43,
        **headers,
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    writer.write(f"POST /v1/sessions/{session}/commands HTTP/1.1\r\n{head}\r\n".encode() + body)
    status = await reader.readline()
    assert b" 200 " in status, status
    await reader.read()
    writer.close()


async def _round(url: str, ends: _Ends, number: int) -> float:
    """Run one turn in each session; return the steps a second."""
    host, _, port = url.removeprefix("http://").partition(":")
    headers = await asyncio.to_thread(headers_for, url)
    ends.count, ends.wanted = 0, SESSIONS
    ends.reached.clear()
    began_at = time.perf_counter()
    posts = (_post(host, int(port), f"s{each}", f"t{number}.{each}", headers) for each in range(SESSIONS))
    await asyncio.gather(*posts)
    async with asyncio.timeout(120):
        await ends.reached.wait()
    return SESSIONS * STEPS_A_TURN / (time.perf_counter() - began_at)


async def _measure(folder: Path, stores: dict[int, str]) -> dict[int, float]:
    """Return the median steps a second by the number of workers; the counts alternate."""
    loop = asyncio.get_running_loop()
    transport, ends = await loop.create_datagram_endpoint(_Ends, local_addr=("127.0.0.1", 0))
    port = transport.get_extra_info("sockname")[1]
    app = APP.replace("PORT", str(port)).replace("STEPS", str(STEPS_A_TURN))
    (folder / "bench_app.py").write_text(app)
    servers: dict[int, subprocess.Popen[str]] = {}
    urls: dict[int, str] = {}
    found: dict[int, list[float]] = {count: [] for count in stores}
    try:
        for count, store in stores.items():
            command = [sys.executable, "-m", "midstream", "serve", "bench_app:agent", "--json", "--port", "0"]
            options = ["--workers", str(count), "--store", store]
            servers[count] = await asyncio.to_thread(
                subprocess.Popen, [*command, *options], stdout=subprocess.PIPE, text=True, cwd=folder
            )
            line = servers[count].stdout
            assert line is not None
            urls[count] = json.loads(await asyncio.to_thread(line.readline))["url"]
            await _round(urls[count], ends, -1)  # all sessions are awake
        for number in range(ROUNDS):
            for count in stores:
                found[count].append(await _round(urls[count], ends, number))
    finally:
        transport.close()
        for server in servers.values():
            server.terminate()
            server.wait(30)
    return {count: statistics.median(each) for count, each in found.items()}


def measure_workers(folder: Path, prefix: str = "") -> dict[str, float]:
    """Return the steps a second for each number of workers, and the ratios to one worker.

    Args:
        prefix: URL of a store, up to the name of its schema; "" uses SQLite files in `folder`.
    """
    stores = {
        count: f"{prefix}workers_{count}" if prefix else str(folder / f"workers_{count}.db")
        for count in COUNTS
    }
    found = asyncio.run(_measure(folder, stores))
    result = {f"steps_per_s_{count}": round(value) for count, value in found.items()}
    ratios = {f"of_one_{count}": round(found[count] / found[1], 2) for count in COUNTS[1:]}
    return {**result, **ratios}
