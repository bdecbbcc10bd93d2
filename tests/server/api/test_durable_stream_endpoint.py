"""Durable Streams over HTTP: cases that the public suite does not cover."""

from __future__ import annotations

import asyncio

from tests.server.serving import asgi_client, make_app, served

TEXT = {"content-type": "text/plain"}


async def test_a_repeated_producer_request_is_accepted_once() -> None:
    async with asgi_client(make_app()) as client:
        assert (await client.put("/v1/stream/s", headers=TEXT)).status_code == 201
        place = {**TEXT, "producer-id": "p", "producer-epoch": "0", "producer-seq": "0"}
        response = [
            (await client.post("/v1/stream/s", content="x", headers=place)).status_code for _ in range(2)
        ]
        assert response == [200, 204]
        assert (await client.get("/v1/stream/s")).text == "x"


async def test_a_stream_name_is_not_a_session_id_and_a_session_id_not_a_stream_name() -> None:
    async with asgi_client(make_app()) as client:
        assert (await client.put("/v1/stream/s", headers=TEXT)).status_code == 201
        assert "~" not in (await client.get("/v1/sessions?children=true")).text
        assert (await client.get("/v1/sessions/s")).status_code == 404
        assert (await client.get("/v1/sessions/~s")).status_code == 400
        assert (await client.put("/v1/stream/~s", headers=TEXT)).status_code == 400


async def test_a_stopping_server_ends_long_polls_and_streams() -> None:
    async with served(make_app()) as server:
        await server.http.put("/v1/stream/s", headers=TEXT)
        async with server.http.stream("GET", "/v1/stream/s?offset=-1&live=sse") as body:
            assert body.headers["content-type"] == "text/event-stream"
            poll = asyncio.create_task(server.http.get("/v1/stream/s?offset=-1&live=long-poll"))
            async with asyncio.timeout(60):
                while len(server.app.connections) < 2:  # noqa: ASYNC110 - it is the app's own count
                    await asyncio.sleep(0)
                server.app.drain()
                assert (await poll).status_code == 503


async def test_deleting_a_stream_ends_its_readers() -> None:
    async with served(make_app()) as server:
        await server.http.put("/v1/stream/s", content="x", headers=TEXT)
        async with server.http.stream("GET", "/v1/stream/s?offset=-1&live=sse") as body:
            lines = body.aiter_lines()
            assert await anext(lines) == "event: data"
            assert (await server.http.delete("/v1/stream/s")).status_code == 204
            async with asyncio.timeout(60):
                assert any(["control" in line async for line in lines])
