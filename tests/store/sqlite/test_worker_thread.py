from __future__ import annotations

import asyncio
import threading

import pytest

from midstream.store.sqlite.worker_thread import WorkThread

WAIT_S = 60.0


async def test_work_is_done_in_order_on_one_other_thread() -> None:
    thread = WorkThread("worker")
    seen: list[int] = []

    def work(number: int) -> str:
        seen.append(number)
        return threading.current_thread().name

    async with asyncio.timeout(WAIT_S):
        names = await asyncio.gather(*(thread.submit(lambda n=n: work(n)) for n in range(100)))  # type: ignore[misc]
    assert seen == list(range(100))
    assert set(names) == {"worker"}
    thread.shut()


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3)])
async def test_an_exception_of_work_is_its_result_and_the_thread_continues(error: BaseException) -> None:
    thread = WorkThread("worker")

    def fail() -> None:
        raise error

    async with asyncio.timeout(WAIT_S):
        with pytest.raises(type(error)):
            await thread.submit(fail)
        assert await thread.submit(lambda: 3) == 3
    thread.shut()


async def test_cancelled_work_is_done_all_the_same() -> None:
    thread = WorkThread("worker")
    seen: list[int] = []
    thread.submit(lambda: seen.append(1)).cancel()
    async with asyncio.timeout(WAIT_S):
        await thread.submit(lambda: seen.append(2))
    assert seen == [1, 2]
    thread.shut()


def test_an_ended_event_loop_does_not_end_the_thread() -> None:
    thread = WorkThread("worker")
    release = threading.Event()

    async def ask() -> None:
        thread.submit(lambda: release.wait(WAIT_S))

    asyncio.run(ask())
    release.set()

    async def ask_again() -> int:
        async with asyncio.timeout(WAIT_S):
            return await thread.submit(lambda: 3)

    assert asyncio.run(ask_again()) == 3
    thread.shut()


async def test_a_thread_that_was_shut_finishes_the_submitted_work() -> None:
    thread = WorkThread("worker")
    answer = thread.submit(lambda: 3)
    thread.shut()
    async with asyncio.timeout(WAIT_S):
        assert await answer == 3
