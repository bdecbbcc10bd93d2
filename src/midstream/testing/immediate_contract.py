"""`midstream.store.contract.Immediate` as a test suite: a store that passes it may append words on the event loop.

Subclass `ImmediateContract` in a test file and give it a fixture `place`, as `midstream.testing.store_contract` says.
"""
# ruff: noqa: D102 - these are tests: a name is a promise, numbers speak for themselves

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from midstream.core.records import Sync
from midstream.store.contract import Immediate, Store
from midstream.testing.store_contract import Place, opened

OWN_WORDS = b"words"


class ImmediateContract:
    """The same for a store that is also `Immediate`. Each test gets a fresh `place`."""

    pytestmark = pytest.mark.asyncio

    async def test_an_append_at_once_happens_whole_or_is_to_be_asked_for(self, place: Place) -> None:
        async with _claimed(place) as (store, other, epoch):
            assert isinstance(store, Immediate)
            expected = [b"a"]
            for _ in range(3):
                end = len(expected)
                body = store.append_at_once("s", lambda: OWN_WORDS, expected=end, epoch=epoch)
                assert body in (None, OWN_WORDS)
                expected += [OWN_WORDS] if body else []
                assert await _bodies(other) == expected, "it is there for everybody when it is said to be"
                await store.append("s", [b"b"], expected=len(expected), epoch=epoch, sync=Sync.NORMAL)
                expected.append(b"b")
            assert await _bodies(other) == expected

    async def test_nothing_is_appended_at_once_elsewhere_than_at_the_end(self, place: Place) -> None:
        async with _claimed(place) as (store, other, epoch):
            assert isinstance(store, Immediate)
            for expected in (0, 2):
                assert store.append_at_once("s", lambda: OWN_WORDS, expected=expected, epoch=epoch) is None
            assert await _bodies(other) == [b"a"]

    async def test_nothing_is_appended_at_once_under_another_than_the_newest_epoch(
        self, place: Place
    ) -> None:
        async with _claimed(place) as (store, other, epoch):
            assert isinstance(store, Immediate)
            for wrong in (epoch - 1, epoch + 1):
                assert store.append_at_once("s", lambda: OWN_WORDS, expected=1, epoch=wrong) is None
            assert store.append_at_once("t", lambda: OWN_WORDS, expected=0, epoch=epoch) is None
            await store.release("s", epoch=epoch)
            await other.claim("s", at=2.0)
            assert store.append_at_once("s", lambda: OWN_WORDS, expected=1, epoch=epoch) is None
            assert await _bodies(other) == [b"a"]

    async def test_a_closed_store_appends_nothing_at_once(self, place: Place) -> None:
        async with _claimed(place) as (store, other, epoch):
            assert isinstance(store, Immediate)
            await store.close()
            assert store.append_at_once("s", lambda: OWN_WORDS, expected=1, epoch=epoch) is None
            assert await _bodies(other) == [b"a"]


@asynccontextmanager
async def _claimed(place: Place) -> AsyncIterator[tuple[Store, Store, int]]:
    """Yield a store that has claimed a session and appended a record to it, another one, and the epoch."""
    async with opened(place) as store, opened(place) as other:
        epoch = await store.claim("s", at=1.0)
        await store.append("s", [b"a"], expected=0, epoch=epoch, sync=Sync.FULL)
        yield store, other, epoch


async def _bodies(store: Store) -> list[bytes]:
    return [each.body for each in await store.read("s", after=0, limit=100)]
