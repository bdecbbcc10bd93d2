"""One run of a session at a time, and the wait for a cancelled run."""

from __future__ import annotations

import asyncio

import pytest

from midstream.engine.active_runs import ActiveRuns
from midstream.errors import SessionBusyError


async def test_a_second_run_is_refused_while_the_first_is_active() -> None:
    runs = ActiveRuns()
    first = await runs.enter("s")
    with pytest.raises(SessionBusyError, match="running in this process"):
        await runs.enter("s")
    other = await runs.enter("other")
    assert (runs.leave("s", first), "s" in runs, "other" in runs) == (True, False, True)
    second = await runs.enter("s")
    assert (runs.leave("s", first), "s" in runs) == (False, True)  # the first run can append no more
    assert runs.leave("s", second)
    assert runs.leave("other", other)


async def test_a_cancelled_run_is_waited_for() -> None:
    runs, ends = ActiveRuns(), asyncio.Event()

    async def work() -> None:
        run = await runs.enter("s")
        try:
            await asyncio.Event().wait()
        finally:
            await ends.wait()
            runs.leave("s", run)

    first = asyncio.create_task(work())
    await asyncio.sleep(0)
    first.cancel()
    waiting = asyncio.create_task(runs.enter("s"))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    ends.set()
    run = await waiting
    assert runs.leave("s", run)
    await asyncio.wait([first])


async def test_the_wait_for_a_run_that_does_not_end_is_limited() -> None:
    runs = ActiveRuns(ending_s=0.02)

    async def work() -> None:
        await runs.enter("s")

    await asyncio.create_task(work())  # its task has ended without leaving the run
    with pytest.raises(SessionBusyError, match=r"has not ended within 0\.02 s"):
        await runs.enter("s")
