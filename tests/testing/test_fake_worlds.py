"""Worlds for tests behave as documented."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from midstream.environment import Fault
from midstream.testing.fake_worlds import Crashed, FakeWorld, KillingWorld


async def test_no_sleep_ends_before_the_clock_is_advanced() -> None:
    world = FakeWorld(at=100.0)
    woke: list[tuple[str, float]] = []

    async def nap(name: str, seconds: float) -> None:
        await world.sleep(seconds)
        woke.append((name, world.now()))
        if name == "short":
            await world.sleep(1.0)
            woke.append(("short again", world.monotonic()))

    async with asyncio.TaskGroup() as group:
        for name, seconds in (("long", 5.0), ("short", 2.0), ("never mind", 0.0)):
            group.create_task(nap(name, seconds))
        await world.settle()
        assert woke == [("never mind", 100.0)]
        assert world.next_wake_at == 102.0

        await world.advance(4.0)
        assert woke[1:] == [("short", 102.0), ("short again", 103.0)]
        assert world.now() == 104.0

        await world.advance(1.0)
        assert woke[3:] == [("long", 105.0)]
    assert world.next_wake_at is None


async def test_a_cancelled_sleep_is_dropped() -> None:
    world = FakeWorld()
    sleeper = asyncio.ensure_future(world.sleep(10.0))
    await world.settle()
    sleeper.cancel()
    await world.settle()
    assert world.next_wake_at is None
    await world.advance(20.0)


async def test_a_timer_fires_at_its_time_unless_it_was_cancelled() -> None:
    world = FakeWorld()
    happened: list[float] = []
    world.later(5.0, lambda: happened.append(world.now()))
    world.later(2.0, lambda: happened.append(world.now())).cancel()
    began_at = world.now()
    await world.advance(4.0)
    assert happened == []
    await world.advance(4.0)
    assert happened == [began_at + 5.0]
    assert world.next_wake_at is None


async def test_a_long_simulated_life_takes_no_real_time() -> None:
    world = FakeWorld(at=0.0)

    async def sleep_long() -> str:
        for _ in range(10):
            await world.sleep(3600.0)
        return "rested"

    assert await world.live_through(sleep_long()) == "rested"
    assert world.now() == 36_000.0


async def test_an_endless_simulated_life_is_ended() -> None:
    world = FakeWorld()
    with pytest.raises(TimeoutError, match="none sleeps"):
        await world.live_through(asyncio.Event().wait())

    async def sleep_for_ever() -> None:
        while True:
            await world.sleep(1.0)

    with pytest.raises(TimeoutError, match="5 sleepers"):
        await world.live_through(sleep_for_ever(), wakes_max=5)


def test_chance_and_ids_come_from_the_seed() -> None:
    def drawn(seed: int) -> list[object]:
        world = FakeWorld(seed)
        return [world.chance(), world.new_id("stream"), world.new_id("stream"), world.new_secret()]

    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(8)
    assert len(set(map(str, drawn(7)))) == 4


def test_a_world_crashes_at_its_fault_point_and_stays_dead() -> None:
    world = FakeWorld()
    world.crash_at(Fault.AFTER_APPEND, count=2)
    world.reach(Fault.AFTER_APPEND)
    world.reach(Fault.BEFORE_APPEND)
    assert world.reached.total() == 2
    for point in (Fault.AFTER_APPEND, Fault.BEFORE_APPEND):
        with pytest.raises(Crashed):
            world.reach(point)
    assert world.is_dead
    assert world.reached == {Fault.AFTER_APPEND: 2, Fault.BEFORE_APPEND: 2}


PROGRAM = """
import sys
from midstream.testing.fake_worlds import KillingWorld
from midstream.environment import Fault
world = KillingWorld(Fault.BEFORE_TOOL, 2, report_to=1)
world.reach(Fault.BEFORE_APPEND)
world.reach(Fault.BEFORE_TOOL)
world.reach(Fault.BEFORE_TOOL)
print("never")
"""


def test_a_killing_world_kills_its_process_and_reports_the_point() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, timeout=30, check=False)
    assert done.returncode == -signal.SIGKILL
    output = [line.split()[:2] for line in done.stdout.splitlines()]
    assert output == [[b"before_append", b"1"], [b"before_tool", b"1"], [b"before_tool", b"2"]]


def test_without_a_fault_point_a_killing_world_only_counts() -> None:
    read_end, write_end = os.pipe()
    world = KillingWorld(None, report_to=write_end)
    world.reach(Fault.BEFORE_ACK)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as report:
        assert report.read().startswith(b"before_ack 1 ")
    assert world.reached == {Fault.BEFORE_ACK: 1}
