"""A proxy that applies the plan to each connection: it cuts, delays, delivers late, delivers twice."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from typing import Literal

from midstream.environment import World
from tests.chaos.plan import UNHARMED, ChaosPlan, ConnectionCut, Fate, Harm

HEAD_END = b"\r\n\r\n"
READ_BYTES_MAX = 65536
HALF_OPEN_S = 3.0
"""Seconds after which an intermediary drops a half-open connection, long after both ends should have."""
LISTENS_S = 0.3
"""Seconds for which the answer to a repeated or late request is read."""
OVERTAKEN_S = 1.0
"""Seconds after which the bytes are delivered even if no connection has overtaken them."""
GATHERS_S = 0.05
"""Seconds for which a connection that will be overtaken reads from its client."""
_CONTENT_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
_OPENING = re.compile(rb"/(stream|events|poll(?=\?n=0 )|commands)[? ]")

Way = Literal["up", "down"]


class Requests:
    """The whole requests in a client's bytes."""

    def __init__(self) -> None:
        self._bytes = b""
        self.is_upgraded = False

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the requests that this piece completes."""
        whole: list[bytes] = []
        self._bytes += b"" if self.is_upgraded else piece
        while (at := self._bytes.find(HEAD_END)) >= 0:
            at += len(HEAD_END)
            head = self._bytes[:at]
            length = _CONTENT_LENGTH.search(head)
            end = at + (int(length[1]) if length else 0)
            if len(self._bytes) < end:
                break
            whole.append(self._bytes[:end])
            self._bytes = self._bytes[end:]
            if b"upgrade: websocket" in head.lower():
                self.is_upgraded = True
                self._bytes = b""
        return whole


class ChaosProxy:
    """In front of one server, which may be dead.


    Args:
        plan: The fate of each connection.     port: Where the server listens.
    """

    def __init__(self, plan: ChaosPlan, port: int) -> None:
        self._plan = plan
        self._port = port
        self._is_healed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self.accepted = 0
        self.harms: Counter[str] = Counter()
        """Connections by their planned harm."""
        self.cuts: Counter[str] = Counter()
        """Connections that were cut, by how."""
        self.requests: Counter[str] = Counter()
        """Whole requests: `stream` a WebSocket, `events`, `poll` the first of a connection, `commands` those that send.
        """
        self.repeated = 0
        """Requests that arrived once more."""
        self.overtaken = 0
        """Connections whose bytes arrived after later ones."""
        self.in_pieces = 0
        """Cuts in the middle of one write: a frame, or a head."""
        self.offsets: dict[Way, set[int]] = {"up": set(), "down": set()}
        """The offsets at which connections were cut."""

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[ChaosProxy]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0, backlog=1024)
        async with server:
            self.port = server.sockets[0].getsockname()[1]
            yield self
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def heal(self) -> None:
        """Leave all later connections unharmed."""
        self._is_healed = True

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fate = UNHARMED if self._is_healed else self._plan.fate(self.accepted)
        self.accepted += 1
        self.harms[fate.harm.value] += 1
        self._spawn(self._serve(fate, reader, writer))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, fate: Fate, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there: asyncio.StreamWriter | None = None
        try:
            back, there = await asyncio.open_connection("127.0.0.1", self._port)
            if fate.harm is Harm.OVERTAKEN:
                await self._late(fate, (reader, writer), (back, there))
            else:
                await self._carry(fate, (reader, writer), (back, there))
        except (OSError, asyncio.IncompleteReadError):
            pass  # the server is dead, or one side closed
        finally:
            for each in filter(None, (writer, there)):
                each.transport.abort()

    # --- bytes that pass, up to the cut ---------------------------------------------------------------------------

    async def _carry(self, fate: Fate, client: Ends, server: Ends) -> None:
        ways = (
            asyncio.create_task(self._pass("up", fate, client[0], server[1])),
            asyncio.create_task(self._pass("down", fate, server[0], client[1])),
        )
        try:
            done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            was_cut = any(each.result() for each in done)
        finally:
            for each in ways:
                each.cancel()
            await asyncio.wait(ways)
        if was_cut:
            self.cuts[fate.cut.value] += 1
            await _end(fate.cut, client[1], server[1])
        else:
            for writer in (client[1], server[1]):
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()

    async def _pass(
        self, way: Way, fate: Fate, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Pass bytes on; return whether the connection was cut (otherwise it ended)."""
        most = fate.up_max if way == "up" else fate.down_max
        requests = Requests()
        passed = 0
        while True:
            if most is not None and passed >= most:
                self.offsets[way].add(passed)
                return True
            try:
                piece = await reader.read(READ_BYTES_MAX)
                if piece and fate.harm is Harm.DELAYED:
                    await World().sleep(fate.pause_s)
                elif piece and fate.harm is Harm.BUFFERED and way == "down":
                    piece += await _read_for(reader, fate.pause_s)
                if not piece:
                    return False
                kept = piece if most is None else piece[: most - passed]
                self.in_pieces += len(kept) < len(piece)
                passed += len(kept)
                if way == "up":
                    self._note(requests.feed(kept), fate)
                writer.write(kept)
                await writer.drain()
            except OSError:
                return False

    def _note(self, requests: list[bytes], fate: Fate) -> None:
        for request in requests:
            if found := _OPENING.search(request.partition(b" HTTP/")[0] + b" "):
                self.requests[found[1].decode()] += 1
            if not request.startswith(b"POST "):
                continue
            for _ in range(fate.again):
                self.repeated += 1
                self._spawn(self._repeat_request(request))

    async def _repeat_request(self, request: bytes) -> None:
        with contextlib.suppress(OSError):
            back, there = await asyncio.open_connection("127.0.0.1", self._port)
            there.write(request)
            await _listen(back, there)

    # --- bytes that arrive late -------------------------------------------------------------------------------------

    async def _late(self, fate: Fate, client: Ends, server: Ends) -> None:
        """Close the connection of a client, and deliver its bytes after its next connections."""
        data = await client[0].readuntil(HEAD_END)
        requests = Requests()
        self._note(requests.feed(data), fate)
        if requests.is_upgraded:
            server[1].write(data)
            client[1].write(await server[0].readuntil(HEAD_END))
            data = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GATHERS_S):
                while piece := await client[0].read(READ_BYTES_MAX):
                    data += piece
                    self._note(requests.feed(piece), fate)
        _reset(client[1])
        number = self.accepted
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OVERTAKEN_S):
                while self.accepted < number + fate.overtaken_by:
                    await World().sleep(0.005)
        self.overtaken += 1
        server[1].write(data)
        await _listen(*server)


Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Read an answer for a moment, then close."""
    with contextlib.suppress(TimeoutError, OSError):
        async with asyncio.timeout(LISTENS_S):
            while await reader.read(READ_BYTES_MAX):
                pass
    writer.transport.abort()


async def _end(cut: ConnectionCut, *writers: asyncio.StreamWriter) -> None:
    match cut:
        case ConnectionCut.FIN:
            for writer in writers:
                writer.close()
            for writer in writers:
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
        case ConnectionCut.RESET:
            for writer in writers:
                _reset(writer)
        case ConnectionCut.HALF_OPEN:
            await World().sleep(HALF_OPEN_S)


def _reset(writer: asyncio.StreamWriter) -> None:
    ends_hard = struct.pack("ii", 1, 0)
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ends_hard)
    writer.transport.abort()


async def _read_for(reader: asyncio.StreamReader, for_s: float) -> bytes:
    """Return all bytes that arrive within this time, as a proxy does that waits for the whole answer."""
    pieces = b""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(for_s):
            while piece := await reader.read(READ_BYTES_MAX):
                pieces += piece
    return pieces
