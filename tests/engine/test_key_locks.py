from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from midstream.engine.key_locks import KeyLocks
from midstream.testing import FakeWorld


async def test_waiters_enter_in_order() -> None:
    world, order = FakeWorld(), list[str]()
    locks = KeyLocks(world, wait_s=10.0)

    async def work(name: str) -> None:
        assert await locks.enter("k")
        order.append(f"{name} in")
        await world.sleep(1.0)
        order.append(f"{name} out")
        locks.leave("k")

    await world.live_through(_all(work("a"), work("b"), work("c")))
    assert order == ["a in", "a out", "b in", "b out", "c in", "c out"]
    assert not locks.is_held("k")


async def test_other_keys_do_not_wait() -> None:
    locks = KeyLocks(FakeWorld(), wait_s=10.0)
    assert await locks.enter("a")
    assert await locks.enter("b")


async def test_a_waiter_proceeds_without_the_lock_after_its_limit() -> None:
    world = FakeWorld()
    locks = KeyLocks(world, wait_s=10.0)
    assert await locks.enter("k")
    late = world.spawn(locks.enter("k"), name="late")
    await world.settle()
    await world.advance(10.0)
    assert late.result() is False
    locks.leave("k")
    assert not locks.is_held("k")


async def test_a_cancelled_wait_does_not_block_the_others() -> None:
    world = FakeWorld()
    locks = KeyLocks(world, wait_s=10.0)
    assert await locks.enter("k")
    gone, next_one = (world.spawn(locks.enter("k"), name=name) for name in ("gone", "next"))
    await world.settle()
    gone.cancel()
    await world.settle()
    locks.leave("k")
    await world.settle()
    assert next_one.result() is True


async def test_a_waiter_cancelled_while_it_receives_the_lock_passes_it_on() -> None:
    world = FakeWorld()
    locks = KeyLocks(world, wait_s=10.0)
    assert await locks.enter("k")
    gone, next_one = (world.spawn(locks.enter("k"), name=name) for name in ("gone", "next"))
    await world.settle()
    locks.leave("k")
    gone.cancel()
    await world.settle()
    assert next_one.result() is True


async def _all(*works: Coroutine[Any, Any, None]) -> None:
    await asyncio.gather(*works)
