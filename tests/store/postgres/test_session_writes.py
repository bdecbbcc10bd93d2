"""Repeated writes that may already have happened."""

from __future__ import annotations

import pytest

from midstream.errors import EntryMovedError
from midstream.store.postgres import PostgresStore
from tests.store.postgres.postgres_places import PostgresPlace
from tests.store.postgres.postgres_relay import PostgresRelay


async def test_writes_with_a_lost_acknowledgement_are_executed_once(place: PostgresPlace) -> None:
    async with PostgresRelay(place.engine, place.schema).serving() as relay:
        store = PostgresStore(relay.url)
        await store.open()

        async def losing(words: bytes) -> None:
            relay.swallow_after = words

        await losing(b"insert into key_value")
        assert await store.kv_put("n", "k", b"1", expected=0, at=1.0) == 1
        await losing(b"one" * 20)
        assert await store.kv_put("n", "k", b"one" * 20, expected=1, at=2.0) == 2
        entry = await store.kv_get("n", "k")
        assert entry is not None
        assert (entry.version, entry.body) == (2, b"one" * 20)
        await losing(b"delete from key_value")
        assert await store.kv_delete("n", "k", expected=2)
        assert await store.kv_list("n") == []
        epoch = await store.claim("s" * 50, at=1.0)
        await losing(b"s" * 50)
        again = await store.claim("s" * 50, at=1.0)
        assert again in (epoch + 1, epoch + 2)
        await losing(b"delete from session")
        assert await store.delete("s" * 50)
        assert await store.find("s" * 50) is None
        assert relay.swallowed >= 5
        await store.close()


async def test_a_repeated_write_does_not_mistake_the_entry_of_another_for_its_own(
    store: PostgresStore,
) -> None:
    from midstream.store.postgres import session_writes

    await store.kv_put("n", "k", b"other", expected=0, at=1.0)
    assert store._opened is not None
    with pytest.raises(EntryMovedError):
        await store._opened.write(
            lambda db, _: session_writes.kv_put(db, "n", "k", b"mine", expected=0, at=1.0, is_repeated=True)
        )
