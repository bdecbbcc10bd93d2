"""Expired plain streams are removed without a request, and those in use are kept."""

from __future__ import annotations

from midstream.server.api.plain_streams import PlainStreams
from midstream.server.api.stream_sweeping import BUCKET_S, PLACE, StreamSweeper
from midstream.store.memory import MemoryStore
from tests.server.known_people import Later
from tests.server.serving import asgi_client, make_app

TEXT = {"content-type": "text/plain"}


async def journals(store: MemoryStore) -> set[str]:
    return {line.session async for line in store.list()}


async def test_an_expired_stream_without_readers_is_removed() -> None:
    store, world = MemoryStore(), Later()
    app = make_app(store=store, world=world)
    async with asgi_client(app) as client:
        for name, lifetime in {
            "soon": {"stream-ttl": "60"},
            "late": {"stream-ttl": "90000"},
            "ends": {"stream-expires-at": "2001-01-01T00:00:00Z"},
            "stays": {},
        }.items():
            response = await client.put(f"/v1/stream/{name}", content="x", headers={**TEXT, **lifetime})
            assert response.status_code == 201
        sweeper = StreamSweeper(app.host, PlainStreams(app.host))
        await sweeper.sweep()
        assert await journals(store) == {"~soon", "~late", "~stays"}
        world.ahead_s += 50
        assert (await client.get("/v1/stream/soon")).text == "x"
        world.ahead_s += 50
        await sweeper.sweep()
        assert "~soon" in await journals(store), "it was read meanwhile"
        for _ in range(3):
            world.ahead_s += BUCKET_S
            await sweeper.sweep()
        assert await journals(store) == {"~late", "~stays"}
        world.ahead_s += 100_000
        await sweeper.sweep()
        assert await journals(store) == {"~stays"}
        await sweeper.sweep()
        assert PLACE in await store.kv_namespaces()
        assert not [each for each in await store.kv_namespaces() if "-ends-" in each], "no entry is left"


async def test_a_source_is_removed_with_its_last_fork() -> None:
    store, world = MemoryStore(), Later()
    app = make_app(store=store, world=world)
    async with asgi_client(app) as client:
        await client.put("/v1/stream/source", content="x", headers={**TEXT, "stream-ttl": "60"})
        forked = {**TEXT, "stream-forked-from": "/v1/stream/source", "stream-ttl": "5000"}
        assert (await client.put("/v1/stream/fork", headers=forked)).status_code == 201
        sweeper = StreamSweeper(app.host, PlainStreams(app.host))
        for _ in range(3):
            world.ahead_s += BUCKET_S
            await sweeper.sweep()
        assert await journals(store) == {"~source", "~fork"}
        assert (await client.get("/v1/stream/fork")).text == "x"
        world.ahead_s += 10_000
        await sweeper.sweep()
        assert await journals(store) == set()


async def test_a_sweep_is_bounded_and_the_next_one_continues() -> None:
    store, world = MemoryStore(), Later()
    app = make_app(store=store, world=world)
    async with asgi_client(app) as client:
        for number in range(7):
            await client.put(f"/v1/stream/s{number}", headers={**TEXT, "stream-ttl": "1"})
        world.ahead_s += 5000
        sweeper = StreamSweeper(app.host, PlainStreams(app.host))
        assert [await sweeper.sweep(limit=3) for _ in range(4)] == [3, 3, 1, 0]
        assert await journals(store) == set()
