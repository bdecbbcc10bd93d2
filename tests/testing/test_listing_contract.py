"""The suite finds faults: each broken store here fails the test of its fault."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection

import pytest

from midstream.store.contract import ListPlace, SessionInfo, Store
from midstream.store.memory import Memory, MemoryStore
from midstream.testing.listing_contract import ListingContract
from midstream.testing.store_fakes import Storage

SUITE = ListingContract()


class FromTheBeginning(MemoryStore):
    """A store that begins each page with the first session."""

    async def list(
        self,
        *,
        live: bool | None = None,
        of: Collection[str] | None = None,
        after: ListPlace | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[SessionInfo]:
        async for each in super().list(live=live, of=of, limit=limit):
            yield each


class WithoutLimit(MemoryStore):
    """A store that lists all sessions."""

    async def list(
        self,
        *,
        live: bool | None = None,
        of: Collection[str] | None = None,
        after: ListPlace | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[SessionInfo]:
        async for each in super().list(live=live, of=of, after=after):
            yield each


class ListingPlace:
    def __init__(self, kind: type[MemoryStore]) -> None:
        self._kind = kind
        self._memory = Memory()

    def store(self) -> Store:
        return self._kind(self._memory)

    def kill(self, store: Store) -> None:
        self._memory.kill(store.node)


@pytest.mark.parametrize("kind", [FromTheBeginning, WithoutLimit])
async def test_a_broken_listing_fails_the_suite(kind: type[MemoryStore]) -> None:
    test: Callable[[Storage], Awaitable[None]] = SUITE.test_a_page_of_a_listing_begins_behind_a_place
    with pytest.raises(AssertionError):
        await test(ListingPlace(kind))
    await test(ListingPlace(MemoryStore))
