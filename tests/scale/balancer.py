"""A load balancer for servers of this machine: each request is sent to the next ready server.

It does the same as `deploy/nginx.conf` and `deploy/Caddyfile`: no sticky sessions, `/ready` decides which
server takes requests, a refused connection is retried at the next server, WebSockets and event streams pass
unbuffered.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Sequence

import httpx2

from midstream.environment import World

HEAD_END = b"\r\n\r\n"
READ_BYTES_MAX = 65536
TRIES_FOR_S = 5.0
"""Seconds for which a request waits for a server that takes it."""
HEALTH_EVERY_S = 0.5
HEALTH_WITHIN_S = 1.0
"""A server without a response in this time, such as a frozen one, is left out."""
_CONNECTION = re.compile(rb"(?i)\r\nconnection:[^\r\n]*")


class Balancer:
    """Round robin over the ports of servers, one request for each connection to them."""

    def __init__(self, ports: Sequence[int]) -> None:
        self._ports = [*ports]
        self._next = 0
        self._ready: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self.port = 0
        self.requests: Counter[int] = Counter()
        """Number of requests by the port that took them."""
        self.refused = 0
        """Number of requests that no server took in time."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[Balancer]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0, backlog=1024)
        health = [asyncio.create_task(self._follow_health(port)) for port in self._ports]
        async with server:
            self.port = server.sockets[0].getsockname()[1]
            try:
                yield self
            finally:
                server.close()
                for task in [*health, *self._tasks]:
                    task.cancel()
                await asyncio.gather(*health, *self._tasks, return_exceptions=True)

    def cut(self, chance: random.Random, share: float) -> int:
        """End this share of the open connections, by FIN or by RST; return how many."""
        chosen = [each for each in self._open if chance.random() < share]
        for pair in chosen:
            is_hard = chance.random() < 0.5
            for writer in pair:
                if is_hard:
                    with contextlib.suppress(OSError):
                        ends_hard = struct.pack("ii", 1, 0)
                        writer.get_extra_info("socket").setsockopt(
                            socket.SOL_SOCKET, socket.SO_LINGER, ends_hard
                        )
                    writer.transport.abort()
                else:
                    writer.close()
        return len(chosen)

    async def _follow_health(self, port: int) -> None:
        async with httpx2.AsyncClient(timeout=HEALTH_WITHIN_S, trust_env=False) as http:
            while True:
                try:
                    is_ready = (await http.get(f"http://127.0.0.1:{port}/ready")).status_code == 200
                except httpx2.HTTPError:
                    is_ready = False
                (self._ready.add if is_ready else self._ready.discard)(port)
                await World().sleep(HEALTH_EVERY_S)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            head = await reader.readuntil(HEAD_END)
            if b"\r\nupgrade:" not in head.lower():  # The next request of this client takes the next server.
                head = _CONNECTION.sub(b"", head).replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
            found = await self._connect()
            if found is None:
                self.refused += 1
                writer.write(
                    b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                )
                await writer.drain()
                writer.close()
                return
            await self._carry(head, (reader, writer), found)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # One of both ends is gone.
        finally:
            writer.transport.abort()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """Connect to the next server that is ready, or where none is, to any that takes connections."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TRIES_FOR_S):
                while True:
                    self._next += 1
                    turn = [
                        self._ports[(self._next + at) % len(self._ports)] for at in range(len(self._ports))
                    ]
                    for port in [each for each in turn if each in self._ready] or turn:
                        with contextlib.suppress(OSError):
                            found = await asyncio.open_connection("127.0.0.1", port)
                            self.requests[port] += 1
                            return found
                        self._ready.discard(port)
                    await World().sleep(0.05)
        return None

    async def _carry(
        self,
        head: bytes,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        server: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        pair = (client[1], server[1])
        self._open.add(pair)
        server[1].write(head)
        ways = [
            asyncio.create_task(_pass(client[0], server[1])),
            asyncio.create_task(_pass(server[0], client[1])),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._open.discard(pair)
            for each in ways:
                each.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            client[1].close()
            server[1].transport.abort()
            with contextlib.suppress(OSError):
                await client[1].wait_closed()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await reader.read(READ_BYTES_MAX):
            writer.write(piece)
            await writer.drain()
