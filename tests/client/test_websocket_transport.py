"""Frames as messages of a WebSocket, and every way in which one ends."""

from __future__ import annotations

import asyncio
import socket

import pytest

from midstream.client.transports import SERVER_FRAME_BYTES_MAX, session_path, websocket_url
from midstream.client.websocket_transport import connect_websocket
from midstream.errors import ConnectionLostError, FrameTooLargeError, MidstreamError
from midstream.protocol.frames import Ack, encode
from midstream.server.uvicorn_server import WS_FRAME_BYTES_MAX
from tests.client.peer import WebSocketPeer, after_frames, after_half_a_frame, busy_proxy
from tests.server.serving import make_app, served
from tests.spec import spec

HUGE = b'"' + b"x" * SERVER_FRAME_BYTES_MAX + b'"'


def _at(server: str) -> str:
    return websocket_url(f"{server}{session_path('s')}/stream")


async def test_frames_pass_both_ways_and_a_lost_connection_is_raised() -> None:
    async with WebSocketPeer(after_frames(Ack(1), Ack(2))).serving() as peer:
        transport = await connect_websocket(_at(peer.url), headers={"authorization": "Bearer x"})
        await transport.send([b"{}"])
        assert [await transport.receive(), await transport.receive()] == [encode(Ack(1)), encode(Ack(2))]
        with pytest.raises(ConnectionLostError):
            await transport.receive()
        await transport.send([b"{}"])
        await transport.close()
    headers = peer.requests[0].headers
    assert (headers["authorization"], headers.get("sec-websocket-extensions")) == ("Bearer x", None)


async def test_a_frame_above_the_limit_ends_the_connection() -> None:
    async with WebSocketPeer(after_frames(HUGE)).serving() as peer:
        transport = await connect_websocket(_at(peer.url), headers={})
        await transport.send([b"{}"])
        with pytest.raises(FrameTooLargeError, match="the server sent a frame of more than 16777216 bytes"):
            await transport.receive()
        await transport.close()


@spec("STREAM-111")
async def test_a_message_that_is_too_large_for_the_server_is_not_repeated() -> None:
    async with served(make_app([])) as server:
        transport = await connect_websocket(_at(server.url), headers={})
        await transport.send([b" " * (WS_FRAME_BYTES_MAX + 1)])
        with pytest.raises(FrameTooLargeError) as caught:
            await transport.receive()
        assert caught.value.retry == "never"
        await transport.close()


async def test_cancelling_a_receive_loses_no_frame() -> None:
    async with WebSocketPeer(after_frames(Ack(1))).serving() as peer:
        transport = await connect_websocket(_at(peer.url), headers={})
        waiting = asyncio.ensure_future(transport.receive())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait((waiting,))
        await transport.send([b"{}"])
        assert await transport.receive() == encode(Ack(1))
        await transport.close()


@pytest.mark.parametrize("status", [403, 404, 503])
async def test_a_refused_handshake_has_the_reason(status: int) -> None:
    async with WebSocketPeer(status).serving() as peer:
        with pytest.raises(MidstreamError, match=str(status)):
            await connect_websocket(_at(peer.url), headers={})


@spec("STREAM-29")
async def test_a_proxys_retry_after_is_received() -> None:
    async with busy_proxy("7") as url:
        with pytest.raises(ConnectionLostError) as caught:
            await connect_websocket(_at(url), headers={})
    assert caught.value.retry_after_s == 7.0


async def test_an_unreachable_server_is_a_lost_connection() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with pytest.raises(ConnectionLostError):
            await connect_websocket(f"ws://127.0.0.1:{port}/", headers={})


async def test_a_server_with_another_protocol_is_a_lost_connection() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail ready\r\n")
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ConnectionLostError):
            await connect_websocket(f"ws://127.0.0.1:{port}/", headers={})


@spec("STREAM-46")
async def test_bytes_are_counted_before_their_frame_is_whole() -> None:
    async with WebSocketPeer(after_half_a_frame(Ack(1))).serving() as peer:
        transport = await connect_websocket(_at(peer.url), headers={})
        before = transport.received_bytes
        await transport.send([b"{}"])
        assert await transport.receive() == encode(Ack(1))
        with pytest.raises(ConnectionLostError):
            await transport.receive()
        assert transport.received_bytes > before + len(encode(Ack(1))) + len(b'{"type":"events"')
        await transport.close()
