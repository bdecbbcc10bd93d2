"""A server that only sends the frames of a script: one address, each transport of the stream protocol.

It uses only sockets, so that the test of a client does not depend on midstream's own server. It does not acknowledge
commands, end answers or check frames itself.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import re
import struct
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

import msgspec

from midstream.environment import World

Json = dict[str, Any]

BODY_BYTES_MAX = 2 * 2**20
"""Bytes of one request or message of a client; a frame has at most half of that."""
HEAD_END = b"\r\n\r\n"
_PATH = re.compile(r"/v1/sessions/([^/?]+)/(stream|events|poll|commands)(?:\?n=([0-9]+).*)?")
_ACCEPTS = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_TEXT, _CLOSE, _PING, _PONG = 1, 8, 9, 10


class ScriptedConnection(Protocol):
    """One connection of a client, for a script."""

    received: list[Json]
    """The received frames, the `open` first."""

    @property
    def is_over(self) -> bool:
        """Whether the client has ended it."""

    async def send(self, frame: Json) -> None:
        """Send a frame."""

    async def send_text(self, text: str) -> None:
        """Send text that may be no frame."""

    def cut(self) -> None:
        """Break the connection, as a network does."""


class ScriptedServer:
    """Listens on this machine; use it as `async with server.listening()`.

    `url` is its address. A connection waits in `new_connections` of its session.

    Args:
        files: Other resources by path: the page and the modules of a client in a browser.
    """

    def __init__(self, files: Mapping[str, bytes] | None = None, *, world: World = World()) -> None:
        self.url = ""
        self._world = world
        self._files = dict(files or {})
        self._arrived: dict[str, asyncio.Queue[ScriptedConnection]] = {}
        self._named: dict[str, _HttpConnection] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._bell = asyncio.Event()

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[ScriptedServer]:
        """Listen on a free port until the end of the block; then all connections are closed."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=BODY_BYTES_MAX)
        async with server:
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            yield self
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def new_connections(self, session: str) -> asyncio.Queue[ScriptedConnection]:
        """Return the queue of a session's new connections."""
        return self._arrived.setdefault(session, asyncio.Queue())

    async def wait_for_frame(self) -> None:
        """Wait until a frame arrives, or a client leaves."""
        self._bell.clear()
        await self._bell.wait()

    def ring(self) -> None:
        """Wake the waiters of `wait_for_frame`."""
        self._bell.set()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._world.spawn(self._serve(reader, writer), name="midstream scripted server")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                head = await reader.readuntil(HEAD_END)
                target = head.split(b" ", 2)[1].decode("latin-1")
                path = _PATH.fullmatch(target)
                body = await reader.readexactly(int(_header(head, b"content-length") or 0))
                if target in self._files:
                    await _answer(writer, 200, self._files[target], kind=_kind_of(target))
                elif path is None:
                    await _answer(writer, 404, b"")
                elif path[2] == "stream":
                    await self._serve_socket(path[1], head, reader, writer)
                else:
                    await self._serve_request(path, head, body, reader, writer)
        finally:
            writer.transport.abort()
            self.ring()

    async def _serve_socket(
        self, session: str, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        digest = hashlib.sha1(_header(head, b"sec-websocket-key") + _ACCEPTS, usedforsecurity=False).digest()
        writer.write(
            b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
            b"sec-websocket-accept: " + base64.b64encode(digest) + HEAD_END
        )
        connection = _Socket(reader, writer)
        self.new_connections(session).put_nowait(connection)
        try:
            async for message in connection.messages():
                connection.received.append(msgspec.json.decode(message))
                self.ring()
        finally:
            connection.is_over = True

    async def _serve_request(
        self,
        path: re.Match[str],
        head: bytes,
        body: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        name = _header(head, b"x-midstream-connection").decode("latin-1")
        frame: Json = msgspec.json.decode(body)
        kind, is_first = path[2], path[3] in (None, "0")
        if kind == "commands":
            if (connection := self._named.get(name)) is not None and not connection.is_cut:
                connection.received.append(frame)
                self.ring()
                await _answer(writer, 204, b"")
            return
        if is_first:
            connection = self._named[name] = _Events(self._world) if kind == "events" else _Poll(self._world)
            connection.received.append(frame)
            self.new_connections(path[1]).put_nowait(connection)
            self.ring()
        else:
            connection = self._named[name]
        await connection.serve(reader, writer)


class _Socket:
    """A WebSocket with the abilities that text frames need."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.received: list[Json] = []
        self.is_over = False
        self._reader = reader
        self._writer = writer

    async def messages(self) -> AsyncIterator[bytes]:
        message = b""
        while True:
            first, second = await self._reader.readexactly(2)
            size = second & 0x7F
            if size == 126:  # noqa: PLR2004 - RFC 6455, 5.2: two bytes follow
                (size,) = struct.unpack(">H", await self._reader.readexactly(2))
            elif size == 127:  # noqa: PLR2004 - eight
                (size,) = struct.unpack(">Q", await self._reader.readexactly(8))
            mask = await self._reader.readexactly(4)
            masked = await self._reader.readexactly(min(size, BODY_BYTES_MAX))
            piece = bytes(each ^ mask[at % 4] for at, each in enumerate(masked))
            match first & 0x0F:
                case kind if kind == _CLOSE:
                    self._write(_CLOSE, piece)
                    return
                case kind if kind == _PING:
                    self._write(_PONG, piece)
                case kind if kind == _PONG:
                    pass
                case _:
                    message += piece
                    if first & 0x80:
                        yield message
                        message = b""

    async def send(self, frame: Json) -> None:
        await self.send_text(msgspec.json.encode(frame).decode())

    async def send_text(self, text: str) -> None:
        self._write(_TEXT, text.encode())
        with contextlib.suppress(OSError):
            await self._writer.drain()

    def cut(self) -> None:
        self.is_over = True
        self._writer.transport.abort()

    def _write(self, kind: int, body: bytes) -> None:
        size = len(body)
        head = bytes((size,)) if size < 126 else b"\x7e" + struct.pack(">H", size)  # noqa: PLR2004 - see above
        if not self._writer.is_closing():
            self._writer.write(bytes((0x80 | kind,)) + head + body)


class _HttpConnection:
    """Frames for a client over plain HTTP, queued until they can be sent."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.received: list[Json] = []
        self.is_over = self.is_cut = False
        self._outgoing: asyncio.Queue[str] = asyncio.Queue()
        self._writer: asyncio.StreamWriter | None = None

    async def send(self, frame: Json) -> None:
        await self._outgoing.put(msgspec.json.encode(frame).decode())

    async def send_text(self, text: str) -> None:
        await self._outgoing.put(text)

    def cut(self) -> None:
        self.is_over = self.is_cut = True
        if self._writer is not None:
            self._writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one request of this connection."""
        self._writer = writer
        if self.is_cut:
            return
        going = self._world.spawn(reader.read(1), name="midstream scripted end")
        carrying = self._world.spawn(self._carry(writer), name="midstream scripted answer")
        try:
            await asyncio.wait((going, carrying), return_when=asyncio.FIRST_COMPLETED)
            self.is_over = self.is_over or not carrying.done()
        finally:
            going.cancel()
            carrying.cancel()

    async def _carry(self, writer: asyncio.StreamWriter) -> None:
        raise NotImplementedError


class _Events(_HttpConnection):
    """Server-sent events."""

    async def _carry(self, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-store\r\n"
            b"connection: close\r\n\r\nretry: 1000\n\n"
        )
        while True:
            writer.write(_events_of(await self._outgoing.get()))
            await writer.drain()


class _Poll(_HttpConnection):
    """Complete answers."""

    async def _carry(self, writer: asyncio.StreamWriter) -> None:
        frames = [await self._outgoing.get()]
        while not self._outgoing.empty():
            frames.append(self._outgoing.get_nowait())
        await _answer(writer, 200, b'{"frames":[%b],"more":true}' % ",".join(frames).encode())


def _events_of(text: str) -> bytes:
    """Encode a frame as events, one for each record; other text as an invalid event."""
    try:
        frame = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return f"data: {text}\n\n".encode()
    if frame["type"] != "events":
        return f"event: {frame['type']}\ndata: {text}\n\n".encode()
    return b"".join(
        b"id: %b\nevent: record\ndata: %b\n\n" % (each["id"].encode(), msgspec.json.encode(each["record"]))
        for each in frame["events"]
    )


def _kind_of(path: str) -> bytes:
    return b"text/javascript" if path.endswith(".js") else b"text/html"


async def _answer(
    writer: asyncio.StreamWriter, status: int, body: bytes, *, kind: bytes = b"application/json"
) -> None:
    head = b"HTTP/1.1 %d .\r\ncontent-type: %b\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
    writer.write(head % (status, kind, len(body)) + body)
    await writer.drain()
    writer.close()
    await writer.wait_closed()


def _header(head: bytes, name: bytes) -> bytes:
    """Return a header's value, or b"" if it is missing."""
    found = re.search(rb"(?i)\r\n" + name + rb": *([^\r]*)", head)
    return found[1] if found else b""
