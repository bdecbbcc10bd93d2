"""The suite finds faults: each broken store here fails the test of its fault."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from midstream.store.contract import Batch, Store, StoredRecord
from midstream.store.memory import Memory, MemoryStore
from midstream.testing.store_contract import StoreContract

FAILED = (AssertionError, pytest.fail.Exception)


class BrokenPlace:
    def __init__(self, broken: type[MemoryStore]) -> None:
        self.broken = broken
        self.memory = Memory()

    def store(self) -> Store:
        return self.broken(self.memory)

    def kill(self, store: Store) -> None:
        assert isinstance(store, MemoryStore)
        self.memory.kill(store.node)


class AppendsAnywhere(MemoryStore):
    async def append(self, session: str, batch: Batch) -> int:
        found = await self.find(session)
        end = 0 if found is None else found.end
        return await super().append(session, replace(batch, expected=end))


class NeverDies(MemoryStore):
    async def close(self) -> None:
        self.node = ""


class ReadsTooMuch(MemoryStore):
    async def read(self, session: str, *, after: int, limit: int) -> list[StoredRecord]:
        return await super().read(session, after=after, limit=limit + 1)


class ReusesEpochs(MemoryStore):
    async def delete(self, session: str) -> bool:
        is_gone = await super().delete(session)
        self._memory.epochs_spent = 0
        return is_gone


async def test_a_store_that_ignores_the_position_fails() -> None:
    with pytest.raises(FAILED):
        await StoreContract().test_an_append_elsewhere_than_at_the_end_writes_nothing(
            BrokenPlace(AppendsAnywhere), 1
        )
    with pytest.raises(FAILED):
        await StoreContract().test_of_two_appends_at_one_position_one_wins(BrokenPlace(AppendsAnywhere))


async def test_a_store_that_keeps_its_leases_fails() -> None:
    with pytest.raises(Exception, match="which is alive"):
        await StoreContract().test_closing_gives_up_every_session(BrokenPlace(NeverDies))


async def test_a_store_that_ignores_the_limit_fails() -> None:
    with pytest.raises(FAILED):
        await StoreContract().test_reading_goes_on_after_any_position_and_stops_at_the_limit(
            BrokenPlace(ReadsTooMuch)
        )


async def test_a_store_that_restarts_epochs_fails() -> None:
    with pytest.raises(FAILED):
        await StoreContract().test_older_epochs_cannot_append_to_a_recreated_session(
            BrokenPlace(ReusesEpochs)
        )
