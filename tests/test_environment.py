from __future__ import annotations

import asyncio
import base64
import gc

import pytest

from midstream.environment import Fault, World


def test_ids_and_secrets_are_fresh_and_long() -> None:
    world = World()
    assert world.new_id("stream") != world.new_id("stream")
    assert world.new_id("stream").startswith("stream-")
    assert len(base64.urlsafe_b64decode(world.new_secret() + "=")) == 32


def test_clocks_advance_and_chance_is_in_its_range() -> None:
    world = World()
    assert world.monotonic() <= world.monotonic()
    assert world.now() > 1_700_000_000
    assert 0 <= world.chance() < 1


async def test_a_timer_fires_unless_it_was_cancelled() -> None:
    happened = asyncio.Event()
    World().later(0.0, happened.clear).cancel()
    World().later(0.0, happened.set)
    async with asyncio.timeout(60):
        await happened.wait()


async def test_spawned_work_is_a_named_task() -> None:
    async def work() -> int:
        await World().sleep(0)
        return 3

    task = World().spawn(work(), name="work")
    assert task.get_name() == "work"
    async with asyncio.timeout(60):
        assert await task == 3


def test_reaching_a_fault_point_does_nothing_in_the_real_world() -> None:
    world = World()
    for point in Fault:
        world.reach(point)


async def test_a_work_is_finished_although_its_caller_is_cancelled() -> None:
    begun, release, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        await release.wait()
        done.set()

    caller = asyncio.create_task(World().finish(work(), name="work"))
    await begun.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    gc.collect()
    release.set()
    async with asyncio.timeout(60):
        await done.wait()


async def test_the_first_exception_of_a_work_is_raised() -> None:
    async def fail() -> None:
        raise KeyError("a defect")

    with pytest.raises(KeyError):
        await World().finish(asyncio.sleep(0), fail(), name="work")
    await World().finish(name="nothing to do")
