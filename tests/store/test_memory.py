from __future__ import annotations

import pytest

from midstream.store.contract import Store
from midstream.store.memory import Memory, MemoryStore
from midstream.testing.store_contract import StoreContract
from midstream.testing.store_fakes import Storage


class MemoryPlace:
    def __init__(self) -> None:
        self.memory = Memory()

    def store(self) -> Store:
        return MemoryStore(self.memory)

    def kill(self, store: Store) -> None:
        assert isinstance(store, MemoryStore)
        self.memory.kill(store.node)


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def place(self) -> Storage:
        return MemoryPlace()


async def test_stores_without_a_common_memory_share_nothing() -> None:
    one, other = MemoryStore(), MemoryStore()
    await one.open()
    await other.open()
    await one.claim("s", at=1.0)
    assert await other.find("s") is None
