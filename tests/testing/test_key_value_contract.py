"""The suite finds faults: each broken store here fails the test of its fault."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import pytest

from midstream.store.contract import KeyValueEntry, Store
from midstream.store.memory import Memory, MemoryStore
from midstream.testing.key_value_contract import KeyValueContract
from midstream.testing.store_fakes import Storage

FAILED = (AssertionError, pytest.fail.Exception)


class BrokenEntriesPlace:
    def __init__(self, broken: type[MemoryStore]) -> None:
        self._broken = broken
        self._memory = Memory()

    def store(self) -> Store:
        return self._broken(self._memory)

    def kill(self, store: Store) -> None:
        assert isinstance(store, MemoryStore)
        self._memory.kill(store.node)


class ReplacesAnything(MemoryStore):
    async def kv_put(self, namespace: str, key: str, body: bytes, *, expected: int, at: float) -> int:
        found = await self.kv_get(namespace, key)
        now = found.version if found else 0
        return await super().kv_put(namespace, key, body, expected=now if expected else expected, at=at)


class DropsAnything(MemoryStore):
    async def kv_delete(self, namespace: str, key: str, *, expected: int) -> bool:
        found = await self.kv_get(namespace, key)
        return await super().kv_delete(namespace, key, expected=found.version if found else expected)


class ListsOldestFirst(MemoryStore):
    async def kv_list(self, namespace: str) -> Sequence[KeyValueEntry]:
        return [*reversed(await super().kv_list(namespace))]


SUITE = KeyValueContract()


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (
            ReplacesAnything,
            lambda place: SUITE.test_an_entry_is_replaced_only_at_the_version_that_was_read(place, 3),
        ),
        (
            DropsAnything,
            lambda place: SUITE.test_an_entry_is_replaced_only_at_the_version_that_was_read(place, 3),
        ),
        (ListsOldestFirst, SUITE.test_a_namespace_is_listed_last_written_first_and_apart_from_others),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_a_broken_store_fails(
    broken: type[MemoryStore], test: Callable[[Storage], Awaitable[None]]
) -> None:
    with pytest.raises(FAILED):
        await test(BrokenEntriesPlace(broken))
