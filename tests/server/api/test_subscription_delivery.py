"""Delivery of subscriptions: another server takes over after a death, and each wake is announced once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx2
import msgspec

from midstream.dialects.stream_subscriptions import (
    StreamSubscription,
    decode_subscription,
    encode_subscription,
)
from midstream.server.api.subscription_delivery import SUBSCRIPTIONS
from midstream.store.memory import MemoryStore
from midstream.store.sqlite import SQLiteStore
from tests.server.serving import Json, make_app, served

SUBSCRIPTION = "/v1/stream/__ds/subscriptions/sub"
JSON = {"content-type": "application/json"}
PULL: Json = {"type": "pull-wake", "pattern": "events/*", "wake_stream": "pool"}
WAIT_S = 60.0


async def wakes_of(client: httpx2.AsyncClient, count: int) -> list[Json]:
    """Wait until the wake stream has this many messages, and return them."""
    async with asyncio.timeout(WAIT_S):
        while True:
            wakes: list[Json] = (await client.get("/v1/stream/pool")).json()
            if len(wakes) >= count:
                return wakes
            await asyncio.sleep(0)


async def subscribed(client: httpx2.AsyncClient) -> None:
    assert (await client.put("/v1/stream/pool", headers=JSON)).status_code == 201
    assert (await client.put(SUBSCRIPTION, json=PULL)).status_code == 201


async def test_an_append_on_one_server_wakes_a_subscription_that_another_server_can_claim(
    tmp_path: Path,
) -> None:
    stores = [SQLiteStore(tmp_path / "s.db") for _ in range(2)]
    async with served(make_app(store=stores[0])) as one, served(make_app(store=stores[1])) as two:
        await subscribed(one.http)
        await two.http.put("/v1/stream/events/a", headers=JSON, content='["a"]')
        [wake] = await wakes_of(one.http, 1)
        assert (wake["type"], wake["subscription_id"], wake["stream"]) == ("wake", "sub", "events/a")
        response = await two.http.post(f"{SUBSCRIPTION}/claim", json={"worker": "w"})
        assert response.json()["generation"] == wake["generation"]


async def test_a_stored_but_unannounced_wake_is_announced_once() -> None:
    store = MemoryStore()
    async with served(make_app(store=store)) as server:
        await subscribed(server.http)
        await server.http.put("/v1/stream/events/a", headers=JSON, content='["a"]')
        [wake] = await wakes_of(server.http, 1)
        for _ in range(2):  # As after a death between the append and its note, and before the append.
            async with asyncio.timeout(WAIT_S):
                while not (found := await _stored(store))[1].is_announced:  # noqa: ASYNC110 - in the store
                    await asyncio.sleep(0)
            version, known = found
            body = encode_subscription(msgspec.structs.replace(known, is_announced=False))
            await store.kv_put(SUBSCRIPTIONS, "~__ds~sub", body, expected=version, at=1.0)
            async with asyncio.timeout(WAIT_S):
                while not (await _stored(store))[1].is_announced:  # noqa: ASYNC110 - in the store
                    await asyncio.sleep(0)
            assert (await server.http.get("/v1/stream/pool")).json() == [wake]


async def _stored(store: MemoryStore) -> tuple[int, StreamSubscription]:
    entry = await store.kv_get(SUBSCRIPTIONS, "~__ds~sub")
    assert entry is not None
    return entry.version, decode_subscription(entry.body)


async def test_an_unreadable_subscription_stops_no_other() -> None:
    store = MemoryStore()
    async with served(make_app(store=store)) as server:
        await store.kv_put(SUBSCRIPTIONS, "~__ds~broken", b"{", expected=0, at=1.0)
        assert (await server.http.get("/v1/stream/__ds/subscriptions/broken")).status_code == 500
        assert (await server.http.put("/v1/stream/pool", headers=JSON)).status_code == 201
        assert (await server.http.put(SUBSCRIPTION, json=PULL)).status_code == 201
        await server.http.put("/v1/stream/events/a", headers=JSON, content='["a"]')
        assert len(await wakes_of(server.http, 1)) == 1
        assert (await server.http.delete("/v1/stream/__ds/subscriptions/broken")).status_code == 204
        assert (await server.http.get("/v1/stream/__ds/subscriptions/broken")).status_code == 404
