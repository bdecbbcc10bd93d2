"""The body of a chat's answer: it ends with its run, and breaks when the server ends it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2
import pytest

from midstream.models.responses import Finished, TextDelta
from midstream.server.api.event_body import PACE_S, QUIET_S
from midstream.server.limits import Limits
from midstream.testing.fake_worlds import FakeWorld
from midstream.testing.scripted_model import Gate, text
from tests.server.known_people import ADA, KNOWN, guarded_app
from tests.server.serving import WAIT_S, asgi_client, make_app, served
from tests.server.test_kept import _until as until
from tests.server.test_kept import prune

Json = dict[str, Any]
HI = {"id": "c", "messages": [{"id": "m", "role": "user", "parts": [{"type": "text", "text": "hi"}]}]}


def slow(gate: asyncio.Event) -> list[list[Any]]:
    return [[TextDelta("Hello "), Gate(gate), TextDelta("you"), Finished()]]


async def lines_until(answer: httpx2.Response, last: str) -> list[str]:
    """Read the lines of a stream up to one that contains the text."""
    lines = []
    async for line in answer.aiter_lines():
        lines.append(line)
        if last in line:
            return lines
    raise AssertionError(lines)


@pytest.mark.parametrize("ends", ["drain", "withdrawn"])
async def test_a_body_that_the_server_ends_is_recognisably_incomplete(ends: str) -> None:
    gate, known = asyncio.Event(), dict(KNOWN)
    async with served(guarded_app(slow(gate), known=known)) as server, asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
        body = json.dumps(HI).encode()
        head = [b"POST /v1/chat HTTP/1.1", b"host: 127.0.0.1", b"content-length: %d" % len(body)]
        head.append(b"authorization: " + ADA["authorization"].encode())
        writer.write(b"\r\n".join(head) + b"\r\n\r\n" + body)
        await reader.readuntil(b"Hello")
        if ends == "drain":
            server.app.drain()
        else:
            known.clear()
            server.app.auth.recheck()
        try:
            rest = await reader.read()
        except ConnectionError:
            rest = b""
        assert b"[DONE]" not in rest
        assert not rest.endswith(b"0\r\n\r\n"), "a clean end"
        writer.close()
        gate.set()


async def test_chat_readers_count_towards_the_limit_of_streams() -> None:
    gate = asyncio.Event()
    app = make_app(slow(gate), connections_max=1)
    async with served(app) as server, asyncio.timeout(WAIT_S):
        async with server.http.stream("POST", "/v1/chat", json=HI) as answer:
            await lines_until(answer, "Hello")
            assert app.open_streams == 1
            refused = await server.http.get("/v1/chat/c/stream")
            assert (refused.status_code, refused.json()["code"]) == (503, "overloaded")
        await until(lambda: not app.open_streams)
        gate.set()
        assert "you" in (await server.http.get("/v1/chat/c/stream")).text


async def test_streams_of_one_principal_are_limited() -> None:
    gate = asyncio.Event()
    app = guarded_app(slow(gate), limits=Limits(streams_per_principal_max=1))
    async with served(app) as server, asyncio.timeout(WAIT_S):
        async with server.http.stream("POST", "/v1/chat", json=HI, headers=ADA) as answer:
            await lines_until(answer, "Hello")
            assert (await server.http.get("/v1/chat/c/stream", headers=ADA)).status_code == 429
        gate.set()


async def test_a_turn_with_pruned_events_cannot_be_read_again() -> None:
    app = make_app([text("Hello")])
    async with asgi_client(app) as client:
        assert "Hello" in (await client.post("/v1/chat", json=HI)).text
        assert (await client.get("/v1/chat/c~1.0/stream")).status_code == 200
        await prune(app.host, "c")
        assert await app.host.put_to_sleep("c")  # Events in memory can still be read.
        for path in ("c/stream", "c~1.0/stream"):
            assert (await client.get(f"/v1/chat/{path}")).status_code == 204
        shown = (await client.get("/v1/chat/c/messages")).json()["messages"]
        assert [message["role"] for message in shown] == ["user", "assistant"]


async def test_a_silent_stream_sends_comments() -> None:
    world, gate = FakeWorld(), asyncio.Event()
    app = make_app(slow(gate), world=world)
    async with asgi_client(app) as client, asyncio.timeout(WAIT_S):
        answer = asyncio.ensure_future(client.post("/v1/chat", json=HI))
        await until(lambda: app.open_streams > 0)
        for _ in range(4):
            await world.advance(QUIET_S)
        gate.set()
        while not answer.done():
            await world.advance(PACE_S)
        pieces = (await answer).text.split("\n\n")
        assert ": waiting" in pieces
        assert pieces[-2] == "data: [DONE]"
