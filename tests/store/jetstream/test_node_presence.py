"""Nodes that lose their connection: for a moment, and for longer than a lease."""

from __future__ import annotations

import asyncio
import gc

import pytest

from midstream.environment import World
from midstream.errors import LeaseHeldError, LeaseLostError, StoreBusyError
from midstream.store.jetstream import JetStreamStore
from tests.store.jetstream.jetstream_places import JetStreamPlace
from tests.store.jetstream.nats_relay import LEFT_TO_THE_COLLECTOR, NatsRelay
from tests.store.stores import append, bodies

WORLD = World()
WITHIN_S = 60.0


async def test_a_brief_loss_of_the_connection_costs_no_lease(
    place: JetStreamPlace, store: JetStreamStore
) -> None:
    async with NatsRelay(place).serving() as relay:
        brief = JetStreamStore(relay.url)
        await brief.open()
        epoch = await brief.claim("s", at=1.0)
        for end in range(3):
            relay.cut()
            with pytest.raises(LeaseHeldError):
                await store.claim("s", at=2.0)
            await _append(brief, end, epoch)
        assert len(await bodies(store)) == 3
        await brief.close()


@LEFT_TO_THE_COLLECTOR
async def test_a_node_presumed_dead_keeps_the_sessions_that_no_other_claimed(
    place: JetStreamPlace, store: JetStreamStore
) -> None:
    async with NatsRelay(place).serving() as relay:
        away = JetStreamStore(relay.url)
        await away.open()
        epochs = {name: await away.claim(name, at=1.0) for name in ("s", "t")}
        relay.is_up = False
        relay.cut()
        assert await store.claim("s", at=2.0) == epochs["s"] + 1
        relay.is_up = True
        async with asyncio.timeout(WITHIN_S):
            with pytest.raises(LeaseLostError):
                await _append(away, 0, epochs["s"])
            await _append(away, 0, epochs["t"], session="t")
            while True:  # Until it has put its entry back.
                try:
                    await store.claim("t", at=3.0)
                except LeaseHeldError:
                    break
                epochs["t"] = await _reclaim(away, store)
        await append(store, b"heir", expected=0, epoch=epochs["s"] + 1)
        assert await bodies(away) == [b"heir"]
        await away.close()
    gc.collect()


async def _append(store: JetStreamStore, end: int, epoch: int, session: str = "s") -> None:
    """Append a record as soon as the connection is there."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            try:
                assert await append(store, b"x", expected=end, epoch=epoch, session=session) == end + 1
            except StoreBusyError:
                await WORLD.sleep(0.01)
            else:
                return


async def _reclaim(store: JetStreamStore, heir: JetStreamStore) -> int:
    """Claim session `t` for a node again, which another one claimed first."""
    line = await heir.find("t")
    assert line is not None
    await heir.release("t", epoch=line.epoch)
    return await store.claim("t", at=3.0)
