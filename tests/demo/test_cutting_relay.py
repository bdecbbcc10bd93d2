"""The relay carries bytes in both directions until it cuts; a cut is a reset, not an orderly close."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest

from midstream.demo.cutting_relay import Cutter
from midstream.environment import World
from midstream.errors import UnavailableError

WAIT_S = 60.0


@pytest.fixture
async def echo_port() -> AsyncIterator[int]:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while piece := await reader.read(100):
                writer.write(piece)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


async def connect(cutter: Cutter) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    address = urlsplit(cutter.url)
    return await asyncio.open_connection(address.hostname, address.port)


async def test_bytes_pass_both_ways_and_an_end_passes_too(echo_port: int) -> None:
    async with asyncio.timeout(WAIT_S), Cutter(echo_port, World()) as cutter:
        reader, writer = await connect(cutter)
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
        assert len(cutter.accepted_at) == 1


async def test_a_cut_resets_every_connection_and_the_next_one_works(echo_port: int) -> None:
    async with asyncio.timeout(WAIT_S), Cutter(echo_port, World()) as cutter:
        reader, writer = await connect(cutter)
        writer.write(b"hello")
        await reader.readexactly(5)
        assert cutter.cut() == 1
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()
        assert cutter.cut() == 0
        reader, writer = await connect(cutter)
        writer.write(b"again")
        assert await reader.readexactly(5) == b"again"
        writer.close()


async def test_without_a_server_the_client_is_refused_at_once() -> None:
    closed = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = closed.sockets[0].getsockname()[1]
    closed.close()
    await closed.wait_closed()
    async with asyncio.timeout(WAIT_S), Cutter(port, World()) as cutter:
        reader, writer = await connect(cutter)
        assert await reader.read() == b""
        writer.close()
    with pytest.raises(UnavailableError):
        _ = cutter.url
