"""Writes with a lost acknowledgement, and large ones."""

from __future__ import annotations

import asyncio
import gc

import pytest

from midstream.environment import World
from midstream.errors import JournalMovedError, LeaseLostError, StoreBusyError, UsageError
from midstream.session.records import Sync
from midstream.store.contract import Batch, SessionListing
from midstream.store.jetstream import JetStreamStore
from tests.store.jetstream.jetstream_places import JetStreamPlace
from tests.store.jetstream.nats_relay import LEFT_TO_THE_COLLECTOR, NatsRelay
from tests.store.stores import append, bodies

WORLD = World()
LARGE = [bytes([number]) * 400_000 for number in range(8)]


@pytest.mark.parametrize("has_mark", [False, True])
async def test_an_append_with_a_lost_acknowledgement_is_not_repeated(
    place: JetStreamPlace, *, has_mark: bool
) -> None:
    async with NatsRelay(place).serving() as relay:
        store = JetStreamStore(relay.url)
        await store.open()
        epoch = await store.claim("s", at=1.0)
        for number in range(3):
            relay.swallow_after = body = b"body %d" % number
            mark = SessionListing(is_live=False, at=1.0, turns=number) if has_mark else None
            assert await store.append("s", Batch([body], number, epoch, Sync.FULL, mark)) == number + 1
        assert relay.swallowed == 3
        assert await bodies(store) == [b"body 0", b"body 1", b"body 2"]
        await store.close()


async def test_an_append_with_a_lost_acknowledgement_is_fenced_by_another_node(
    place: JetStreamPlace, store: JetStreamStore
) -> None:
    async with NatsRelay(place).serving() as relay:
        slow = JetStreamStore(relay.url)
        await slow.open()
        epoch = await slow.claim("s", at=1.0)
        await append(slow, b"a", expected=0, epoch=epoch)
        await slow.release("s", epoch=epoch)
        assert await store.claim("s", at=2.0) == epoch + 1
        await append(store, b"b", expected=1, epoch=epoch + 1)
        with pytest.raises(LeaseLostError):
            await append(slow, b"late", expected=1, epoch=epoch)
        assert await bodies(store) == [b"a", b"b"]
        await slow.close()


@LEFT_TO_THE_COLLECTOR
async def test_nothing_is_written_while_the_connection_is_lost(place: JetStreamPlace) -> None:
    async with NatsRelay(place).serving() as relay:
        store = JetStreamStore(relay.url)
        await store.open()
        epoch = await store.claim("s", at=1.0)
        relay.is_up = False
        relay.cut()
        async with asyncio.timeout(60):
            while store._opened is not None and store._opened.link.is_connected:
                await WORLD.sleep(0)
        with pytest.raises(StoreBusyError):
            await append(store, b"a", expected=0, epoch=epoch)
        relay.is_up = True
        async with asyncio.timeout(60):
            while True:
                try:
                    await append(store, b"b", expected=0, epoch=epoch)
                    break
                except StoreBusyError:
                    await WORLD.sleep(0)
        assert await bodies(store) == [b"b"]
        await store.close()
    gc.collect()


async def test_an_append_larger_than_a_message_is_complete(store: JetStreamStore) -> None:
    epoch = await store.claim("s", at=1.0)
    await append(store, b"first", expected=0, epoch=epoch)
    await append(store, *LARGE, expected=1, epoch=epoch)
    await append(store, b"last", expected=9, epoch=epoch)
    assert await bodies(store) == [b"first", *LARGE, b"last"]
    assert [each.position for each in await store.read("s", after=4, limit=3)] == [5, 6, 7]
    with pytest.raises(JournalMovedError):
        await append(store, *LARGE, expected=1, epoch=epoch)


async def test_a_body_that_is_not_bytes_is_refused(store: JetStreamStore) -> None:
    epoch = await store.claim("s", at=1.0)
    with pytest.raises(UsageError):
        await append(store, "text", expected=0, epoch=epoch)  # type: ignore[arg-type]


async def test_a_claim_with_a_lost_acknowledgement_happens_once(place: JetStreamPlace) -> None:
    async with NatsRelay(place).serving() as relay:
        store = JetStreamStore(relay.url)
        await store.open()
        relay.swallow_after = b"the session"
        assert await store.claim("the session", at=1.0) == 1
        assert await store.claim("the session", at=1.0) == 2
        assert relay.swallowed == 1
        await store.close()
