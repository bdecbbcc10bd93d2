"""Request bodies that are too large, too late, cut off or compressed."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator

import pytest
from starlette.types import Message

from midstream.protocol.frames import FRAME_BYTES_MAX
from midstream.server.api import request_bodies
from midstream.testing.scripted_model import text
from tests.server.serving import KEYS, WAIT_S, asgi_client, command, make_app, post


async def test_a_client_that_disconnects_before_its_command_is_complete_changes_nothing() -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    app = make_app()
    headers = [(name.encode(), value.encode()) for name, value in KEYS.items()]
    scope = {"type": "http", "method": "POST", "path": "/v1/sessions/s1/commands", "headers": headers}
    await app({**scope, "query_string": b""}, receive, send)
    await app.stop()
    assert [sent[0]["status"], json.loads(sent[1]["body"])["code"]] == [503, "connection_lost"]


async def test_a_body_above_the_limit_is_refused_before_it_is_read_whole() -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while sent < 64 * FRAME_BYTES_MAX:
            sent += 64 * 1024
            yield b" " * 64 * 1024

    async with asgi_client(make_app()) as client:
        answer = await client.post("/v1/sessions/s1/commands", content=endless(), headers=KEYS)
    assert (answer.status_code, answer.json()["code"]) == (413, "frame_too_large")


async def test_a_body_with_a_declared_length_above_the_limit_is_refused_unread() -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        raise AssertionError("nothing of it is read")

    async def send(message: Message) -> None:
        sent.append(message)

    length = str(FRAME_BYTES_MAX + 1).encode()
    path = "/v1/sessions/s1/commands"
    app = make_app()
    await app(
        {
            "type": "http",
            "method": "POST",
            "path": path,
            "headers": [(b"content-length", length)],
            "query_string": b"",
        },
        receive,
        send,
    )
    await app.stop()
    assert (sent[0]["status"], json.loads(sent[1]["body"])["code"]) == (413, "frame_too_large")


@pytest.mark.parametrize("path", ["commands", "answer", "events", "poll"])
async def test_a_compressed_body_is_refused_with_the_accepted_encodings(path: str) -> None:
    async with asgi_client(make_app([text("hi")])) as client:
        assert (await post(client, command())).status_code == 200
        body = gzip.compress(json.dumps(command()).encode())
        response = await client.post(
            f"/v1/sessions/s1/{path}", content=body, headers={**KEYS, "content-encoding": "gzip"}
        )
        assert (response.status_code, response.json()["code"]) == (415, "unsupported_media_type")
        assert response.headers["accept-encoding"] == "identity"
        assert "Content-Encoding" in response.json()["next"]
        plain = await post(client, command(), **{"content-encoding": "identity"})
        assert (plain.status_code, plain.headers["x-midstream-replayed"]) == (200, "true")


async def test_the_wait_for_a_body_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_bodies, "BODY_S", 0.05)

    async def half() -> AsyncIterator[bytes]:
        yield b'{"type":'
        await asyncio.Event().wait()

    app = make_app()
    async with asgi_client(app) as client:
        answer = await asyncio.wait_for(
            client.post("/v1/sessions/s1/commands", content=half(), headers=KEYS), WAIT_S
        )
        assert (answer.status_code, answer.json()["code"]) == (503, "connection_lost")
        assert (await client.get("/v1/sessions")).json()["sessions"] == []
