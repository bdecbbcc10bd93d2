"""Ctrl-C is counted and wakes the waiting task."""

from __future__ import annotations

import asyncio
import os
import signal

from midstream.cli.interrupts import Interrupts

WAIT_S = 60.0


async def test_every_ctrl_c_is_counted_and_wakes_the_waiting_task() -> None:
    before = signal.getsignal(signal.SIGINT)
    async with asyncio.timeout(WAIT_S):
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGINT)
            await interrupts.wait_for_count(1)
            waiting = asyncio.create_task(interrupts.wait_for_count(2))
            await asyncio.sleep(0)
            os.kill(os.getpid(), signal.SIGINT)
            await waiting
            assert interrupts.count == 2
            await interrupts.wait_for_count(1)
    assert signal.getsignal(signal.SIGINT) is before
