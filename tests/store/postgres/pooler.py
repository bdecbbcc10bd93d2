"""A pooler in transaction mode, like PgBouncer: a client has a backend only from a statement to its commit."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.postgres_engine import Engine

STARTUP = struct.pack("!i", 196608) + b"user\0postgres\0database\0postgres\0\0"


class _Backend:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer


class TransactionPooler:
    """A pooler that gives the most recently used backend to each sender, until the server reports that it is idle."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._idle: list[_Backend] = []
        self._all: list[_Backend] = []
        self._greeting = b""
        self._tasks: set[asyncio.Task[None]] = set()
        self.url = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[TransactionPooler]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        self.url = f"postgresql://postgres@127.0.0.1:{port}/postgres?sslmode=disable"
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)
            for backend in self._all:
                backend.writer.transport.abort()

    async def _take(self) -> _Backend:
        if self._idle:
            return self._idle.pop()
        reader, writer = await asyncio.open_unix_connection(f"{self._engine.folder}/.s.PGSQL.5432")
        writer.write(struct.pack("!i", len(STARTUP) + 4) + STARTUP)
        greeting = b""
        while True:
            kind, body = await _message(reader)
            if kind == b"K":  # Its own keys for cancelling: a client never sees those of a backend.
                body = bytes(8)
            greeting += kind + struct.pack("!i", len(body) + 4) + body
            if kind == b"Z":
                break
        self._greeting = greeting
        backend = _Backend(reader, writer)
        self._all.append(backend)
        return backend

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            (length,) = struct.unpack("!i", await reader.readexactly(4))
            await reader.readexactly(length - 4)
            self._idle.append(await self._take())
            writer.write(self._greeting)
            while True:
                kind, body = await _message(reader)
                backend = await self._take()
                while True:  # Until the server is idle: a transaction.
                    backend.writer.write(kind + struct.pack("!i", len(body) + 4) + body)
                    if kind in (b"S", b"Q") and await self._answer(backend, writer):
                        break
                    if kind == b"H":
                        await self._flush(backend, writer)
                    if kind == b"X":
                        return
                    kind, body = await _message(reader)
                self._idle.append(backend)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            writer.transport.abort()

    async def _answer(self, backend: _Backend, writer: asyncio.StreamWriter) -> bool:
        while True:
            kind, body = await _message(backend.reader)
            writer.write(kind + struct.pack("!i", len(body) + 4) + body)
            if kind == b"Z":
                return body == b"I"

    async def _flush(self, backend: _Backend, writer: asyncio.StreamWriter) -> None:
        while True:  # The description of a statement ends with its columns.
            kind, body = await _message(backend.reader)
            writer.write(kind + struct.pack("!i", len(body) + 4) + body)
            if kind in (b"T", b"n", b"E"):
                return


async def _message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readexactly(5)
    (length,) = struct.unpack("!i", head[1:])
    return head[:1], await reader.readexactly(length - 4)
