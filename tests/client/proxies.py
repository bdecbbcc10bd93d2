"""Proxies as in offices and hotels: they refuse upgrades, buffer answers or cut them short."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from enum import Enum

LINE_END = b"\r\n"


class Upgrades(Enum):
    """The handling of a WebSocket's handshake."""

    PASSED = "both ways, byte for byte"
    REFUSED = "answered with 403"
    SILENT = "passed on, and nothing comes back after the handshake"
    SWALLOWED = "never answered"
    DROPPED = "the connection is closed without an answer"


class OfficeProxy:
    """An HTTP proxy in front of one server.


    Args:
        target: The server's address.     is_buffering: An answer is passed on when it is whole.
            body_bytes_max: An answer ends, cleanly, after this number of bytes of its body.
    """

    def __init__(
        self,
        target: str,
        *,
        upgrades: Upgrades = Upgrades.PASSED,
        is_buffering: bool = False,
        body_bytes_max: int | None = None,
    ) -> None:
        self.lead_to(target)
        self._is_buffering = is_buffering
        self._body_bytes_max = body_bytes_max
        self._open: set[asyncio.StreamWriter] = set()
        self.upgrades = upgrades
        self.before_upgrade: Callable[[], Awaitable[None]] | None = None
        """An action before the next handshake is passed on, once."""
        self.is_away = False
        """The server behind it is unreachable: each connection is closed without an answer."""
        self.url = ""
        self.asked: list[str] = []
        """Method and path of each request, and `upgrade` for a handshake."""

    def lead_to(self, target: str) -> None:
        """Pass on to this server from now on."""
        host, _, port = target.rpartition("/")[2].partition(":")
        self._target = (host, int(port))

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[OfficeProxy]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        async with server:
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            yield self
            self.cut()

    def cut(self) -> None:
        """Reset every connection, as a failing network does."""
        for writer in self._open:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        there: asyncio.StreamWriter | None = None
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                head = await reader.readuntil(LINE_END * 2)
                is_upgrade = b"upgrade: websocket" in head.lower()
                request = head.split(b" HTTP")[0].partition(b"?")[0].decode()
                if "/v1/challenge" not in request:  # of any client, if this user has a server's key
                    self.asked.append("upgrade" if is_upgrade else request)
                if self.is_away:
                    return
                back, there = await asyncio.open_connection(*self._target)
                self._open.add(there)
                if is_upgrade:
                    await self._tunnel(head, reader, writer, back, there)
                else:
                    await self._pass_on(head, reader, writer, back, there)
        finally:
            for each in filter(None, (writer, there)):
                self._open.discard(each)
                each.close()

    async def _tunnel(
        self,
        head: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        back: asyncio.StreamReader,
        there: asyncio.StreamWriter,
    ) -> None:
        if self.upgrades is Upgrades.DROPPED:
            return
        if self.upgrades is Upgrades.REFUSED:
            writer.write(b"HTTP/1.1 403 Forbidden\r\nconnection: close\r\ncontent-length: 2\r\n\r\nno")
            await writer.drain()
            return
        before, self.before_upgrade = self.before_upgrade, None
        if before is not None:
            await before()
        if self.upgrades is Upgrades.SWALLOWED:
            await reader.read()
            return
        there.write(head)
        writer.write(await back.readuntil(LINE_END * 2))
        async with asyncio.TaskGroup() as group:
            up = group.create_task(_carry(reader, there))
            if self.upgrades is Upgrades.PASSED:
                await _carry(back, writer)
                up.cancel()

    async def _pass_on(
        self,
        head: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        back: asyncio.StreamReader,
        there: asyncio.StreamWriter,
    ) -> None:
        # HTTP/1.0, so that the answer is neither chunked nor followed by another one.
        there.write(head.replace(b" HTTP/1.1\r\n", b" HTTP/1.0\r\n", 1).replace(b"keep-alive", b"close"))
        there.write(await reader.readexactly(_length_of(head)))
        async with asyncio.TaskGroup() as group:
            gone = group.create_task(_until_gone(reader, there))
            answered = await back.readuntil(LINE_END * 2)
            body = b"" if self._is_buffering else None
            left = self._body_bytes_max
            if body is None:
                writer.write(answered)
            while piece := await back.read(65536):
                if left is not None:
                    piece = piece[:left]
                    left -= len(piece)
                if body is None:
                    writer.write(piece)
                    await writer.drain()
                else:
                    body += piece
                if left == 0:
                    break
            if body is not None:
                writer.write(answered + body)
            with contextlib.suppress(OSError):
                await writer.drain()
            gone.cancel()


async def _until_gone(reader: asyncio.StreamReader, there: asyncio.StreamWriter) -> None:
    await reader.read()
    there.close()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await reader.read(65536):
            writer.write(piece)
            await writer.drain()


def _length_of(head: bytes) -> int:
    for line in head.lower().split(LINE_END):
        name, _, value = line.partition(b":")
        if name == b"content-length":
            return int(value)
    return 0
