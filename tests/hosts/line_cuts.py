"""A relay between a program and the gateway that ends connections after so many bytes, by a reset or a FIN."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from typing import Literal

from msgspec import Struct

PIECE_BYTES = 64 * 1024
Way = Literal["reset", "fin"]


class LineCut(Struct):
    """The end of one connection.

    Args:
        after: Bytes of an answer that pass.
        way: `reset`: as by a dead router; `fin`: cleanly, as by a restarted proxy.
        wanted: The connection whose request holds these bytes; others pass whole.
        is_done: It has happened.
    """

    after: int
    way: Way
    wanted: bytes
    is_done: bool = False


class ByteCountingRelay:
    """Relay connections of loopback; `port` is the server's, and may change during the run."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = ""
        self.cut: LineCut | None = None
        self._relaying: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Listen until the end of the block."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield
        finally:
            server.close()
            for task in self._relaying:
                task.cancel()
            await asyncio.gather(*self._relaying, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._relaying.add(task)
        task.add_done_callback(self._relaying.discard)
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            writer.transport.abort()
            return
        asked = bytearray()
        there = asyncio.create_task(_pump(reader, far_writer, asked))
        back = asyncio.create_task(self._answer(far_reader, writer, asked))
        try:
            await asyncio.wait({there, back}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in (there, back):
                each.cancel()
            await asyncio.gather(there, back, return_exceptions=True)
            far_writer.transport.abort()
            writer.close()

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: bytearray
    ) -> None:
        """Pass an answer on, up to the byte where it is cut."""
        passed = 0
        while piece := await reader.read(PIECE_BYTES):
            cut = self.cut
            if cut is not None and not cut.is_done and cut.wanted in asked:
                passed += len(piece)
                if passed > cut.after:
                    cut.is_done = True
                    writer.write(piece[: len(piece) - (passed - cut.after)])
                    await writer.drain()
                    if cut.way == "reset":
                        connection = writer.get_extra_info("socket")
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        writer.transport.abort()
                    return
            writer.write(piece)
            await writer.drain()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, copy: bytearray) -> None:
    while piece := await reader.read(PIECE_BYTES):
        copy += piece
        writer.write(piece)
        await writer.drain()
