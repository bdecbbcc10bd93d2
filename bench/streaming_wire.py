"""Clients of `bench.streaming` on plain sockets, so that the load costs less than the measured servers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

from msgspec import Struct

STAMP = re.compile(rb"@(\d{20})")
STAMP_BYTES = 21
PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20
_UPGRADE = (
    b"upgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-version: 13\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


def token() -> bytes:
    """Return a token: 50 bytes of JSON with the time of its creation."""
    return b'"@%020d%b"' % (time.monotonic_ns(), b"." * 27)


def _request(method: bytes, path: str, body: bytes = b"", headers: bytes = b"") -> bytes:
    return b"%b %b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n%b" % (
        method, path.encode(), headers, len(body), body,
    )  # fmt: skip


class Wire(Struct, frozen=True):
    """Requests of one kind of server.

    Args:
        stream: Path of a stream, to begin it and to append to it.
        reading: Path and query to follow it; {after} is the last received event.
        beginning: The value of `after` to read from the start.
        is_socket: Whether it is read over a WebSocket.
    """

    stream: str
    reading: str
    beginning: str = "0"
    is_socket: bool = False

    def begin(self, name: str) -> bytes:
        """Return the request that creates a stream."""
        return _request(b"PUT", self.stream.format(name=name))

    def append(self, name: str, body: bytes, query: str = "") -> bytes:
        """Return the request that appends a token, or a list of them."""
        return _request(b"POST", self.stream.format(name=name) + query, body)

    def follow(self, name: str, after: str = "") -> bytes:
        """Return the request of a reader."""
        path = self.reading.format(name=name, after=after or self.beginning)
        return _request(b"GET", path, headers=_UPGRADE if self.is_socket else b"")


RAW = Wire("/s/{name}", "/s/{name}?from={after}")
RAW_WEBSOCKET = Wire("/s/{name}", "/s/{name}?from={after}", is_socket=True)
SSE = Wire("/s/{name}", "/v1/sessions/{name}/events?after={after}", "0-0")
WEBSOCKET = Wire("/s/{name}", "/v1/sessions/{name}/stream?after={after}", "0-0", is_socket=True)
REFERENCE = Wire("/v1/stream/{name}", "/v1/stream/{name}?offset={after}&live=sse", "-1")


class Sender(asyncio.Protocol):
    """A connection with one request at a time."""

    def __init__(self) -> None:
        self._buffer = b""
        self._answer: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self.transport = cast("asyncio.Transport", transport)
        self.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        """Take a response with a short body."""
        self._buffer += data
        head, end, body = self._buffer.partition(b"\r\n\r\n")
        if not end or self._answer is None:
            return
        found = re.search(rb"(?i)content-length: *(\d+)", head)
        if len(body) < (int(found[1]) if found else 0):
            return
        if b"chunked" in head.lower() and not body.endswith(b"0\r\n\r\n"):
            return
        self._buffer = b""
        answer, self._answer = self._answer, None
        if int(head[9:12]) < 300:  # noqa: PLR2004
            answer.set_result(head + end + body)
        else:
            answer.set_exception(RuntimeError(repr(head + end + body)))

    def send(self, request: bytes) -> asyncio.Future[bytes]:
        """Send a request; the future has the whole response."""
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self._answer


class Received:
    """Counts the tokens that several readers have read together."""

    def __init__(self) -> None:
        self.tokens = 0
        self.bytes = 0
        self.answered = 0
        self.latencies_ns: list[int] = []
        self.last = 0.0
        self._wanted = 0
        self._enough: asyncio.Future[None] | None = None

    def add(self, count: int, size: int) -> None:
        """Count tokens and bytes."""
        self.tokens += count
        self.bytes += size
        self.last = time.monotonic()
        if self._enough is not None and self.tokens >= self._wanted and not self._enough.done():
            self._enough.set_result(None)

    async def until(self, wanted: int, within_s: float = 60.0) -> None:
        """Wait until this many tokens were read in total."""
        if self.tokens >= wanted:
            return
        self._wanted, self._enough = wanted, asyncio.get_running_loop().create_future()
        async with asyncio.timeout(within_s):
            await self._enough


class Reader(asyncio.Protocol):
    """Follows a stream. It counts tokens, and measures the latency of each if `is_timed`."""

    def __init__(self, request: bytes, received: Received, *, is_timed: bool) -> None:
        self._request = request
        self._received = received
        self.is_timed = is_timed
        self._rest = b""
        self._is_answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self.transport = cast("asyncio.Transport", transport)
        self.transport.write(self._request)

    def stall(self) -> None:
        """Stop reading."""
        self.transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if not self._is_answered:
            self._is_answered = True
            self._received.answered += 1
        count = data.count(b"@")
        if self.is_timed:
            now = time.monotonic_ns()
            text = self._rest + data
            self._received.latencies_ns += [now - int(each) for each in STAMP.findall(text)]
            last = text.rfind(b"@")
            self._rest = text[last:] if last > len(text) - STAMP_BYTES else b""
        self._received.add(count, len(data))


class Server:
    """A server in its own process, alone on a core.

    Args:
        command: A program that prints its port, and serves until it is killed.
    """

    def __init__(self, name: str, wire: Wire, command: Sequence[str], *, core: int) -> None:
        self.name = name
        self.wire = wire
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        os.sched_setaffinity(self._process.pid, {core})
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def cpu_s(self) -> float:
        """Return the CPU seconds so far, of all threads."""
        tasks = Path(f"/proc/{self._process.pid}/task")
        return sum(int((each / "schedstat").read_text().split()[0]) for each in tasks.iterdir()) / 1e9

    def resident_mib(self) -> float:
        """Return the resident memory."""
        return int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]) * PAGE_MIB

    @contextlib.contextmanager
    def at_real_time(self) -> Iterator[None]:
        """Give the server and the load a real-time priority, so that other work does not delay them."""
        _schedule(self._process.pid, os.SCHED_RR, 10)
        try:
            yield
        finally:
            _schedule(self._process.pid, os.SCHED_OTHER, 0)

    def stop(self) -> None:
        """Kill the server."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    async def sender(self) -> Sender:
        """Connect a sender."""
        _, sender = await asyncio.get_running_loop().create_connection(Sender, "127.0.0.1", self.port)
        return sender

    async def reader(
        self, wire: Wire, name: str, received: Received, *, after: str = "", is_timed: bool = False
    ) -> Reader:
        """Connect a reader, and follow a stream."""
        make = lambda: Reader(wire.follow(name, after), received, is_timed=is_timed)  # noqa: E731
        _, reader = await asyncio.get_running_loop().create_connection(make, "127.0.0.1", self.port)
        return reader


def _schedule(server: int, policy: int, priority: int) -> None:
    for process in (server, os.getpid()):
        for thread in Path(f"/proc/{process}/task").iterdir():
            with contextlib.suppress(OSError):  # without permission the figures are noisier
                os.sched_setscheduler(int(thread.name), policy, os.sched_param(priority))
