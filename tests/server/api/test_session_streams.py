"""Sessions as streams of the Durable Streams protocol: read from any offset, closed with the session."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx2

from midstream.testing.scripted_model import text
from tests.server.serving import KEYS, Json, Served, asgi_client, command, make_app, post, served
from tests.server.test_kept import serve_pruned

PATH = "/v1/stream/sessions/s1"
BEGINNING = {"offset": "-1"}


async def run_turn(client: httpx2.AsyncClient, words: str, key: str) -> None:
    """Send a message, and wait until its turn is over."""
    response = await post(client, command(words=words), **{**KEYS, "x-idempotency-key": key})
    assert response.status_code == 200, response.text
    async with asyncio.timeout(60):
        while (await client.get("/v1/sessions/s1")).json()["status"] == "running":  # noqa: ASYNC110 - the server's
            await asyncio.sleep(0)


async def events_of(body: httpx2.Response) -> AsyncIterator[tuple[str, Json]]:
    """Yield the server-sent events of a response."""
    name = ""
    async for line in body.aiter_lines():
        if line.startswith("event:"):
            name = line[6:].strip()
        elif line.startswith("data:"):
            yield name, json.loads(line[5:])


async def test_a_session_can_be_read_from_each_offset_as_its_records() -> None:
    async with asgi_client(make_app([text("One."), text("Two.")])) as client:
        await run_turn(client, "hi", "k1")
        lines = (await client.get("/v1/sessions/s1/records")).text.splitlines()
        records = [json.loads(line) for line in lines]
        whole = await client.get(PATH)
        assert whole.json() == records
        assert whole.headers["content-type"] == "application/json"
        assert whole.headers["stream-up-to-date"] == "true"
        assert whole.headers["stream-next-offset"] == (await client.head(PATH)).headers["stream-next-offset"]
        for number, record in enumerate(records, 1):
            epoch, position = map(int, record["id"].split("-"))
            response = await client.get(PATH, params={"offset": f"{epoch:016d}_{position:016d}"})
            assert response.json() == records[number:]
        end = {"offset": whole.headers["stream-next-offset"]}
        await run_turn(client, "more", "k2")
        more = await client.get(PATH, params={**end, "live": "long-poll"})
        assert whole.json() + more.json() == (await client.get(PATH, params=BEGINNING)).json()
        now = await client.get(PATH, params={"offset": "now"})
        assert (now.json(), now.headers["stream-next-offset"]) == ([], more.headers["stream-next-offset"])


async def test_the_stream_of_a_session_is_read_only() -> None:
    async with asgi_client(make_app([text("One.")])) as client:
        await run_turn(client, "hi", "k1")
        for method in ("PUT", "POST", "DELETE"):
            response = await client.request(method, PATH, content="x")
            assert (response.status_code, response.headers["allow"]) == (405, "GET, HEAD")
        made = await client.put("/v1/stream/other", headers={"stream-forked-from": PATH})
        assert made.status_code == 404
        assert (await client.get("/v1/stream/sessions/s2")).status_code == 404
        assert (await client.get(PATH, params={"offset": "x"})).status_code == 400
        for offset in (f"{9:016d}_{1:016d}", f"{1:016d}_{999:016d}"):
            assert (await client.get(PATH, params={"offset": offset})).status_code == 410


async def test_live_readers_receive_new_records_and_the_end_when_the_session_is_deleted() -> None:
    async with served(make_app([text("One."), text("Two.")])) as server:
        await run_turn(server.http, "hi", "k1")
        whole = await server.http.get(PATH)
        async with server.http.stream("GET", PATH, params={**BEGINNING, "live": "sse"}) as body:
            events = events_of(body)
            found: list[Json] = []
            offset = await _take(events, found, whole.headers["stream-next-offset"])
            assert found == whole.json()
            poll = {"offset": offset, "live": "long-poll"}
            polling = asyncio.create_task(server.http.get(PATH, params=poll))
            await _until_waiting(server, 2)
            await run_turn(server.http, "more", "k2")
            assert (await polling).json()
            whole = await server.http.get(PATH)
            offset = await _take(events, found, whole.headers["stream-next-offset"])
            assert found == whole.json()
            poll = {"offset": offset, "live": "long-poll"}
            polling = asyncio.create_task(server.http.get(PATH, params=poll))
            await _until_waiting(server, 2)
            assert (await server.http.delete("/v1/sessions/s1")).status_code == 204
            async with asyncio.timeout(60):
                assert [each async for each in events] == [
                    ("control", {"streamNextOffset": offset, "streamClosed": True, "upToDate": True})
                ]
                ended = await polling
            assert (ended.status_code, ended.headers["stream-closed"]) == (204, "true")
        assert (await server.http.get(PATH)).status_code == 404


async def test_pruned_records_are_replaced_by_a_snapshot() -> None:
    async with serve_pruned() as (server, pruned_to):
        whole = await server.http.get(PATH)
        first, *rest = whole.json()
        assert first["id"] == first["snapshot"]["event_id"] == str(pruned_to)
        lines = (await server.http.get(f"/v1/sessions/s1/records?after={pruned_to.position}")).text
        assert rest == [json.loads(line) for line in lines.splitlines()]
        edge = f"{pruned_to.epoch:016d}_{pruned_to.position:016d}"
        assert (await server.http.get(PATH, params={"offset": edge})).json() == rest
        before = f"{pruned_to.epoch:016d}_{pruned_to.position - 1:016d}"
        assert (await server.http.get(PATH, params={"offset": before})).status_code == 410
        async with server.http.stream("GET", PATH, params={**BEGINNING, "live": "sse"}) as body:
            found: list[Json] = []
            await _take(events_of(body), found, whole.headers["stream-next-offset"])
            assert found == whole.json()


async def _take(events: AsyncIterator[tuple[str, Json]], found: list[Json], until: str) -> str:
    """Take the messages of events up to an offset, and return it."""
    async with asyncio.timeout(60):
        async for name, data in events:
            if name == "data":
                found += data  # type: ignore[arg-type]
            elif data["streamNextOffset"] == until:
                return until
    raise AssertionError("the stream ended early")


async def _until_waiting(server: Served, count: int) -> None:
    async with asyncio.timeout(60):
        while len(server.app.connections) < count:  # noqa: ASYNC110 - it is the app's own count
            await asyncio.sleep(0)
