"""The suite finds what is wrong: each broken store here fails the test that is about its fault."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from midstream.store.contract import Store
from midstream.store.memory import Memory, MemoryStore
from midstream.testing.immediate_contract import ImmediateContract
from midstream.testing.store_contract import Place

SUITE = ImmediateContract()


class SaysSo(MemoryStore):
    """Says that it was done."""

    def append_at_once(
        self,
        session: str,
        work: Callable[[], bytes],
        *,
        expected: int,
        epoch: int,
    ) -> bytes | None:
        return work()


class Anywhere(MemoryStore):
    """Appends wherever the end is."""

    def append_at_once(
        self,
        session: str,
        work: Callable[[], bytes],
        *,
        expected: int,
        epoch: int,
    ) -> bytes | None:
        return super().append_at_once(session, work, expected=1, epoch=epoch)


class AnyEpoch(MemoryStore):
    """Appends for whoever asks."""

    def append_at_once(
        self,
        session: str,
        work: Callable[[], bytes],
        *,
        expected: int,
        epoch: int,
    ) -> bytes | None:
        return super().append_at_once(
            session, work, expected=expected, epoch=self._memory.sessions["s"].epoch
        )


class PlaceOf:
    def __init__(self, kind: type[MemoryStore]) -> None:
        self._kind = kind
        self._memory = Memory()

    def store(self) -> Store:
        return self._kind(self._memory)

    def kill(self, store: Store) -> None:
        assert isinstance(store, MemoryStore)
        self._memory.kill(store.owner)


Test = Callable[[Place], Awaitable[None]]
TESTS: list[Test] = [
    SUITE.test_an_append_at_once_happens_whole_or_is_to_be_asked_for,
    SUITE.test_nothing_is_appended_at_once_elsewhere_than_at_the_end,
    SUITE.test_nothing_is_appended_at_once_under_another_than_the_newest_epoch,
    SUITE.test_a_closed_store_appends_nothing_at_once,
]


@pytest.mark.parametrize("test", TESTS)
async def test_a_right_store_passes(test: Test) -> None:
    await test(PlaceOf(MemoryStore))


@pytest.mark.parametrize(("kind", "test"), [(SaysSo, TESTS[0]), (Anywhere, TESTS[1]), (AnyEpoch, TESTS[2])])
async def test_a_broken_store_fails(kind: type[MemoryStore], test: Test) -> None:
    with pytest.raises(AssertionError):
        await test(PlaceOf(kind))
