"""Clients that cost next to nothing: what they send is made beforehand, and what comes is not read but searched."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import cast

ANSWER_S = 30.0
BURST = 100
"""Connections that are opened at once."""
_FINAL = _MASKED = 0x80
_TEXT, _PING, _PONG = 1, 9, 10
_LONG, _LONGER = 126, 127
"""Lengths that say that two, or eight, bytes of length follow."""


class RefusedError(Exception):
    """A command was not acknowledged."""


class _Line(asyncio.Protocol):
    """A connection with Nagle's algorithm off."""

    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        line: socket.socket = transport.get_extra_info("socket")
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        """Let go."""
        self.transport.abort()


class Post(_Line):
    """A kept connection of HTTP/1.1 with one request on its way at a time."""

    def __init__(self) -> None:
        self.is_lost = False
        self._came = b""
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None

    def data_received(self, data: bytes) -> None:
        self._came += data
        head, mark, body = self._came.partition(b"\r\n\r\n")
        if not mark:
            return
        head = head.lower()
        length = head.partition(b"content-length:")[2].partition(b"\r\n")[0]
        is_chunked = b"transfer-encoding: chunked" in head
        if len(body) < int(length or 0) or (is_chunked and not body.endswith(b"0\r\n\r\n")):
            return
        self._came = b""
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_result((int(head[9:12]), body))

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(exc or ConnectionError("the server hung up"))

    def ask(self, request: bytes) -> asyncio.Future[tuple[int, bytes]]:
        """Send a request; the future has the status and the body of its answer."""
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self._answer


class Kept:
    """Asks over one connection, which is made anew where the server has let go of it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._line: Post | None = None

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Send a request; return the status and the body of its answer.

        Raises:
            RefusedError: There was none.
        """
        if self._line is None or self._line.is_lost:
            self._line = cast("Post", await dial(self._port, Post))
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._line.ask(request)
        except OSError as error:
            self.close()
            raise RefusedError("no answer") from error

    def close(self) -> None:
        """Let go."""
        if self._line is not None:
            self._line.close()
            self._line = None


class Searched(_Line):
    """Counts how often some words have come, and wakes who waits for that; a word may come in two pieces.

    Args:
        hello: What is sent first.
        words: What is counted; none contains another.
    """

    def __init__(self, hello: bytes, *words: bytes) -> None:
        self.seen = dict.fromkeys(words, 0)
        self.is_lost = False
        self._hello = hello
        self._rest = b""
        self._longest = max(map(len, words), default=1)
        self._waiting: list[tuple[bytes, int, asyncio.Future[None]]] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport.write(self._hello)

    def data_received(self, data: bytes) -> None:
        came = self._rest + data
        for word in self.seen:
            # The rest is shorter than the longest word, and may hold a whole shorter one again.
            self.seen[word] += came.count(word) - self._rest.count(word)
        self._rest = came[-self._longest + 1 :] if self._longest > 1 else b""
        if self._waiting:
            self._tell()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        for _, _, told in self._waiting:
            if not told.done():
                told.set_exception(exc or RefusedError("the server hung up"))

    def until(self, word: bytes, count: int) -> asyncio.Future[None]:
        """Return a future that is done when `word` has come `count` times in all."""
        told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((word, count, told))
        self._tell()
        return told

    def _tell(self) -> None:
        waiting, self._waiting = self._waiting, []
        for word, count, told in waiting:
            if self.seen[word] < count:
                self._waiting.append((word, count, told))
            elif not told.done():
                told.set_result(None)


class Socket(Searched):
    """A WebSocket that says `opening` once it is one, and answers pings, so that it may stay."""

    def __init__(self, target: str, opening: bytes, *words: bytes) -> None:
        super().__init__(upgrade(target), *words)
        self._opening = message(opening)
        self._is_up = False
        self._frames = b""

    def data_received(self, data: bytes) -> None:
        frames = self._frames + data
        if not self._is_up:
            _, end, frames = frames.partition(b"\r\n\r\n")
            self._is_up = bool(end)
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
    """Return the handshake of a WebSocket."""
    return (
        f"GET {target} HTTP/1.1\r\nhost: 127.0.0.1\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
        "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n"
    ).encode()


def message(text: bytes) -> bytes:
    """Return a WebSocket's text message of a client, under the mask 0, which leaves it as it is."""
    size = len(text)
    length = bytes([_MASKED | size]) if size < _LONG else bytes([_MASKED | _LONG]) + size.to_bytes(2)
    return bytes([_FINAL | _TEXT]) + length + b"\0\0\0\0" + text


async def dial(port: int, make: Callable[[], asyncio.Protocol]) -> asyncio.Protocol:
    """Open one connection."""
    _, line = await asyncio.get_running_loop().create_connection(make, "127.0.0.1", port)
    return line
