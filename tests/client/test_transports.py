"""How a client reaches a server, and what each refusal means."""

from __future__ import annotations

import asyncio
import socket

import msgspec
import pytest

from midstream.client.transports import (
    SERVER_FRAME_BYTES_MAX,
    connect_websocket,
    is_loopback,
    refusal_of,
    stream_url,
)
from midstream.core.frames import Ack, encode
from midstream.errors import (
    AccessError,
    ConnectionLostError,
    DrainingError,
    MidstreamError,
    NotFoundError,
    ProtocolError,
    UsageError,
)
from tests.client.peer import Peer, says

HUGE = b'"' + b"x" * SERVER_FRAME_BYTES_MAX + b'"'


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        ("http://127.0.0.1:8000", "ws://127.0.0.1:8000/v1/sessions/a%2Fb%20c/stream"),
        ("https://host/agents/", "wss://host/agents/v1/sessions/a%2Fb%20c/stream"),
        ("ws://[::1]:1", "ws://[::1]:1/v1/sessions/a%2Fb%20c/stream"),
    ],
)
def test_a_stream_has_its_address_below_the_servers(server: str, expected: str) -> None:
    assert stream_url(server, "a/b c") == expected


@pytest.mark.parametrize("server", ["", "localhost:8000", "ftp://host", "http://"])
def test_what_is_no_address_is_refused(server: str) -> None:
    with pytest.raises(UsageError):
        stream_url(server, "a")


def test_only_this_machine_is_reached_around_proxies() -> None:
    names = ["localhost", "a.localhost", "127.9.9.9", "::1", "example.org", "10.0.0.1", ""]
    assert [is_loopback(name) for name in names] == [True, True, True, True, False, False, False]


def _problem(code: str, retry: str, after_s: float | None = None) -> bytes:
    return msgspec.json.encode(
        {"type": "about:blank", "code": code, "detail": "text", "retry": retry, "retry_after_s": after_s}
    )


@pytest.mark.parametrize(
    ("status", "body", "said_s", "kind", "after_s"),
    [
        (503, _problem("draining", "later", 2.5), 9.0, DrainingError, 2.5),
        (403, _problem("access", "never"), None, AccessError, None),
        (401, b"<html>", None, AccessError, None),
        (404, b"", None, NotFoundError, None),
        (429, b"slow down", 7.0, ConnectionLostError, 7.0),
        (502, b"", None, ConnectionLostError, None),
        (400, b"", None, ProtocolError, None),
    ],
)
def test_a_refusal_in_http_is_a_typed_error(
    status: int, body: bytes, said_s: float | None, kind: type[MidstreamError], after_s: float | None
) -> None:
    error = refusal_of(status, body, said_s)
    assert (type(error), error.retry_after_s) == (kind, after_s)


async def test_frames_go_both_ways_and_a_lost_connection_is_told() -> None:
    async with Peer(says(Ack(1), Ack(2))).serving() as peer:
        transport = await connect_websocket(stream_url(peer.url, "s"), headers={"authorization": "Bearer x"})
        await transport.send([b"{}"])
        assert [await transport.receive(), await transport.receive()] == [encode(Ack(1)), encode(Ack(2))]
        with pytest.raises(ConnectionLostError):
            await transport.receive()
        await transport.send([b"{}"])
        await transport.close()
    headers = peer.requests[0].headers
    assert (headers["authorization"], headers.get("sec-websocket-extensions")) == ("Bearer x", None)


async def test_a_frame_above_the_limit_ends_the_connection() -> None:
    async with Peer(says(HUGE)).serving() as peer:
        transport = await connect_websocket(stream_url(peer.url, "s"), headers={})
        await transport.send([b"{}"])
        with pytest.raises(ConnectionLostError):
            await transport.receive()
        await transport.close()


async def test_cancelling_a_receive_loses_no_frame() -> None:
    async with Peer(says(Ack(1))).serving() as peer:
        transport = await connect_websocket(stream_url(peer.url, "s"), headers={})
        waiting = asyncio.ensure_future(transport.receive())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait((waiting,))
        await transport.send([b"{}"])
        assert await transport.receive() == encode(Ack(1))
        await transport.close()


@pytest.mark.parametrize("status", [403, 404, 503])
async def test_a_refused_handshake_says_why(status: int) -> None:
    async with Peer(status).serving() as peer:
        with pytest.raises(MidstreamError, match=str(status)):
            await connect_websocket(stream_url(peer.url, "s"), headers={})


async def test_a_server_that_is_not_there_may_come_later() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with pytest.raises(ConnectionLostError):
            await connect_websocket(stream_url(f"http://127.0.0.1:{port}", "s"), headers={})


async def test_a_server_that_speaks_something_else_may_come_later() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail ready\r\n")
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ConnectionLostError):
            await connect_websocket(stream_url(f"http://127.0.0.1:{port}", "s"), headers={})
