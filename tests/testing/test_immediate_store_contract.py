"""The suite finds faults: each broken store here fails the test of its fault."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from msgspec.structs import replace

from midstream.store.contract import Batch, Store
from midstream.store.memory import Memory, MemoryStore
from midstream.testing.immediate_store_contract import ImmediateContract
from midstream.testing.store_fakes import Storage

SUITE = ImmediateContract()


class PretendsToAppend(MemoryStore):
    """A store that returns an end and writes nothing."""

    def append_now(self, session: str, batch: Batch) -> int | None:
        return batch.end


class Anywhere(MemoryStore):
    """A store that appends at any end."""

    def append_now(self, session: str, batch: Batch) -> int | None:
        return super().append_now(session, replace(batch, expected=1))


class AnyEpoch(MemoryStore):
    """A store that appends under any epoch."""

    def append_now(self, session: str, batch: Batch) -> int | None:
        return super().append_now(session, replace(batch, epoch=self._memory.sessions["s"].epoch))


class PlaceOf:
    def __init__(self, kind: type[MemoryStore]) -> None:
        self._kind = kind
        self._memory = Memory()

    def store(self) -> Store:
        return self._kind(self._memory)

    def kill(self, store: Store) -> None:
        assert isinstance(store, MemoryStore)
        self._memory.kill(store.node)


Test = Callable[[Storage], Awaitable[None]]
TESTS: list[Test] = [
    SUITE.test_an_append_without_waiting_happens_whole_or_not_at_all,
    SUITE.test_nothing_is_appended_without_waiting_elsewhere_than_at_the_end,
    SUITE.test_nothing_is_appended_without_waiting_under_an_older_epoch,
    SUITE.test_a_closed_store_appends_nothing_without_waiting,
]


@pytest.mark.parametrize("test", TESTS)
async def test_a_correct_store_passes(test: Test) -> None:
    await test(PlaceOf(MemoryStore))


@pytest.mark.parametrize(
    ("kind", "test"), [(PretendsToAppend, TESTS[0]), (Anywhere, TESTS[1]), (AnyEpoch, TESTS[2])]
)
async def test_a_broken_store_fails(kind: type[MemoryStore], test: Test) -> None:
    with pytest.raises(AssertionError):
        await test(PlaceOf(kind))
