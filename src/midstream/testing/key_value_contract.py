"""`midstream.store.contract.KeyValue` as a test suite: a part of `midstream.testing.store_contract`."""
# ruff: noqa: D102, PLR2004 - tests: names state what they check, and numbers need no names

from __future__ import annotations

import asyncio

import pytest

from midstream.errors import EntryMovedError
from midstream.store.contract import PRINCIPAL_OF, KeyValueEntry
from midstream.testing.store_fakes import ODD_BODIES, ODD_NAMES, Storage, open_store


class KeyValueContract:
    """The tests of the key-value part. Each one gets a fresh `place`."""

    pytestmark = pytest.mark.asyncio

    async def test_an_entry_comes_back_as_it_was_written(self, place: Storage) -> None:
        async with open_store(place) as kv:
            assert await kv.kv_get("pool", "k") is None
            for number, body in enumerate(ODD_BODIES):
                version = await kv.kv_put("pool", "k", body, expected=number, at=number + 0.5)
                assert version == number + 1
                assert await kv.kv_get("pool", "k") == KeyValueEntry("k", version, body, number + 0.5)

    async def test_an_entry_may_have_any_name(self, place: Storage) -> None:
        async with open_store(place) as kv:
            for name in ODD_NAMES:
                await kv.kv_put(name, name, name.encode(), expected=0, at=1.0)
            for name in ODD_NAMES:
                assert await kv.kv_list(name) == [KeyValueEntry(name, 1, name.encode(), 1.0)]

    @pytest.mark.parametrize("version", [0, 1, 3, 2**40])
    async def test_an_entry_is_replaced_only_at_the_version_that_was_read(
        self, place: Storage, version: int
    ) -> None:
        async with open_store(place) as kv:
            await kv.kv_put("pool", "k", b"1", expected=0, at=1.0)
            await kv.kv_put("pool", "k", b"2", expected=1, at=2.0)
            with pytest.raises(EntryMovedError):
                await kv.kv_put("pool", "k", b"3", expected=version, at=3.0)
            is_dropped = await kv.kv_delete("pool", "k", expected=version)
            assert not is_dropped
            assert await kv.kv_list("pool") == [KeyValueEntry("k", 2, b"2", 2.0)]

    async def test_a_missing_entry_is_neither_replaced_nor_deleted(self, place: Storage) -> None:
        async with open_store(place) as kv:
            with pytest.raises(EntryMovedError):
                await kv.kv_put("pool", "k", b"1", expected=1, at=1.0)
            assert not await kv.kv_delete("pool", "k", expected=0)
            assert await kv.kv_list("pool") == []

    async def test_of_two_writers_of_one_entry_one_wins(self, place: Storage) -> None:
        async with open_store(place) as one, open_store(place) as other:
            for expected in range(20):
                results = await asyncio.gather(
                    one.kv_put("pool", "k", b"one", expected=expected, at=1.0),
                    other.kv_put("pool", "k", b"other", expected=expected, at=1.0),
                    return_exceptions=True,
                )
                won = results.index(expected + 1)
                assert isinstance(results[1 - won], EntryMovedError)
                kept = await one.kv_get("pool", "k")
                assert kept is not None
                assert kept.body == (b"one", b"other")[won]

    async def test_entries_of_a_session_are_deleted_with_it(self, place: Storage) -> None:
        async with open_store(place) as store:
            for session in ("s", "t"):
                await store.claim(session, at=1.0)
                for namespace in (PRINCIPAL_OF, "pool"):
                    await store.kv_put(namespace, session, b"1", expected=0, at=1.0)
            assert await store.delete("s")
            assert [kept.key for kept in await store.kv_list(PRINCIPAL_OF)] == ["t"]
            assert await store.kv_put(PRINCIPAL_OF, "s", b"anew", expected=0, at=2.0) == 2
            assert len(await store.kv_list("pool")) == 2

    async def test_a_deleted_key_starts_above_all_its_versions(self, place: Storage) -> None:
        async with open_store(place) as kv:
            for expected in range(3):
                await kv.kv_put("pool", "k", b"old", expected=expected, at=1.0)
            assert await kv.kv_delete("pool", "k", expected=3)
            assert await kv.kv_get("pool", "k") is None
            assert await kv.kv_put("pool", "k", b"new", expected=0, at=2.0) == 4
            for expected in range(4):
                with pytest.raises(EntryMovedError):
                    await kv.kv_put("pool", "k", b"late", expected=expected, at=3.0)

    async def test_a_namespace_is_listed_last_written_first_and_apart_from_others(
        self, place: Storage
    ) -> None:
        async with open_store(place) as kv:
            for at, key in ((1.0, "a"), (3.0, "b"), (2.0, "c"), (2.0, "d")):
                await kv.kv_put("pool", key, b"", expected=0, at=at)
            await kv.kv_put("other", "a", b"", expected=0, at=9.0)
            assert [kept.key for kept in await kv.kv_list("pool")] == ["b", "c", "d", "a"]
            assert [kept.key for kept in await kv.kv_list("other")] == ["a"]
            assert await kv.kv_list("none") == []
            assert {*await kv.kv_namespaces()} >= {"other", "pool"}  # a store may have some of its own
            assert await kv.kv_delete("other", "a", expected=1)
            assert {*await kv.kv_namespaces()}.isdisjoint({"other", "none"})

    async def test_entries_outlive_the_store_that_wrote_them(self, place: Storage) -> None:
        store = place.store()
        await store.open()
        await store.kv_put("pool", "k", b"1", expected=0, at=1.0)
        place.kill(store)
        async with open_store(place) as kv:
            assert await kv.kv_get("pool", "k") == KeyValueEntry("k", 1, b"1", 1.0)
            assert await kv.kv_put("pool", "k", b"2", expected=1, at=2.0) == 2
