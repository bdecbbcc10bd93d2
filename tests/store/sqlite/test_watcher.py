"""The thread of the watcher, on a scripted view of the database; the store contract covers real nodes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from midstream.environment import World
from midstream.errors import StoreBusyError
from midstream.store.contract import ForwardedCommand, News
from midstream.store.sqlite import inbox
from midstream.store.sqlite.inbox import FORWARDED_MAX, WatcherView
from midstream.store.sqlite.liveness import NodeLock, Peers
from midstream.store.sqlite.watcher import Watcher

WAIT_S = 60.0


class Tables:
    """The results of the queries."""

    def __init__(self) -> None:
        self.version = 1
        self.undecided: list[tuple[Any, ...]] = []
        self.orphans: list[tuple[Any, ...]] = []
        self.answers: list[tuple[Any, ...]] = []
        self.busy = 0
        self.defects = 0
        self.looks = 0
        self.threads: set[str] = set()

    def rows(self, query: str, values: tuple[Any, ...]) -> list[Any]:
        self.threads.add(threading.current_thread().name)
        if query == inbox.FIND_VERSION:
            self.looks += 1
            if self.busy:
                self.busy -= 1
                raise StoreBusyError("locked")
            if self.defects:
                self.defects -= 1
                raise KeyError("a defect")
            return [(self.version,)]
        found = {
            inbox.FIND_UNDECIDED: self.undecided,
            inbox.FIND_ORPHANS: self.orphans,
            inbox.FIND_ANSWERS: self.answers,
            inbox.FIND_ENDS: [],
            inbox.FIND_GIVEN_UP: [row[:2] for row in self.orphans if row[2] is None],
        }
        return list(found[query])

    @contextlib.contextmanager
    def view(self) -> Iterator[WatcherView]:
        yield WatcherView(self.rows)


@contextlib.asynccontextmanager
async def _watching(folder: Path, tables: Tables):  # type: ignore[no-untyped-def] # noqa: ANN202 - contextlib's
    lock = NodeLock(folder, "us")
    watcher = Watcher("us", Peers(folder, lock, lease_s=20.0), tables.view, lambda: 1, World())
    watcher.start()
    try:
        async with asyncio.timeout(WAIT_S):
            yield watcher
    finally:
        await watcher.close()
        lock.give_up()


async def test_the_database_is_not_polled_without_a_watcher(tmp_path: Path) -> None:
    tables = Tables()
    async with _watching(tmp_path, tables) as watcher:
        assert await watcher.watch({}) == News()
        looks = tables.looks
    assert (looks, tables.threads) == (1, {"midstream-store-watcher"})


async def test_commands_beyond_the_limit_of_one_poll_are_reported_by_the_next(tmp_path: Path) -> None:
    tables = Tables()
    tables.undecided = [(number, "s", b"x", "us", "us", 1) for number in range(FORWARDED_MAX + 1)]
    async with _watching(tmp_path, tables) as watcher:
        first, second = await watcher.watch({}), await watcher.watch({})
    assert len(first.forwarded_commands) == FORWARDED_MAX
    assert second.forwarded_commands == (ForwardedCommand(FORWARDED_MAX, "s", b"x", "us"),)


async def test_a_command_of_a_dead_sender_is_not_reported(tmp_path: Path) -> None:
    tables = Tables()
    tables.undecided = [(1, "s", b"x", "dead", "us", 1), (2, "s", b"y", "them", "us", 1)]
    them = NodeLock(tmp_path, "them")
    async with _watching(tmp_path, tables) as watcher:
        news = await watcher.watch({})
    them.give_up()
    assert news.forwarded_commands == (ForwardedCommand(2, "s", b"y", "them"),)


async def test_a_busy_store_is_polled_again(tmp_path: Path) -> None:
    tables = Tables()
    tables.busy = 3
    tables.orphans = [("s", 4, None)]
    async with _watching(tmp_path, tables) as watcher:
        assert (await watcher.watch({})).orphans == ("s",)


async def test_a_defect_in_a_check_does_not_end_the_checks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tables = Tables()
    tables.defects = 1
    async with _watching(tmp_path, tables) as watcher:
        assert await watcher.watch({}) == News()
    assert tables.defects == 0
    assert "KeyError: 'a defect'" in caplog.text


async def test_a_node_that_just_joined_is_not_taken_for_dead(tmp_path: Path) -> None:
    tables = Tables()
    tables.orphans = [("s", 4, "newcomer"), ("t", 1, "dead")]
    newcomer = NodeLock(tmp_path, "newcomer")
    async with _watching(tmp_path, tables) as watcher:
        news = await watcher.watch({})
    newcomer.give_up()
    assert news.orphans == ("t",)


async def test_an_answer_wakes_its_waiter(tmp_path: Path) -> None:
    tables = Tables()
    async with _watching(tmp_path, tables) as watcher:
        waiting = asyncio.ensure_future(watcher.answer_to(3))
        await asyncio.sleep(0)
        tables.answers = [(2, b"another's"), (3, b"ours")]
        tables.version += 1
        assert await waiting == b"ours"


async def test_closing_ends_all_waits(tmp_path: Path) -> None:
    async with _watching(tmp_path, Tables()) as watcher:
        await watcher.watch({})
        waiting = [asyncio.ensure_future(each) for each in (watcher.watch({}), watcher.answer_to(1))]
        await asyncio.sleep(0)
        await watcher.close()
        results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(result) for result in results] == [asyncio.CancelledError] * 2


async def test_a_folder_that_is_temporarily_unreadable_ends_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "nodes"
    async with _watching(folder, Tables()) as watcher:
        await watcher.watch({})
        folder.rename(tmp_path / "gone")
        waiting = asyncio.ensure_future(watcher.watch({"s": 1}))
        await asyncio.sleep(0)
        (tmp_path / "gone").rename(folder)
        assert (await waiting).moved == {"s"}
