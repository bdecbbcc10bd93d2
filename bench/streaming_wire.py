"""What `bench.streaming` speaks: bare sockets, so that the load costs less than the servers it measures."""

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
    """Return a token, 50 bytes of JSON, that says when it was made."""
    return b'"@%020d%b"' % (time.monotonic_ns(), b"." * 27)


def _request(method: bytes, path: str, body: bytes = b"", headers: bytes = b"") -> bytes:
    return b"%b %b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n%b" % (
        method, path.encode(), headers, len(body), body,
    )  # fmt: skip


class Wire(Struct, frozen=True):
    """How one kind of server is asked.

    Args:
        stream: Path of a stream, to begin it and to append to it.
        reading: What is asked to follow it, with the query; {after} stands for the last event that is known.
        beginning: What `after` is to read from the start.
        is_socket: It is read over a WebSocket.
    """

    stream: str
    reading: str
    beginning: str = "0"
    is_socket: bool = False

    def begin(self, name: str) -> bytes:
        """Return the request that makes a stream."""
        return _request(b"PUT", self.stream.format(name=name))

    def append(self, name: str, body: bytes, query: str = "") -> bytes:
        """Return the request that appends a token, or a list of them."""
        return _request(b"POST", self.stream.format(name=name) + query, body)

    def follow(self, name: str, after: str = "") -> bytes:
        """Return what a reader sends."""
        path = self.reading.format(name=name, after=after or self.beginning)
        return _request(b"GET", path, headers=_UPGRADE if self.is_socket else b"")


RAW = Wire("/s/{name}", "/s/{name}?from={after}")
RAW_WEBSOCKET = Wire("/s/{name}", "/s/{name}?from={after}", is_socket=True)
SSE = Wire("/s/{name}", "/v1/sessions/{name}/events?after={after}", "0-0")
WEBSOCKET = Wire("/s/{name}", "/v1/sessions/{name}/stream?after={after}", "0-0", is_socket=True)
REFERENCE = Wire("/v1/stream/{name}", "/v1/stream/{name}?offset={after}&live=sse", "-1")


class Sender(asyncio.Protocol):
    """A connection that asks one thing at a time."""

    def __init__(self) -> None:
        self._got = b""
        self._answer: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self.transport = cast("asyncio.Transport", transport)
        self.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        """Take an answer; its body is short."""
        self._got += data
        head, end, body = self._got.partition(b"\r\n\r\n")
        if not end or self._answer is None:
            return
        found = re.search(rb"(?i)content-length: *(\d+)", head)
        if len(body) < (int(found[1]) if found else 0):
            return
        if b"chunked" in head.lower() and not body.endswith(b"0\r\n\r\n"):
            return
        self._got = b""
        answer, self._answer = self._answer, None
        if int(head[9:12]) < 300:  # noqa: PLR2004
            answer.set_result(head + end + body)
        else:
            answer.set_exception(RuntimeError(repr(head + end + body)))

    def ask(self, request: bytes) -> asyncio.Future[bytes]:
        """Ask; the answer is the whole response."""
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self._answer


class Seen:
    """What some readers have read together."""

    def __init__(self) -> None:
        self.tokens = 0
        self.bytes = 0
        self.answered = 0
        self.latencies_ns: list[int] = []
        self.last = 0.0
        self._wanted = 0
        self._enough: asyncio.Future[None] | None = None

    def add(self, count: int, size: int) -> None:
        """Count tokens."""
        self.tokens += count
        self.bytes += size
        self.last = time.monotonic()
        if self._enough is not None and self.tokens >= self._wanted and not self._enough.done():
            self._enough.set_result(None)

    async def until(self, wanted: int, within_s: float = 60.0) -> None:
        """Wait until this many tokens were read in all."""
        if self.tokens >= wanted:
            return
        self._wanted, self._enough = wanted, asyncio.get_running_loop().create_future()
        async with asyncio.timeout(within_s):
            await self._enough


class Reader(asyncio.Protocol):
    """Follows a stream; it counts tokens, or notes when each was made and came."""

    def __init__(self, asked: bytes, seen: Seen, *, is_timed: bool) -> None:
        self._asked = asked
        self._seen = seen
        self.is_timed = is_timed
        self._rest = b""
        self._is_answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self.transport = cast("asyncio.Transport", transport)
        self.transport.write(self._asked)

    def stall(self) -> None:
        """Read no more."""
        self.transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if not self._is_answered:
            self._is_answered = True
            self._seen.answered += 1
        count = data.count(b"@")
        if self.is_timed:
            now = time.monotonic_ns()
            text = self._rest + data
            self._seen.latencies_ns += [now - int(each) for each in STAMP.findall(text)]
            last = text.rfind(b"@")
            self._rest = text[last:] if last > len(text) - STAMP_BYTES else b""
        self._seen.add(count, len(data))


class Server:
    """A server in a process of its own, alone on a core.

    Args:
        command: Prints the port, and serves until it is killed.
    """

    def __init__(self, name: str, wire: Wire, command: Sequence[str], *, core: int) -> None:
        self.name = name
        self.wire = wire
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        os.sched_setaffinity(self._process.pid, {core})
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def cpu_s(self) -> float:
        """Return the seconds on a core so far, all threads."""
        tasks = Path(f"/proc/{self._process.pid}/task")
        return sum(int((each / "schedstat").read_text().split()[0]) for each in tasks.iterdir()) / 1e9

    def resident_mib(self) -> float:
        """Return the memory it has."""
        return int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]) * PAGE_MIB

    @contextlib.contextmanager
    def at_real_time(self) -> Iterator[None]:
        """Let neither it nor the load wait for what else runs here: for latencies at a low rate."""
        _schedule(self._process.pid, os.SCHED_RR, 10)
        try:
            yield
        finally:
            _schedule(self._process.pid, os.SCHED_OTHER, 0)

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    async def sender(self) -> Sender:
        """Connect."""
        _, sender = await asyncio.get_running_loop().create_connection(Sender, "127.0.0.1", self.port)
        return sender

    async def reader(
        self, wire: Wire, name: str, seen: Seen, *, after: str = "", is_timed: bool = False
    ) -> Reader:
        """Connect and follow a stream."""
        make = lambda: Reader(wire.follow(name, after), seen, is_timed=is_timed)  # noqa: E731
        _, reader = await asyncio.get_running_loop().create_connection(make, "127.0.0.1", self.port)
        return reader


def _schedule(server: int, policy: int, priority: int) -> None:
    for process in (server, os.getpid()):
        for thread in Path(f"/proc/{process}/task").iterdir():
            with contextlib.suppress(OSError):  # not permitted here: the figures are noisier
                os.sched_setscheduler(int(thread.name), policy, os.sched_param(priority))
