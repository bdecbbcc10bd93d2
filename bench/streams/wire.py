"""Clients with a low cost: requests are made in advance, and received bytes are searched, not parsed."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import cast

ANSWER_S = 30.0
BURST = 100
"""Connections that are opened concurrently."""
_FINAL = _MASKED = 0x80
_TEXT, _PING, _PONG = 1, 9, 10
_LONG, _LONGER = 126, 127
"""Length codes after which two, or eight, bytes of length follow."""


class RefusedError(Exception):
    """A command was not acknowledged."""


class _Connection(asyncio.Protocol):
    """A connection without Nagle's algorithm."""

    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        raw: socket.socket = transport.get_extra_info("socket")
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        """Abort the connection."""
        self.transport.abort()


class HttpConnection(_Connection):
    """A persistent connection of HTTP/1.1 with one request at a time."""

    def __init__(self) -> None:
        self.is_lost = False
        self._received = b""
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, mark, body = self._received.partition(b"\r\n\r\n")
        if not mark:
            return
        head = head.lower()
        length = head.partition(b"content-length:")[2].partition(b"\r\n")[0]
        is_chunked = b"transfer-encoding: chunked" in head
        if len(body) < int(length or 0) or (is_chunked and not body.endswith(b"0\r\n\r\n")):
            return
        self._received = b""
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_result((int(head[9:12]), body))

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(exc or ConnectionError("the server closed the connection"))

    def send(self, request: bytes) -> asyncio.Future[tuple[int, bytes]]:
        """Send a request; the future has the status and the body of the response."""
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self._answer


class HttpClient:
    """Sends requests over one connection. If the server has closed the connection, the client opens another one."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connection: HttpConnection | None = None

    async def send(self, request: bytes) -> tuple[int, bytes]:
        """Send a request; return the status and the body of the response.

        Raises:
            RefusedError: There was no response.
        """
        if self._connection is None or self._connection.is_lost:
            self._connection = cast("HttpConnection", await connect(self._port, HttpConnection))
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._connection.send(request)
        except OSError as error:
            self.close()
            raise RefusedError("the server sent no response") from error

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class CountingConnection(_Connection):
    """Counts occurrences of byte strings, and resolves futures that wait for them. A match may span two reads.

    Args:
        opening: The first bytes to send.
        words: The byte strings to count; none contains another.
    """

    def __init__(self, opening: bytes, *words: bytes) -> None:
        self.counts = dict.fromkeys(words, 0)
        self.is_lost = False
        self._first = opening
        self._rest = b""
        self._longest = max(map(len, words), default=1)
        self._waiting: list[tuple[bytes, int, asyncio.Future[None]]] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport.write(self._first)

    def data_received(self, data: bytes) -> None:
        received = self._rest + data
        for word in self.counts:
            # The rest is shorter than the longest word, but may have a whole shorter one, which was counted before.
            self.counts[word] += received.count(word) - self._rest.count(word)
        self._rest = received[-self._longest + 1 :] if self._longest > 1 else b""
        if self._waiting:
            self._notify()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        for _, _, waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(exc or RefusedError("the server closed the connection"))

    def until(self, word: bytes, count: int) -> asyncio.Future[None]:
        """Return a future that resolves when `word` was received `count` times in total."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((word, count, waiter))
        self._notify()
        return waiter

    def _notify(self) -> None:
        waiting, self._waiting = self._waiting, []
        for word, count, waiter in waiting:
            if self.counts[word] < count:
                self._waiting.append((word, count, waiter))
            elif not waiter.done():
                waiter.set_result(None)


class Socket(CountingConnection):
    """A WebSocket that sends `opening` after the handshake, and answers pings."""

    def __init__(self, target: str, opening: bytes, *words: bytes) -> None:
        super().__init__(upgrade(target), *words)
        self._opening = message(opening)
        self._is_open = False
        self._frames = b""

    def data_received(self, data: bytes) -> None:
        frames = self._frames + data
        if not self._is_open:
            _, end, frames = frames.partition(b"\r\n\r\n")
            self._is_open = bool(end)
            self.transport.write(self._opening)
        start = 0
        while len(frames) >= start + 10 or (len(frames) >= start + 2 and frames[start + 1] < _LONG):
            size, head = frames[start + 1], 2
            if size >= _LONG:
                head = 10 if size == _LONGER else 4
                size = int.from_bytes(frames[start + 2 : start + head])
            if len(frames) < start + head + size:
                break
            body = frames[start + head : start + head + size]
            if frames[start] & 0xF == _PING:
                self.transport.write(bytes([_FINAL | _PONG, _MASKED | size]) + b"\0\0\0\0" + body)
            else:
                super().data_received(body)
            start += head + size
        self._frames = frames[start:]


def request(method: str, target: str, body: bytes = b"", **headers: str) -> bytes:
    """Return an HTTP request."""
    lines = [f"{method} {target} HTTP/1.1", "host: 127.0.0.1", "content-type: application/json"]
    lines += [f"{name.replace('_', '-')}: {text}" for name, text in headers.items()]
    lines.append(f"content-length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def upgrade(target: str) -> bytes:
    """Return the handshake request of a WebSocket."""
    return (
        f"GET {target} HTTP/1.1\r\nhost: 127.0.0.1\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
        "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n"
    ).encode()


def message(text: bytes) -> bytes:
    """Return a text message of a WebSocket client. The mask 0 leaves the text unchanged."""
    size = len(text)
    length = bytes([_MASKED | size]) if size < _LONG else bytes([_MASKED | _LONG]) + size.to_bytes(2)
    return bytes([_FINAL | _TEXT]) + length + b"\0\0\0\0" + text


async def connect(port: int, make: Callable[[], asyncio.Protocol]) -> asyncio.Protocol:
    """Open one connection."""
    _, connection = await asyncio.get_running_loop().create_connection(make, "127.0.0.1", port)
    return connection
