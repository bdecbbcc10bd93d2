"""Deliveries per core-second of the server: one answer to 500 readers, for each dialect of `midstream serve`.

The model waits until all readers are connected. Then it returns a word every 5 ms. A delivery is one word at one
reader. Each dialect is compared with the native stream in the same round. The result is the median over rounds.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import statistics
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct

from bench.population import cpu_s

READERS, WORDS, ROUNDS = 500, 200, 3
HOST = "127.0.0.1"
END_S = 120.0
APP = f"""
import asyncio
from pathlib import Path

from midstream import Agent
from midstream.models.responses import Finished, TextDelta


class Words:
    name = "words"

    async def stream(self, request):
        go = Path("go-" + request.history.entries[-1].parts[0].text)
        while not go.exists():
            await asyncio.sleep(0.01)
        for number in range({WORDS}):
            yield TextDelta(f"word{{number}} ")
            await asyncio.sleep(0.005)
        yield Finished()


agent = Agent(Words(), name="bench")
"""


class DialectReading(Struct, frozen=True):
    """Request of a reader in one dialect: a path with the session and its run, and the last bytes of the answer."""

    path: str
    end: bytes


READINGS = {
    "native": DialectReading("/v1/sessions/{session}/events", b"turn_ended"),
    "ai_sdk": DialectReading("/v1/chat/{session}/stream", b"[DONE]"),
    "ag_ui": DialectReading("/v1/ag-ui/threads/{session}/runs/{run}", b"RUN_FINISHED"),
    "langgraph": DialectReading(
        "/v1/langgraph/threads/{session}/runs/{run}/stream?stream_mode=messages-tuple", b"\r\n0\r\n\r\n"
    ),
    "durable_streams": DialectReading("/v1/stream/sessions/{session}?offset=-1&live=sse", b"turn_ended"),
}


PLAIN = "plain_stream"
WRITERS = 16
"""Concurrent append requests, so that a slow append does not delay the next word."""


@contextmanager
def _serving(folder: Path) -> Iterator[tuple[int, int]]:
    """Serve the agent; yield the port and the process id."""
    (folder / "bench_words.py").write_text(APP)
    command = [sys.executable, "-m", "midstream", "serve", "bench_words:agent", "--json", "--no-auth"]
    options = ["--port", "0", "--store", "words.db"]
    with subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=folder
    ) as server:
        try:
            assert server.stdout is not None
            yield int(json.loads(server.stdout.readline())["url"].rpartition(":")[2]), server.pid
        finally:
            server.terminate()
            server.wait(30)


def _request(port: int, path: str, body: Any = None, **headers: str) -> Any:  # noqa: ANN401 - JSON
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://{HOST}:{port}{path}", data, {"content-type": "application/json", **headers}
    )
    with urllib.request.urlopen(request) as answer:  # noqa: S310 - as above
        return json.loads(answer.read())


def _begin(port: int, session: str) -> str:
    """Begin a turn; return its run's id at LangGraph's API."""
    payload = {"type": "send", "parts": [{"type": "text", "text": session}]}
    stream = {"x-idempotency-key": session, "x-idempotent-encryption-key": "s" * 43}
    _request(
        port,
        f"/v1/sessions/{session}/commands",
        {"type": "command", "seqno": 0, "payload": payload},
        **stream,
    )
    return str(_request(port, f"/v1/langgraph/threads/{session}/runs")[0]["run_id"])


async def _read(port: int, path: str, end: bytes, note_connected: Callable[[], None]) -> None:
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: {HOST}:{port}\r\naccept: text/event-stream\r\n\r\n".encode())
    status = await reader.readline()
    assert b" 200 " in status, (path, status)
    note_connected()
    received = b""
    while end not in received:
        piece = await reader.read(1 << 16)
        assert piece, "the stream ended early"
        received = received[-len(end) :] + piece
    writer.close()


async def _measure(folder: Path, port: int, pid: int, name: str, session: str) -> float:
    """Return the deliveries of one answer per core-second of the server."""
    dialect = READINGS[name]
    run = await asyncio.to_thread(_begin, port, session)
    missing = READERS
    all_connected = asyncio.Event()

    def note_connected() -> None:
        nonlocal missing
        missing -= 1
        if not missing:
            all_connected.set()

    path = dialect.path.format(session=session, run=run)
    async with asyncio.timeout(END_S), asyncio.TaskGroup() as group:
        readers = [group.create_task(_read(port, path, dialect.end, note_connected)) for _ in range(READERS)]
        await all_connected.wait()
        before = cpu_s([pid])
        (folder / f"go-{session}").touch()
        await asyncio.wait(readers)
    return READERS * WORDS / (cpu_s([pid]) - before)


async def _measure_plain(port: int, pid: int, name: str) -> float:
    """Return the deliveries for a plain stream. Each word is one request of a client, and one synced append."""
    path, missing, all_connected = f"/v1/stream/{name}", READERS, asyncio.Event()

    def note_connected() -> None:
        nonlocal missing
        missing -= 1
        if not missing:
            all_connected.set()

    def append(number: int) -> None:
        connection = http.client.HTTPConnection(HOST, port)
        _send(connection, "POST", path, json.dumps(f"word{number} "))
        connection.close()

    async def append_all() -> None:
        with ThreadPoolExecutor(WRITERS) as writers:
            work = []
            for number in range(WORDS):
                work.append(writers.submit(append, number))
                await asyncio.sleep(0.005)
            await asyncio.gather(*map(asyncio.wrap_future, work))
        connection = http.client.HTTPConnection(HOST, port)
        await asyncio.to_thread(_send, connection, "POST", path, "", {"stream-closed": "true"})

    _send(http.client.HTTPConnection(HOST, port), "PUT", path, "")
    async with asyncio.timeout(END_S), asyncio.TaskGroup() as group:
        reading = f"{path}?offset=-1&live=sse"
        readers = [
            group.create_task(_read(port, reading, b"streamClosed", note_connected)) for _ in range(READERS)
        ]
        await all_connected.wait()
        before = cpu_s([pid])
        await append_all()
        await asyncio.wait(readers)
    return READERS * WORDS / (cpu_s([pid]) - before)


def _send(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: str,
    more: dict[str, str] | None = None,
) -> None:
    connection.request(method, path, body, {"content-type": "application/json", **(more or {})})
    answer = connection.getresponse()
    assert answer.status < 300, (answer.status, answer.read())  # noqa: PLR2004 - HTTP's
    answer.read()


async def _rounds(folder: Path, port: int, pid: int) -> list[dict[str, float]]:
    rounds = []
    for number in range(ROUNDS):
        found = {name: await _measure(folder, port, pid, name, f"{name}-{number}") for name in READINGS}
        found[PLAIN] = await _measure_plain(port, pid, f"{PLAIN}-{number}")
        print("  ".join(f"{name} {value:,.0f}" for name, value in found.items()), flush=True)
        rounds.append(found)
    return rounds


def run(folder: Path) -> dict[str, dict[str, float]]:
    """Measure, print, return."""
    folder = folder.resolve()
    with _serving(folder) as (port, pid):
        rounds = asyncio.run(_rounds(folder, port, pid))
    result = {
        name: {
            "deliveries_per_core_s": round(statistics.median(each[name] for each in rounds)),
            "of_native": round(statistics.median(each[name] / each["native"] for each in rounds), 2),
        }
        for name in (*READINGS, PLAIN)
    }
    for name, figures in result.items():
        print(
            f"{name}: {figures['deliveries_per_core_s']:,} a core-second, {figures['of_native']} of the native"
        )
    return result
