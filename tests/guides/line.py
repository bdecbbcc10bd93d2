"""A connection to a server that can be cut: all current connections are reset, and later ones pass again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

READ_BYTES_MAX = 65536


class CuttableConnection:
    """A relay in front of one port, whose server may be dead."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writers: set[asyncio.StreamWriter] = set()

    def cut(self) -> None:
        """Reset every connection."""
        for writer in [*self._writers]:
            writer.transport.abort()

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relay one connection to its end."""
        self._writers.add(writer)
        try:
            there = await asyncio.open_connection("127.0.0.1", self._port)
            self._writers.add(there[1])
            ways = (_carry(reader, there[1]), _carry(there[0], writer))
            await asyncio.wait(map(asyncio.ensure_future, ways), return_when=asyncio.FIRST_COMPLETED)
            there[1].transport.abort()
            self._writers.discard(there[1])
        except OSError:  # Nothing listens: the server was killed.
            pass
        finally:
            writer.transport.abort()
            self._writers.discard(writer)


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await reader.read(READ_BYTES_MAX):
            writer.write(piece)
            await writer.drain()


@contextlib.asynccontextmanager
async def line_to(port: int) -> AsyncIterator[tuple[CuttableConnection, str]]:
    """Relay to a port of this machine; yield the line, and its address."""
    line = CuttableConnection(port)
    server = await asyncio.start_server(line.relay, "127.0.0.1", 0)
    try:
        yield line, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        line.cut()
