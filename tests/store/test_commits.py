from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any, Self

import apsw
import pytest

from midstream.core.records import Sync
from midstream.errors import JournalMovedError
from midstream.store.commits import HERE_SHARE, IDLE_CHECKPOINT_PAGES, Asked, Commits, Durability, Way
from midstream.store.thread import WorkThread
from midstream.world import World

WAIT_S = 10.0
LOOP, THREAD = "loop", "thread"


class Clock(World):
    """It goes when it is told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


class Scribe:
    """A writer that notes where it commits, and how many at a time."""

    def __init__(self) -> None:
        self.log_pages = 0
        self.commits: list[tuple[str, int]] = []
        self.is_neighbour_writing = False
        self.bug: BaseException | None = None

    def commit(self, batch: Sequence[Asked]) -> list[Any]:
        self.commits.append((_here(), len(batch)))
        if self.bug is not None:
            raise self.bug
        return [_answer(asked.write) for asked in batch]

    def commit_if_free(self, batch: Sequence[Asked]) -> list[Any]:
        if self.is_neighbour_writing:
            raise apsw.BusyError
        return self.commit(batch)

    def checkpoint(self) -> None:
        self.commits.append((_here(), 0))
        self.log_pages = 0

    def clear_log(self) -> None:
        self.checkpoint()


def _here() -> str:
    return LOOP if threading.current_thread() is threading.main_thread() else THREAD


def _answer(write: Callable[[], Any]) -> Any:  # noqa: ANN401 - as operations have them
    try:
        return write()
    except JournalMovedError as refused:
        return refused


class Bench:
    """Commits that have made one, of one operation: the next one is likely to be alone."""

    def __init__(self, durability: Durability = "default") -> None:
        self.scribe, self.clock, self.thread = Scribe(), Clock(), WorkThread("commits")
        self.commits = Commits(self.scribe, self.thread, durability, self.clock)

    async def __aenter__(self) -> Self:
        await self.after(self.commits.ask(lambda: None, Sync.NORMAL))
        self.scribe.commits.clear()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.after(asyncio.ensure_future(self.commits.finish()))
        self.thread.shut()

    @staticmethod
    async def after(answer: asyncio.Future[Any]) -> Any:  # noqa: ANN401 - as operations have them
        return await asyncio.wait_for(answer, WAIT_S)

    async def small(self) -> str:
        """Let a small operation be committed, and say where that was done."""
        return str(await self.after(self.commits.ask(_here, Sync.NORMAL, Way.HERE)))


async def test_a_small_one_that_is_alone_is_committed_where_it_is_asked_for() -> None:
    async with Bench() as bench:
        answer = bench.commits.ask(lambda: 7, Sync.NORMAL, Way.HERE)
        assert answer.result() == 7
        assert bench.scribe.commits == [(LOOP, 1)]


@pytest.mark.parametrize(
    ("sync", "way"), [(Sync.FULL, Way.HERE), (Sync.NORMAL, Way.SHARED), (Sync.NORMAL, Way.ALONE)]
)
async def test_what_waits_for_the_disk_or_is_not_small_is_the_threads(sync: Sync, way: Way) -> None:
    async with Bench() as bench:
        assert await bench.after(bench.commits.ask(_here, sync, way)) == THREAD


@pytest.mark.parametrize(
    ("durability", "sync", "where"), [("power", Sync.NORMAL, THREAD), ("process", Sync.FULL, LOOP)]
)
async def test_the_durability_of_the_store_says_what_waits_for_the_disk(
    durability: Durability, sync: Sync, where: str
) -> None:
    async with Bench(durability) as bench:
        assert await bench.after(bench.commits.ask(_here, sync, Way.HERE)) == where


async def test_behind_a_commit_on_the_thread_all_wait() -> None:
    async with Bench() as bench:
        may_go_on, order = threading.Event(), list[int]()
        slow = bench.commits.ask(lambda: order.append(may_go_on.wait(WAIT_S)), Sync.FULL)
        small = bench.commits.ask(lambda: order.append(2), Sync.NORMAL, Way.HERE)
        assert not small.done()
        may_go_on.set()
        await bench.after(slow)
        await bench.after(small)
        assert order == [True, 2]
        assert bench.scribe.commits == [(THREAD, 1), (THREAD, 1)]


async def test_nothing_is_committed_here_while_the_log_is_cleared() -> None:
    async with Bench() as bench:
        may_go_on = threading.Event()
        working = bench.thread.ask(lambda: may_go_on.wait(WAIT_S))
        small = bench.commits.ask(_here, Sync.NORMAL, Way.HERE)
        may_go_on.set()
        assert await bench.after(small) == THREAD
        await bench.after(working)


async def test_the_first_commit_of_a_new_log_is_the_threads() -> None:
    """It syncs the log's head, whatever it is asked to sync."""
    async with Bench() as bench:
        await bench.commits.clear_log()
        assert [await bench.small(), await bench.small()] == [THREAD, LOOP]


async def test_a_long_log_is_copied_back_on_the_thread() -> None:
    async with Bench() as bench:
        bench.scribe.log_pages = IDLE_CHECKPOINT_PAGES + 1
        assert [await bench.small(), await bench.small(), await bench.small()] == [LOOP, THREAD, LOOP]
        assert bench.scribe.commits == [(LOOP, 1), (THREAD, 0), (THREAD, 1), (LOOP, 1)]


async def test_after_a_slow_write_commits_are_the_threads_for_a_while() -> None:
    async with Bench() as bench:

        def be_slow() -> None:
            bench.clock.now_s += 0.1

        await bench.after(bench.commits.ask(be_slow, Sync.NORMAL, Way.HERE))
        assert await bench.small() == THREAD
        bench.clock.now_s += 0.1 / HERE_SHARE - 0.1 - 0.01
        assert await bench.small() == THREAD
        bench.clock.now_s += 0.02
        assert await bench.small() == LOOP


async def test_those_who_shared_a_commit_share_the_next_one() -> None:
    async with Bench() as bench:
        first = bench.commits.ask(_here, Sync.FULL)
        others = [bench.commits.ask(_here, Sync.NORMAL, Way.HERE) for _ in range(3)]
        await bench.after(asyncio.ensure_future(asyncio.wait([first, *others])))
        again = [bench.commits.ask(_here, Sync.NORMAL, Way.HERE) for _ in range(3)]
        await bench.after(asyncio.ensure_future(asyncio.wait(again)))
        assert bench.scribe.commits == [(THREAD, 1), (THREAD, 3), (THREAD, 3)]


async def test_who_meets_a_neighbour_that_writes_waits_on_the_thread() -> None:
    async with Bench() as bench:
        bench.scribe.is_neighbour_writing = True
        assert await bench.small() == THREAD
        assert bench.scribe.commits == [(THREAD, 1)]


async def test_a_refusal_and_a_bug_are_the_answer_and_the_next_one_is_committed() -> None:
    async with Bench() as bench:

        def refuse() -> None:
            raise JournalMovedError("moved")

        with pytest.raises(JournalMovedError):
            await bench.after(bench.commits.ask(refuse, Sync.NORMAL, Way.HERE))
        bench.scribe.bug = ZeroDivisionError()
        with pytest.raises(ZeroDivisionError):
            await bench.after(bench.commits.ask(_here, Sync.NORMAL, Way.HERE))
        bench.scribe.bug = None
        assert await bench.small() == LOOP


@pytest.mark.parametrize("seed", range(5))
async def test_all_are_committed_in_the_order_in_which_they_were_asked_for(seed: int) -> None:
    chance, order = random.Random(seed), list[int]()
    async with Bench() as bench:
        asked = []
        for number in range(400):
            sync = chance.choice([Sync.NORMAL, Sync.NORMAL, Sync.FULL])
            way = chance.choice([Way.HERE, Way.HERE, Way.HERE, Way.SHARED, Way.ALONE])
            asked.append(bench.commits.ask(lambda number=number: order.append(number), sync, way))  # type: ignore[misc]
            bench.scribe.is_neighbour_writing = chance.random() < 0.1
            if chance.random() < 0.02:
                bench.scribe.log_pages = IDLE_CHECKPOINT_PAGES + 1
            if chance.random() < 0.5:
                await bench.after(asked[-1])
        await bench.after(asyncio.ensure_future(asyncio.wait(asked)))
        assert order == list(range(400))
        assert {where for where, _ in bench.scribe.commits} == {LOOP, THREAD}
