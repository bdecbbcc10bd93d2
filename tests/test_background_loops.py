from __future__ import annotations

import asyncio
import logging

import pytest

from midstream.background_loops import spawn_loop
from midstream.retries import RECONNECT_BACKOFF
from midstream.testing import FakeWorld


async def test_a_loop_begins_again_after_each_defect_and_never_without_a_pause(
    caplog: pytest.LogCaptureFixture,
) -> None:
    begun_at: list[float] = []
    world = FakeWorld()

    async def loop() -> None:
        begun_at.append(world.monotonic())
        if len(begun_at) == 6:
            await asyncio.Event().wait()
        raise KeyError("a defect")

    task = spawn_loop(world, loop, name="the sweep")
    for _ in range(6):
        await world.advance(RECONNECT_BACKOFF.most_s)
    assert len(begun_at) == 6
    assert len({*begun_at}) == 6, "there is a pause before each"
    errors = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert [(each.message.split(":")[0], each.exc_info is not None) for each in errors] == [
        ("the sweep", True)
    ] * 5
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_a_loop_that_returns_has_ended() -> None:
    async def loop() -> None:
        return

    async with asyncio.timeout(60):
        await spawn_loop(FakeWorld(), loop, name="once")
