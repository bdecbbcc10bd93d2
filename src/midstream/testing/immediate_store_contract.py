"""`midstream.store.contract.Immediate` as a test suite: a part of `midstream.testing.store_contract`."""
# ruff: noqa: D102 - tests: names state what they check, and numbers need no names

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from midstream.session.records import Sync
from midstream.store.contract import Batch, Immediate, Store
from midstream.testing.store_fakes import Storage, open_store


class ImmediateContract:
    """The tests of a store that is `immediate`. Each one gets a fresh `place`."""

    pytestmark = pytest.mark.asyncio

    async def test_an_append_without_waiting_happens_whole_or_not_at_all(self, place: Storage) -> None:
        async with _claim_session(place) as (store, other, epoch):
            expected = [b"a"]
            for _ in range(3):
                end = _immediate(store).append_now("s", _batch(len(expected), epoch))
                assert end in (None, len(expected) + 1)
                expected += [b"now"] if end else []
                assert await _bodies(other) == expected, "it is there for all others when its end is returned"
                await store.append("s", Batch([b"b"], len(expected), epoch, Sync.NORMAL))
                expected.append(b"b")
            assert await _bodies(other) == expected

    async def test_nothing_is_appended_without_waiting_elsewhere_than_at_the_end(
        self, place: Storage
    ) -> None:
        async with _claim_session(place) as (store, other, epoch):
            for expected in (0, 2):
                assert _immediate(store).append_now("s", _batch(expected, epoch)) is None
            assert await _bodies(other) == [b"a"]

    async def test_nothing_is_appended_without_waiting_under_an_older_epoch(self, place: Storage) -> None:
        async with _claim_session(place) as (store, other, epoch):
            immediate = _immediate(store)
            for wrong in (epoch - 1, epoch + 1):
                assert immediate.append_now("s", _batch(1, wrong)) is None
            assert immediate.append_now("t", _batch(0, epoch)) is None
            await store.release("s", epoch=epoch)
            await other.claim("s", at=2.0)
            assert immediate.append_now("s", _batch(1, epoch)) is None
            assert await _bodies(other) == [b"a"]

    async def test_a_closed_store_appends_nothing_without_waiting(self, place: Storage) -> None:
        async with _claim_session(place) as (store, other, epoch):
            immediate = _immediate(store)
            await store.close()
            assert not immediate.is_ready
            assert immediate.append_now("s", _batch(1, epoch)) is None
            assert await _bodies(other) == [b"a"]


@asynccontextmanager
async def _claim_session(place: Storage) -> AsyncIterator[tuple[Store, Store, int]]:
    """Yield a store with a session and one record, another store of the same place, and the epoch."""
    async with open_store(place) as store, open_store(place) as other:
        epoch = await store.claim("s", at=1.0)
        await store.append("s", Batch([b"a"], 0, epoch, Sync.FULL))
        yield store, other, epoch


def _immediate(store: Store) -> Immediate:
    if store.immediate is None:
        pytest.skip("this store is not `immediate`")
    return store.immediate


def _batch(expected: int, epoch: int) -> Batch:
    return Batch([b"now"], expected, epoch, Sync.NORMAL)


async def _bodies(store: Store) -> list[bytes]:
    return [each.body for each in await store.read("s", after=0, limit=100)]
