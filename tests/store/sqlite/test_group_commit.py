from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self, TypeVar

import pytest

from midstream.environment import World
from midstream.errors import JournalMovedError
from midstream.session.records import Sync
from midstream.store.sqlite.group_commit import (
    AT_ONCE_SHARE,
    IDLE_CHECKPOINT_PAGES,
    Commits,
    Durability,
    QueuedOperation,
)
from midstream.store.sqlite.worker_thread import WorkThread

T = TypeVar("T")

WAIT_S = 60.0
LOOP, THREAD = "loop", "thread"


class ManualClock(World):
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


class Scribe:
    """A writer that records where and how many it commits; 0 for a checkpoint of the log."""

    def __init__(self) -> None:
        self.log_pages = 0
        self.commits: list[tuple[str, int]] = []
        self.bug: BaseException | None = None

    def commit(self, batch: Sequence[QueuedOperation], *, is_patient: bool = True) -> list[Any]:
        assert is_patient is (_thread_kind() == THREAD)
        self.commits.append((_thread_kind(), len(batch)))
        if self.bug is not None:
            raise self.bug
        return [_answer(asked.write) for asked in batch]

    def checkpoint(self) -> None:
        self.commits.append((_thread_kind(), 0))
        self.log_pages = 0

    def clear_log(self) -> None:
        self.checkpoint()


def _thread_kind() -> str:
    return LOOP if threading.current_thread() is threading.main_thread() else THREAD


def _answer(write: Callable[[], Any]) -> Any:  # noqa: ANN401 - as operations have them
    try:
        return write()
    except JournalMovedError as refused:
        return refused


class CommitBench:
    """Commits that have made one, of one operation: the next one is likely to be alone."""

    def __init__(self, durability: Durability = "default") -> None:
        self.scribe, self.clock, self.thread = Scribe(), ManualClock(), WorkThread("commits")
        self.commits = Commits(self.scribe, self.thread, durability, self.clock)

    async def __aenter__(self) -> Self:
        await self.after(self.commits.submit(_thread_kind, Sync.NORMAL))
        self.scribe.commits.clear()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.after(asyncio.ensure_future(self.commits.finish()))
        self.thread.shut()

    @staticmethod
    async def after(answer: asyncio.Future[Any]) -> Any:  # noqa: ANN401 - as operations have them
        return await asyncio.wait_for(answer, WAIT_S)

    async def run_and_locate(self, sync: Sync = Sync.NORMAL) -> str:
        """Commit an operation that may run on the loop, and return where it ran."""
        return str(await self.after(self.ask(_thread_kind, sync)))

    def ask(self, write: Callable[[], T], sync: Sync) -> asyncio.Future[T]:
        """Submit an operation that may run on the loop, as a store does."""
        answer = asyncio.get_running_loop().create_future()
        if (done := self.commits.now(write, sync)) is None:
            return self.commits.submit(write, sync)
        answer.set_result(done)
        return answer


async def test_a_single_operation_is_committed_on_the_event_loop() -> None:
    async with CommitBench() as bench:
        answer = bench.ask(_thread_kind, Sync.NORMAL)
        assert answer.result() == LOOP
        assert bench.scribe.commits == [(LOOP, 1)]


async def test_an_operation_that_waits_for_the_disk_is_committed_on_the_thread() -> None:
    async with CommitBench() as bench:
        assert await bench.run_and_locate(Sync.FULL) == THREAD


@pytest.mark.parametrize(
    ("durability", "sync", "place"), [("power", Sync.NORMAL, THREAD), ("process", Sync.FULL, LOOP)]
)
async def test_the_durability_of_the_store_decides_which_operations_wait_for_the_disk(
    durability: Durability, sync: Sync, place: str
) -> None:
    async with CommitBench(durability) as bench:
        assert await bench.run_and_locate(sync) == place


async def test_all_operations_wait_behind_a_commit_on_the_thread() -> None:
    async with CommitBench() as bench:
        may_continue = threading.Event()
        slow = bench.commits.submit(lambda: may_continue.wait(WAIT_S), Sync.FULL)
        behind = bench.ask(_thread_kind, Sync.NORMAL)
        assert not behind.done()
        may_continue.set()
        assert [await bench.after(slow), await bench.after(behind)] == [True, THREAD]
        assert bench.scribe.commits == [(THREAD, 1), (THREAD, 1)]


async def test_no_operation_overtakes_those_whose_commit_the_loop_has_not_noticed() -> None:
    async with CommitBench() as bench:
        order: list[int] = []
        asked = [bench.commits.submit(partial(order.append, number), Sync.FULL) for number in range(2)]
        until = time.monotonic() + WAIT_S
        while bench.thread.is_at_work:  # The loop does not continue meanwhile.
            assert time.monotonic() < until
        asked.append(bench.ask(partial(order.append, 2), Sync.NORMAL))
        await bench.after(asyncio.ensure_future(asyncio.wait(asked)))
        assert order == [0, 1, 2]


async def test_nothing_is_committed_on_the_loop_while_the_thread_is_busy() -> None:
    async with CommitBench() as bench:
        may_continue = threading.Event()
        working = bench.thread.submit(lambda: may_continue.wait(WAIT_S))
        behind = bench.ask(_thread_kind, Sync.NORMAL)
        may_continue.set()
        assert [await bench.after(working), await bench.after(behind)] == [True, THREAD]


async def test_the_first_commit_of_a_new_log_runs_on_the_thread() -> None:
    """It syncs the log's head, whatever sync was requested."""
    async with CommitBench() as bench:
        await bench.commits.clear_log()
        assert [await bench.run_and_locate(), await bench.run_and_locate()] == [THREAD, LOOP]


async def test_a_long_log_is_checkpointed_on_the_thread() -> None:
    async with CommitBench() as bench:
        bench.scribe.log_pages = IDLE_CHECKPOINT_PAGES + 1
        assert [await bench.run_and_locate(), await bench.run_and_locate(), await bench.run_and_locate()] == [
            LOOP,
            THREAD,
            LOOP,
        ]
        assert bench.scribe.commits == [(LOOP, 1), (THREAD, 0), (THREAD, 1), (LOOP, 1)]


async def test_after_a_slow_write_commits_run_on_the_thread_for_a_while() -> None:
    async with CommitBench() as bench:

        def be_slow() -> str:
            bench.clock.now_s += 0.1
            return LOOP

        await bench.after(bench.ask(be_slow, Sync.NORMAL))
        assert await bench.run_and_locate() == THREAD
        bench.clock.now_s += 0.1 / AT_ONCE_SHARE - 0.1 - 0.01
        assert await bench.run_and_locate() == THREAD
        bench.clock.now_s += 0.02
        assert await bench.run_and_locate() == LOOP


async def test_operations_that_shared_a_commit_share_the_next_one() -> None:
    async with CommitBench() as bench:
        asked = [bench.commits.submit(_thread_kind, Sync.FULL) for _ in range(4)]
        await bench.after(asyncio.ensure_future(asyncio.wait(asked)))
        asked = [bench.ask(_thread_kind, Sync.NORMAL) for _ in range(3)]
        await bench.after(asyncio.ensure_future(asyncio.wait(asked)))
        assert bench.scribe.commits == [(THREAD, 1), (THREAD, 3), (THREAD, 3)]


@pytest.mark.parametrize(("durability", "is_ready"), [("default", True), ("power", False)])
async def test_an_immediate_commit_is_attempted_only_while_nothing_is_committed_elsewhere(
    durability: Durability,
    is_ready: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    async with CommitBench(durability) as bench:
        assert bench.commits.is_ready is is_ready
        answer = bench.commits.submit(_thread_kind, Sync.FULL)
        assert not bench.commits.is_ready
        await bench.after(answer)
        assert bench.commits.is_ready is is_ready


async def test_an_immediate_commit_that_is_refused_must_be_submitted() -> None:
    async with CommitBench() as bench:

        def refuse() -> None:
            raise JournalMovedError("moved")

        assert bench.commits.now(refuse, Sync.NORMAL) is None
        assert await bench.run_and_locate() == LOOP


async def test_a_refusal_and_a_bug_are_results_and_the_next_operation_is_committed() -> None:
    async with CommitBench() as bench:

        def refuse() -> None:
            raise JournalMovedError("moved")

        with pytest.raises(JournalMovedError):
            await bench.after(bench.commits.submit(refuse, Sync.NORMAL))
        bench.scribe.bug = ZeroDivisionError()
        with pytest.raises(ZeroDivisionError):
            await bench.after(bench.commits.submit(_thread_kind, Sync.FULL))
        bench.scribe.bug = None
        assert [await bench.run_and_locate(Sync.FULL), await bench.run_and_locate()] == [THREAD, LOOP]


@pytest.mark.parametrize("seed", range(5))
async def test_all_operations_are_committed_in_the_order_of_their_submission(seed: int) -> None:
    chance, order, places = random.Random(seed), list[int](), set[str]()
    async with CommitBench() as bench:

        def write(number: int) -> bool:
            order.append(number)
            places.add(_thread_kind())
            return True

        asked = []
        for number in range(400):
            do = partial(write, number)
            sync = chance.choice([Sync.NORMAL, Sync.NORMAL, Sync.FULL])
            if chance.random() < 0.4:
                asked.append(bench.ask(do, sync))
            else:
                asked.append(bench.commits.submit(do, sync, is_alone=chance.random() < 0.2))
            if chance.random() < 0.02:
                bench.scribe.log_pages = IDLE_CHECKPOINT_PAGES + 1
            if chance.random() < 0.5:
                await bench.after(asked[-1])
        await bench.after(asyncio.ensure_future(asyncio.wait(asked)))
        assert order == list(range(400))
        assert places == {LOOP, THREAD}
