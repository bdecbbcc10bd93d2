"""Revocations: times that only rise, for one principal or for all, and a number for watchers."""

from __future__ import annotations

from midstream.server.auth.revocations import EVERYONE, Revocations
from midstream.store.memory import MemoryStore
from midstream.testing.fake_worlds import FakeWorld
from tests.spec import spec


@spec("SEC-6")
async def test_a_lock_out_is_stored_with_its_time_and_announced() -> None:
    store, world = MemoryStore(), FakeWorld()
    await store.open()
    revocations = Revocations(store, world)
    assert (await revocations.locked_out_at(":ada"), await revocations.newest()) == (0.0, 0)
    for _ in range(2):
        await revocations.lock_out(":ada")
    assert await revocations.locked_out_at(":ada") == world.now()
    assert await revocations.locked_out_at("other:ada") == 0.0
    seen = await Revocations(store, world).newest()
    await revocations.announce()
    assert await Revocations(store, world).newest() > seen
    await world.advance(5)
    await revocations.lock_out(EVERYONE)
    assert await revocations.locked_out_at("other:ada") == world.now()
