"""Writes of key-value entries."""

from __future__ import annotations

from midstream.environment import World
from midstream.store.jetstream import JetStreamStore
from tests.store.jetstream.jetstream_places import JetStreamPlace
from tests.store.jetstream.nats_relay import NatsRelay

WORLD = World()
LARGE = [bytes([number]) * 400_000 for number in range(8)]


async def test_an_entry_with_a_lost_acknowledgement_is_written_once(place: JetStreamPlace) -> None:
    async with NatsRelay(place).serving() as relay:
        store = JetStreamStore(relay.url)
        await store.open()
        relay.swallow_after = b"the value"
        assert await store.kv_put("pool", "k", b"the value", expected=0, at=1.0) == 1
        assert await store.kv_put("pool", "k", b"another", expected=1, at=2.0) == 2
        assert relay.swallowed == 1
        await store.close()


async def test_replacing_a_large_entry_leaves_no_part_of_it(store: JetStreamStore) -> None:
    opened = store._opened
    assert opened is not None
    stream, subject = opened.presence._subjects.entry("pool", "k")
    await store.kv_put("pool", "k", b"".join(LARGE), expected=0, at=1.0)
    assert len(await opened.link.subjects(stream, f"{subject}.p.*")) > 1
    await store.kv_put("pool", "k", b"small", expected=1, at=1.0)
    assert await opened.link.subjects(stream, f"{subject}.p.*") == []
    assert await store.kv_delete("pool", "k", expected=2)
    assert await opened.link.subjects(stream, subject) == [], "nor of itself"
