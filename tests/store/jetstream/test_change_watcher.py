"""Changes with lost signals."""

from __future__ import annotations

import asyncio

from midstream.environment import World
from midstream.store.jetstream import JetStreamStore
from tests.store.jetstream.jetstream_places import JetStreamPlace
from tests.store.jetstream.nats_relay import NatsRelay
from tests.store.stores import append

WORLD = World()
WITHIN_S = 60.0


async def test_changes_during_a_lost_connection_are_found(
    place: JetStreamPlace, store: JetStreamStore
) -> None:
    epoch = await store.claim("s", at=1.0)
    async with NatsRelay(place).serving() as relay:
        follower = JetStreamStore(relay.url)
        await follower.open()
        for end in range(3):
            watching = WORLD.spawn(_moved(follower, {"s": end}), name="watch")
            await WORLD.sleep(0)
            relay.cut()
            await append(store, b"x", expected=end, epoch=epoch)
            async with asyncio.timeout(WITHIN_S):
                assert await watching == {"s"}
        await follower.close()


async def _moved(store: JetStreamStore, followed: dict[str, int]) -> frozenset[str]:
    while True:
        if moved := (await store.watch(followed)).moved:
            return moved
