"""`StoreReader.list` as a test suite: a part of `StoreContract`."""
# ruff: noqa: D102 - tests: names state what they check, and numbers need no names

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from midstream.session.records import Sync
from midstream.store.contract import Batch, ListPlace, SessionInfo, SessionListing, Store
from midstream.testing.store_fakes import Storage, open_store


class ListingContract:
    """The tests of listings. Each one gets a fresh `place`."""

    pytestmark = pytest.mark.asyncio

    async def test_the_last_changed_session_is_listed_first(self, place: Storage) -> None:
        async with open_store(place) as store:
            assert await _list(store) == []
            for number, name in enumerate(("a", "b", "c")):
                await store.claim(name, at=float(number))
            epoch = await store.claim("a", at=10.0)
            assert [line.session for line in await _list(store)] == ["c", "b", "a"]
            await _mark(store, "a", epoch, SessionListing(is_live=False, at=11.0))
            assert [line.session for line in await _list(store)] == ["a", "c", "b"]

    async def test_a_listing_filters_by_open_turn(self, place: Storage) -> None:
        async with open_store(place) as store:
            for number, name in enumerate(("a", "b", "c")):
                epoch = await store.claim(name, at=float(number))
                mark = SessionListing(is_live=name != "b", at=float(number))
                await _mark(store, name, epoch, mark)
            assert [line.session for line in await _list(store, live=True)] == ["c", "a"]
            assert [line.session for line in await _list(store, live=False)] == ["b"]

    async def test_a_listing_filters_by_session_name_and_includes_parts(self, place: Storage) -> None:
        async with open_store(place) as store:
            for number, name in enumerate(("a", "ab", "a::1", "a::1::2", "a:", "b", "it's")):
                epoch = await store.claim(name, at=1.0)
                mark = SessionListing(is_live=name == "a::1", at=float(number))
                await _mark(store, name, epoch, mark)
            for live, names in ((None, ["it's", "a::1::2", "a::1", "a"]), (True, ["a::1"])):
                found = [line.session async for line in store.list(live=live, of=["a", "it's", "none"])]
                assert found == names
            assert [line async for line in store.list(of=[])] == []

    async def test_a_page_of_a_listing_begins_behind_a_place(self, place: Storage) -> None:
        async with open_store(place) as store:
            for at, name in ((1.0, "a"), (2.0, "b"), (2.0, "c"), (2.0, "d"), (3.0, "e::1")):
                epoch = await store.claim(name, at=at)
                mark = SessionListing(is_live=name == "a", at=at)
                await _mark(store, name, epoch, mark)

            async def page(after: ListPlace | None, limit: int | None = 2, **only: Any) -> list[str]:  # noqa: ANN401 - of `Store.list`
                return [line.session async for line in store.list(after=after, limit=limit, **only)]

            assert await page(None) == ["e::1", "d"]
            assert await page(ListPlace(2.0, "d")) == ["c", "b"]
            assert await page(ListPlace(2.0, "b"), None) == ["a"]
            assert await page(ListPlace(1.0, "a")) == []
            assert await page(ListPlace(3.0, "e"), live=True) == ["a"]
            assert await page(None, of=["e", "c", "a"]) == ["e::1", "c"]
            assert await page(ListPlace(2.0, "c"), of=["e", "c", "a"]) == ["a"]
            await store.delete("c")
            assert await page(ListPlace(2.0, "c")) == ["b", "a"]

    async def test_a_long_listing_is_complete_despite_concurrent_changes(self, place: Storage) -> None:
        async with open_store(place) as store:
            names = [f"s{number}" for number in range(450)]
            epochs = await asyncio.gather(*(store.claim(name, at=float(at)) for at, name in enumerate(names)))
            listing = store.list()
            seen = [(await anext(listing)).session]
            mark = SessionListing(is_live=False, at=1e6)
            await _mark(store, "s1", epochs[1], mark)
            await store.delete("s0")
            seen += [line.session async for line in listing]
            assert [name for name in seen if name != "s0"] == names[:0:-1]


async def _mark(store: Store, session: str, epoch: int, mark: SessionListing) -> None:
    await store.append(session, Batch([], 0, epoch, Sync.FULL, mark))


async def _list(store: Store, *, live: bool | None = None) -> list[SessionInfo]:
    return [line async for line in store.list(live=live)]
