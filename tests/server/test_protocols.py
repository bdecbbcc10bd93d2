"""What is no HTTP, or no handshake, is refused in the words of all else; nobody beside it notices."""

from __future__ import annotations

import asyncio
import json

import pytest
import websockets

from midstream.server import protocols
from midstream.testing.models import text
from tests.server.serving import WAIT_S, Socket, chunk, make_app, opening, served

HANDSHAKE = (
    b"GET /v1/sessions/s1/stream HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
)
KEY = b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"


@pytest.mark.parametrize(
    ("said", "status", "code"),
    [
        (b"\x16\x03\x01\x00\r\n\r\n", 400, "bad_request"),
        (b"GET / HTTP/x\r\n\r\n", 400, "bad_request"),
        (b"GET /\0 HTTP/1.1\r\n\r\n", 400, "bad_request"),
        (
            b"POST /v1/probe/chunks HTTP/1.1\r\nhost: localhost\r\ncontent-length: x\r\n\r\n",
            400,
            "bad_request",
        ),
        (HANDSHAKE + b"\r\n", 400, "bad_request"),
        (HANDSHAKE + KEY + b"sec-websocket-version: 7\r\n\r\n", 400, "bad_request"),
    ],
)
async def test_what_is_no_request_is_refused_as_all_else_and_harms_nobody(
    said: bytes, status: int, code: str
) -> None:
    async with served(make_app()) as server:
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(said)
        head, _, body = (await asyncio.wait_for(reader.read(), WAIT_S)).partition(b"\r\n\r\n")
        writer.close()
        assert (await server.http.get("/health")).status_code == 200
    line, *headers = head.decode().lower().split("\r\n")
    assert line.startswith(f"http/1.1 {status} ")
    assert {"content-type: application/problem+json", "connection: close"} <= {*headers}
    problem = json.loads(body)
    assert (problem["status"], problem["code"]) == (status, code)
    assert problem["next"] != "Do not repeat this request as it is."


@pytest.mark.parametrize(
    "said",
    [[], [b"GET /health HT"], [b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n", b"GET /hea"]],
    ids=len,
)
async def test_headers_that_do_not_come_are_not_waited_for_for_ever(
    said: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocols, "HEADERS_S", 0.05)
    async with served(make_app()) as server:
        reader, writer = await asyncio.open_connection(*server.url.removeprefix("http://").split(":"))
        for number, piece in enumerate(said):
            writer.write(piece)
            if number + 1 < len(said):
                assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b"}"), WAIT_S)
        assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
        writer.close()


async def test_who_has_said_what_it_wants_may_wait_for_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocols, "HEADERS_S", 0.02)
    async with served(make_app([text("hi")])) as server, Socket(server.socket()) as socket:
        await socket.say(opening())
        assert (await socket.hear())["type"] == "welcome"
        paced = await server.http.get("/v1/probe/events?chunks=3&every_ms=50")
        assert paced.text.count("event: probe") == 3
        await socket.say(chunk())
        await socket.hear_until("turn_ended")


async def test_compression_is_not_agreed_upon() -> None:
    async with served(make_app()) as server:
        asked = websockets.connect(
            f"{server.url.replace('http', 'ws')}/v1/sessions/s1/stream", compression="deflate"
        )
        async with asked as socket:
            assert socket.response is not None
            assert "sec-websocket-extensions" not in socket.response.headers
