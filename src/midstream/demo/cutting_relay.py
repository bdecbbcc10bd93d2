"""A relay on loopback between client and server that can reset connections, like a router that dies."""

from __future__ import annotations

import asyncio
import socket
import struct
from types import TracebackType
from typing import Self

from midstream.environment import World
from midstream.errors import UnavailableError

PIECE_BYTES = 64 * 1024


class Cutter:
    """Relays TCP connections to a port of this machine until `cut` is called.

    Args:
        port: The server's address; the server need not listen yet.
        world: The clock of `accepted_at`.
    """

    def __init__(self, port: int, world: World) -> None:
        self.accepted_at: list[float] = []
        """Times of the connections that reached the server (monotonic seconds)."""
        self._port = port
        self._world = world
        self._open: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()
        self.cut()

    @property
    def url(self) -> str:
        """The address for clients.

        Raises:
            UnavailableError: The relay is not listening.
        """
        if self._server is None or not self._server.sockets:
            raise UnavailableError("the relay is not listening")
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> int:
        """Reset every open connection in both directions; return their number."""
        cut, self._open = self._open, set()
        for writer in cut:
            connection = writer.get_extra_info("socket")
            # With a linger of 0, the kernel sends a reset and drops unsent data.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        return len(cut) // 2

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.transport.abort()  # no server: the client gets a reset and tries again
            return
        self.accepted_at.append(self._world.monotonic())
        both = {writer, far_writer}
        self._open |= both
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_pump(reader, far_writer))
                group.create_task(_pump(far_reader, writer))
        finally:
            self._open -= both
            for each in both:
                each.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while piece := await reader.read(PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
        writer.write_eof()
    except OSError:
        writer.transport.abort()
