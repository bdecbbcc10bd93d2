"""What is no HTTP, or no handshake, is refused in the words of all else; nobody beside it notices."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.server.serving import WAIT_S, make_app, served

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
