"""A WebSocket peer for behaviour that a correct server does not have, and a wire that can be cut.

The peer's correct part is `ServerStream` over a journal in memory; a connection may be given to a script
instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from http import HTTPStatus

import websockets
from msgspec import Struct
from websockets.asyncio.server import ServerConnection
from websockets.http11 import Request, Response

from midstream.protocol import frames
from midstream.protocol.frames import ServerFrame
from midstream.protocol.server_stream import ServerStream
from tests.protocol.stream_link import MemoryHost

WAIT_S = 60.0

HALF = b'{"type":"events"'


class PeerScript(Struct, frozen=True):
    """The frames that a peer sends after an open before it breaks the connection, and perhaps half of one more."""

    frames: tuple[bytes, ...]
    is_broken: bool = False


class WebSocketPeer:
    """Serve one session; connection number n is given to the n-th script, later ones are served correctly."""

    def __init__(
        self, *scripts: PeerScript | int, heartbeat_s: float = 10.0, degraded_reason: str = ""
    ) -> None:
        self.host = MemoryHost()
        self.url = ""
        self.requests: list[Request] = []
        self._scripts = [*scripts]
        self._heartbeat_s = heartbeat_s
        self._degraded_reason = degraded_reason
        self._open: dict[ServerConnection, ServerStream] = {}

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[WebSocketPeer]:
        async with websockets.serve(
            self._serve, "127.0.0.1", 0, compression=None, process_request=self._refuse, close_timeout=0.1
        ) as server:
            port = server.sockets[0].getsockname()[1]
            self.url = f"http://127.0.0.1:{port}"
            yield self
            for connection in [*self._open]:
                connection.transport.abort()

    async def feed(self) -> None:
        """Send the new records of the journal."""
        for connection, stream in [*self._open.items()]:
            self.host.serve(stream, now=time.monotonic())
            for frame in stream.frames_to_send():
                await connection.send(frame, text=True)

    def cut(self) -> None:
        for connection in self._open:
            connection.transport.abort()

    async def _refuse(self, connection: ServerConnection, request: Request) -> Response | None:
        self.requests.append(request)
        if self._scripts and isinstance(self._scripts[0], int):
            status = HTTPStatus(self._scripts.pop(0))  # type: ignore[arg-type] # it is the int
            return connection.respond(status, "no")
        return None

    async def _serve(self, connection: ServerConnection) -> None:
        with contextlib.suppress(websockets.ConnectionClosed):
            if self._scripts:
                script = self._scripts.pop(0)
                assert not isinstance(script, int)
                await _follow(script, connection)
                return
            await self._serve_honestly(connection)

    async def _serve_honestly(self, connection: ServerConnection) -> None:
        stream = ServerStream(
            heartbeat_s=self._heartbeat_s, degraded_reason=self._degraded_reason, now=time.monotonic()
        )
        self._open[connection] = stream
        try:
            while not stream.is_closed:
                stream.receive(await connection.recv(decode=False), now=time.monotonic())
                await self.feed()
        finally:
            del self._open[connection]


def after_frames(*sent: ServerFrame | bytes) -> PeerScript:
    """Answer the open with these frames, then break the connection."""
    return PeerScript(tuple(each if isinstance(each, bytes) else frames.encode(each) for each in sent))


def after_half_a_frame(*sent: ServerFrame) -> PeerScript:
    """Send these frames, then half of one more, and reset the connection."""
    return PeerScript(tuple(frames.encode(frame) for frame in sent), is_broken=True)


async def _follow(script: PeerScript, connection: ServerConnection) -> None:
    await connection.recv()
    for frame in script.frames:
        await connection.send(frame, text=True)
    if not script.is_broken:
        await connection.close()
        return
    connection.transport.write(b"\x81\x7e\x01\x00" + HALF)
    await asyncio.sleep(0)
    connection.transport.abort()


@contextlib.asynccontextmanager
async def busy_proxy(text: str) -> AsyncIterator[str]:
    """Serve 503 with a `Retry-After`, as a proxy does whose server is unreachable; yield its address."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            asked = (await reader.readuntil(b"\r\n\r\n")).lower()
            _, _, sent_length = asked.partition(b"content-length:")
            await reader.readexactly(int(sent_length.split()[0]) if sent_length else 0)
            head = f"HTTP/1.1 503 Away\r\nretry-after: {text}\r\ncontent-length: 4\r\nconnection: close\r\n\r\nsoon"
            writer.write(head.encode())
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


class Cutter:
    """A connection to a server that can be cut, by hand or after a number of the server's bytes."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition("/")[2].partition(":")
        self.target = (host, int(port))
        self.url = ""
        self.connections = 0
        self.cuts = 0
        """Connections that were reset because they had reached their limit."""
        self.cut_after: list[int] = []
        """Bytes that connection n may carry to the client before it is reset."""
        self._writers: set[asyncio.StreamWriter] = set()

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[Cutter]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        async with server:
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            yield self
            self.cut()

    def cut(self) -> None:
        """Reset all connections."""
        for writer in self._writers:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        allowed = self.cut_after[self.connections] if self.connections < len(self.cut_after) else None
        self.connections += 1
        try:
            there_reader, there_writer = await asyncio.open_connection(*self.target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, there_writer}
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_pump(reader, there_writer, None))
                self.cuts += await _pump(there_reader, writer, allowed)
                writer.transport.abort()
                there_writer.transport.abort()
        finally:
            self._writers -= {writer, there_writer}


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, allowed: int | None) -> bool:
    """Carry bytes until their end or the limit; return whether it was the limit."""
    with contextlib.suppress(OSError):
        while allowed is None or allowed > 0:
            piece = await reader.read(65536 if allowed is None else min(allowed, 65536))
            if not piece:
                return False
            writer.write(piece)
            await writer.drain()
            if allowed is not None:
                allowed -= len(piece)
        return True
    return False
