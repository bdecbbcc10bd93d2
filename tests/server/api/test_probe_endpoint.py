"""Responses of the probe: numbered chunks, paced, over each transport, within a limit of concurrent probes."""

from __future__ import annotations

import asyncio
import json

import pytest
import websockets

from midstream.protocol.sse import SseDecoder
from midstream.server.api.probe_endpoint import PROBES_MAX
from tests.server.serving import WAIT_S, Socket, asgi_client, make_app, served
from tests.spec import spec

FAST = "every_ms=1"
CHUNKS = [{"probe": number} for number in range(5)]


@spec("STREAM-45")
async def test_chunks_are_numbered_over_every_transport() -> None:
    async with served(make_app()) as server, asyncio.timeout(WAIT_S):
        answer = await server.http.get(f"/v1/probe/events?{FAST}")
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert [json.loads(event.data) for event in SseDecoder().feed(answer.content)] == CHUNKS
        polled = [(await server.http.get(f"/v1/probe/poll?n={n}&{FAST}")).json() for n in range(5)]
        assert polled == CHUNKS
        async with Socket(_socket(server.url, FAST)) as socket:
            assert [await socket.receive() for _ in CHUNKS] == CHUNKS
            assert await socket.receive_close() == (1000, "")
        echoed = await server.http.post("/v1/probe/chunks", content=b"anything")
        assert (echoed.status_code, echoed.content) == (200, b"anything")


@pytest.mark.parametrize("query", ["every_ms=0", "every_ms=1001", "every_ms=long"])
async def test_long_probes_are_refused(query: str) -> None:
    async with asgi_client(make_app()) as client:
        assert (await client.get(f"/v1/probe/events?{query}")).status_code == 400
        assert (await client.get("/v1/probe/poll?n=5")).status_code == 400


async def test_concurrent_probes_are_limited_and_disconnected_ones_release_their_slot() -> None:
    async with served(make_app()) as server, asyncio.timeout(WAIT_S):
        sockets = [_socket(server.url, "every_ms=1000") for _ in range(PROBES_MAX)]
        made = [await socket for socket in sockets]
        for socket in made:
            await socket.recv()
        refused = await server.http.get(f"/v1/probe/events?{FAST}")
        assert (refused.status_code, refused.json()["code"]) == (503, "overloaded")
        await asyncio.gather(*(socket.close() for socket in made))
        refused_again = True
        while refused_again:
            refused_again = (await server.http.get(f"/v1/probe/events?{FAST}")).status_code == 503


def _socket(url: str, query: str) -> websockets.connect:
    return websockets.connect(f"{url.replace('http', 'ws')}/v1/probe/stream?{query}")
