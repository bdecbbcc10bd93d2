"""`midstream.store.contract.Shelf` as a test suite: a store that passes it may keep a pool's records.

Subclass `ShelfContract` in a test file and give it a fixture `place`, as `midstream.testing.store_contract` says.
"""
# ruff: noqa: D102, PLR2004 - these are tests: a name is a promise, numbers speak for themselves

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from midstream.errors import ShelfMovedError
from midstream.store.contract import OWNERS, Kept, Shelf
from midstream.testing.store_contract import ODD_BODIES, ODD_NAMES, Place, opened


class ShelfContract:
    """The same for a store that is also a `Shelf`. Each test gets a fresh `place`."""

    pytestmark = pytest.mark.asyncio

    async def test_an_entry_comes_back_as_it_was_written(self, place: Place) -> None:
        async with _shelf(place) as shelf:
            assert await shelf.kept("pool", "k") is None
            for number, body in enumerate(ODD_BODIES):
                version = await shelf.keep("pool", "k", body, expected=number, at=number + 0.5)
                assert version == number + 1
                assert await shelf.kept("pool", "k") == Kept("k", version, body, number + 0.5)

    async def test_an_entry_may_have_any_name(self, place: Place) -> None:
        async with _shelf(place) as shelf:
            for name in ODD_NAMES:
                await shelf.keep(name, name, name.encode(), expected=0, at=1.0)
            for name in ODD_NAMES:
                assert await shelf.shelf(name) == [Kept(name, 1, name.encode(), 1.0)]

    @pytest.mark.parametrize("version", [0, 1, 3, 2**40])
    async def test_only_who_has_read_an_entry_replaces_it(self, place: Place, version: int) -> None:
        async with _shelf(place) as shelf:
            await shelf.keep("pool", "k", b"1", expected=0, at=1.0)
            await shelf.keep("pool", "k", b"2", expected=1, at=2.0)
            with pytest.raises(ShelfMovedError):
                await shelf.keep("pool", "k", b"3", expected=version, at=3.0)
            is_dropped = await shelf.drop("pool", "k", expected=version)
            assert not is_dropped
            assert await shelf.shelf("pool") == [Kept("k", 2, b"2", 2.0)]

    async def test_what_is_not_there_is_neither_replaced_nor_dropped(self, place: Place) -> None:
        async with _shelf(place) as shelf:
            with pytest.raises(ShelfMovedError):
                await shelf.keep("pool", "k", b"1", expected=1, at=1.0)
            assert not await shelf.drop("pool", "k", expected=0)
            assert await shelf.shelf("pool") == []

    async def test_of_two_who_replace_the_same_entry_one_wins(self, place: Place) -> None:
        async with _shelf(place) as one, _shelf(place) as other:
            for expected in range(20):
                results = await asyncio.gather(
                    one.keep("pool", "k", b"one", expected=expected, at=1.0),
                    other.keep("pool", "k", b"other", expected=expected, at=1.0),
                    return_exceptions=True,
                )
                won = results.index(expected + 1)
                assert isinstance(results[1 - won], ShelfMovedError)
                kept = await one.kept("pool", "k")
                assert kept is not None
                assert kept.body == (b"one", b"other")[won]

    async def test_what_is_kept_of_a_session_goes_with_it(self, place: Place) -> None:
        async with opened(place) as store:
            assert isinstance(store, Shelf)
            for session in ("s", "t"):
                await store.claim(session, at=1.0)
                for shelf in (OWNERS, "pool"):
                    await store.keep(shelf, session, b"1", expected=0, at=1.0)
            assert await store.delete("s")
            assert [kept.key for kept in await store.shelf(OWNERS)] == ["t"]
            assert await store.keep(OWNERS, "s", b"anew", expected=0, at=2.0) == 2
            assert len(await store.shelf("pool")) == 2

    async def test_a_dropped_key_starts_above_all_its_versions(self, place: Place) -> None:
        async with _shelf(place) as shelf:
            for expected in range(3):
                await shelf.keep("pool", "k", b"old", expected=expected, at=1.0)
            assert await shelf.drop("pool", "k", expected=3)
            assert await shelf.kept("pool", "k") is None
            assert await shelf.keep("pool", "k", b"new", expected=0, at=2.0) == 4
            for expected in range(4):
                with pytest.raises(ShelfMovedError):
                    await shelf.keep("pool", "k", b"late", expected=expected, at=3.0)

    async def test_a_shelf_is_listed_last_written_first_and_apart_from_others(self, place: Place) -> None:
        async with _shelf(place) as shelf:
            for at, key in ((1.0, "a"), (3.0, "b"), (2.0, "c"), (2.0, "d")):
                await shelf.keep("pool", key, b"", expected=0, at=at)
            await shelf.keep("other", "a", b"", expected=0, at=9.0)
            assert [kept.key for kept in await shelf.shelf("pool")] == ["b", "c", "d", "a"]
            assert [kept.key for kept in await shelf.shelf("other")] == ["a"]
            assert await shelf.shelf("none") == []

    async def test_entries_outlive_who_wrote_them(self, place: Place) -> None:
        store = place.store()
        await store.open()
        assert isinstance(store, Shelf)
        await store.keep("pool", "k", b"1", expected=0, at=1.0)
        place.kill(store)
        async with _shelf(place) as shelf:
            assert await shelf.kept("pool", "k") == Kept("k", 1, b"1", 1.0)
            assert await shelf.keep("pool", "k", b"2", expected=1, at=2.0) == 2


@asynccontextmanager
async def _shelf(place: Place) -> AsyncIterator[Shelf]:
    async with opened(place) as store:
        assert isinstance(store, Shelf)
        yield store
