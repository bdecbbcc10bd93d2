"""A relay between a store and its server, which loses data as a network does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Relay:
    """A relay of bytes that can lose some."""

    def __init__(self) -> None:
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.swallowed = 0
        """Connections whose response was lost."""
        self.swallow_after = b""
        """The response to a statement that contains this text is lost, with its connection, once."""
        self.is_up = True
        """Whether new connections are accepted."""
        self.passes = asyncio.Event()
        """Not set: bytes are held back, in both directions, and neither end is informed."""
        self.passes.set()
        self.url = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Relay]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = self._url_at(server.sockets[0].getsockname()[1])
        try:
            yield self
        finally:
            server.close()
            self.cut()
            if self._tasks:
                await asyncio.wait(self._tasks)

    def cut(self) -> None:
        """End all connections, as the end of a server does."""
        for each in [*self._writers]:
            each.transport.abort()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the server."""
        raise NotImplementedError

    def _url_at(self, port: int) -> str:
        """Return the address of the store behind this port."""
        raise NotImplementedError

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if not self.is_up:
            writer.transport.abort()
            return
        up_reader, up_writer = await self._connect()
        self._writers |= {writer, up_writer}
        lost = asyncio.Event()

        async def upward() -> None:
            while data := await reader.read(65536):
                await self.passes.wait()
                if self.swallow_after and self.swallow_after in data:
                    self.swallow_after = b""
                    lost.set()
                up_writer.write(data)
            up_writer.close()

        async def downward() -> None:
            while data := await up_reader.read(65536):
                await self.passes.wait()
                if lost.is_set():  # The server has executed it, and its response is lost.
                    self.swallowed += 1
                    break
                writer.write(data)
            writer.transport.abort()
            up_writer.transport.abort()

        with contextlib.suppress(OSError):
            await asyncio.gather(upward(), downward(), return_exceptions=True)
        self._writers -= {writer, up_writer}
