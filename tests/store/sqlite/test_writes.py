"""The place of each append: on the event loop or on the thread, with a sync or without one."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import apsw
import pytest

from midstream.environment import World
from midstream.errors import StoreDamagedError, StoreFullError
from midstream.session.records import Sync
from midstream.store.contract import Batch
from midstream.store.sqlite.database import PAGE_BYTES
from midstream.store.sqlite.group_commit import IDLE_CHECKPOINT_PAGES, Durability
from midstream.store.sqlite.store import NOW_BYTES_MAX, SQLiteStore
from tests.store.disk import Disk
from tests.store.stores import append, bodies, claimed, copy_as_it_lies, found_in


class Neighbour(World):
    """Another process: it writes until an append waits for it."""

    def __init__(self) -> None:
        self.db: apsw.Connection | None = None
        self.waited_in: list[str] = []

    def chance(self) -> float:
        if self.db is not None:
            self.waited_in.append(threading.current_thread().name)
            self.db.close()
            self.db = None
        return 0.0


def _writer(store: SQLiteStore) -> apsw.Connection:
    assert store._opened is not None
    return store._opened.writer._db


# --- commits on the event loop


def _at_once(append: Coroutine[Any, Any, int]) -> int:
    """Return the result of an append that never yields to the event loop."""
    try:
        append.send(None)
    except StopIteration as answered:
        return int(answered.value)
    append.close()
    raise AssertionError("it waits")


async def test_a_small_unsynced_append_does_not_block(store: SQLiteStore) -> None:
    epoch = await store.claim("s", at=1.0)
    assert store.append_now("s", Batch([b"a"], 0, epoch, Sync.NORMAL)) is None
    assert await append(store, b"a", expected=0, epoch=epoch) == 1, "the first of an epoch is synced"
    assert _at_once(append(store, b"b", expected=1, epoch=epoch, sync=Sync.NORMAL)) == 2
    assert await bodies(store) == [b"a", b"b"]


async def test_a_record_is_appended_immediately_unless_another_append_waits(
    store: SQLiteStore,
) -> None:
    epoch = await store.claim("s", at=1.0)
    await append(store, b"a", expected=0, epoch=epoch)
    assert store.append_now("s", Batch([b"b"], 1, epoch, Sync.NORMAL)) == 2
    synced = asyncio.ensure_future(append(store, b"c", expected=2, epoch=epoch))
    await asyncio.sleep(0)
    overtaking = Batch([b"d"], 3, epoch, Sync.NORMAL)
    assert store.append_now("s", overtaking) is None, "it overtakes no other append"
    assert await synced == 3


async def test_a_commit_waits_for_another_process_off_the_event_loop(folder: Path) -> None:
    neighbour = Neighbour()
    store = SQLiteStore(folder / "x.db", world=neighbour)
    await store.open()
    neighbour.db = apsw.Connection(str(folder / "x.db"))
    neighbour.db.execute("begin immediate")
    assert await store.claim("s", at=1.0) == 1
    assert neighbour.waited_in == ["midstream-sqlite-writer"]
    await store.close()


async def test_a_failed_append_on_the_event_loop_leaves_nothing(folder: Path) -> None:
    disk = Disk("full at once")
    async with claimed(folder / "x.db", World(), vfs=disk.name, first=b"a") as (store, epoch):
        disk.is_full = True
        with pytest.raises(StoreFullError):
            await append(store, b"b", expected=1, epoch=epoch, sync=Sync.NORMAL)
        assert await bodies(store) == [b"a"]
        disk.is_full = False
        assert await append(store, b"c", expected=1, epoch=epoch, sync=Sync.NORMAL) == 2
    assert await found_in(folder / "x.db") == [b"a", b"c"]


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such limit")
async def test_the_limit_for_the_size_of_a_file_is_a_full_disk(folder: Path) -> None:
    import resource

    async with claimed(folder / "x.db", World(), first=b"a") as (store, epoch):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, before[1]))
        try:
            with pytest.raises(StoreFullError):
                await append(store, b"b", expected=1, epoch=epoch)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert await append(store, b"c", expected=1, epoch=epoch) == 2
    assert await found_in(folder / "x.db") == [b"a", b"c"]


async def test_a_large_append_does_not_run_on_the_event_loop(store: SQLiteStore) -> None:
    epoch = await store.claim("s", at=1.0)
    await append(store, b"a", expected=0, epoch=epoch)
    large = append(store, b"x" * (NOW_BYTES_MAX + 1), expected=1, epoch=epoch, sync=Sync.NORMAL)
    with pytest.raises(AssertionError, match="it waits"):
        _at_once(large)


# --- no space


async def test_a_full_disk_is_reported_and_changes_nothing(store: SQLiteStore) -> None:
    epochs = [await store.claim(session, at=1.0) for session in ("s", "t")]
    await append(store, b"a", expected=0, epoch=epochs[0])
    db = _writer(store)
    db.execute(f"pragma max_page_count = {db.pragma('page_count') + 2}")
    large = b"x" * 20 * PAGE_BYTES
    results = await asyncio.gather(
        append(store, b"b", large, expected=1, epoch=epochs[0]),
        append(store, b"c", expected=0, epoch=epochs[1], session="t"),
        return_exceptions=True,
    )
    assert [type(result) for result in results] == [StoreFullError, int], "small ones go on"
    assert await bodies(store) == [b"a"]
    assert await bodies(store, "t") == [b"c"]
    db.execute("pragma max_page_count = 1000000")
    assert await append(store, b"b", large, expected=1, epoch=epochs[0]) == 3


async def test_a_disk_that_runs_full_under_the_log_changes_nothing(folder: Path) -> None:
    disk = Disk("full")
    async with claimed(folder / "x.db", World(), vfs=disk.name, first=b"a") as (store, epoch):
        disk.is_full = True
        for _ in range(3):
            with pytest.raises(StoreFullError, match="free some"):
                await append(store, b"b", expected=1, epoch=epoch)
            assert await bodies(store) == [b"a"]
        disk.is_full = False
        assert await append(store, b"c", expected=1, epoch=epoch) == 2
    assert await found_in(folder / "x.db") == [b"a", b"c"]


async def test_an_append_with_a_failed_sync_never_reappears(folder: Path) -> None:
    """Its pages are complete in the log; only overwriting them keeps a later opening from reading them."""
    disk = Disk("broken")
    async with claimed(folder / "x.db", World(), vfs=disk.name, first=b"a") as (store, epoch):
        disk.is_sync_broken = True
        with pytest.raises(StoreDamagedError):
            await append(store, b"b", expected=1, epoch=epoch)
        assert await bodies(store) == [b"a"]
        copy = folder / "copy"
        copy_as_it_lies(folder, copy)
        assert await found_in(copy / "x.db") == [b"a"]
        disk.is_sync_broken = False
        assert await append(store, b"c", expected=1, epoch=epoch) == 2
    assert await found_in(folder / "x.db") == [b"a", b"c"]


# --- syncs


@pytest.mark.parametrize(
    ("durability", "syncs"), [("default", [1, 0]), ("power", [1, 1]), ("process", [0, 0])]
)
async def test_only_appends_that_request_a_sync_are_synced_and_once(
    folder: Path, durability: Durability, syncs: list[int]
) -> None:
    disk = Disk(f"syncs-{durability}")
    store = SQLiteStore(folder / "x.db", vfs=disk.name, durability=durability)
    await store.open()
    epoch = await store.claim("s", at=1.0)
    await append(store, b"first", expected=0, epoch=epoch)
    counted = []
    for end, sync in enumerate((Sync.FULL, Sync.NORMAL), start=1):
        before = disk.syncs()
        await append(store, b"x", expected=end, epoch=epoch, sync=sync)
        counted.append(disk.syncs() - before)
    assert counted == syncs
    await store.close()


async def test_concurrent_appends_share_a_sync(folder: Path) -> None:
    disk = Disk("shared")
    store = SQLiteStore(folder / "x.db", vfs=disk.name)
    await store.open()
    names = [f"s{number}" for number in range(30)]
    epochs = await asyncio.gather(*(store.claim(name, at=1.0) for name in names))
    before = disk.syncs()
    await asyncio.gather(
        *(
            append(store, b"x", expected=0, epoch=epoch, session=name)
            for name, epoch in zip(names, epochs, strict=True)
        )
    )
    assert disk.syncs() - before == 1
    await store.close()


async def test_an_append_that_was_alone_the_last_time_waits_for_no_other(folder: Path) -> None:
    disk = Disk("alone")
    store = SQLiteStore(folder / "x.db", vfs=disk.name)
    await store.open()
    names = [f"s{number}" for number in range(30)]
    epochs = [await store.claim(name, at=1.0) for name in names]
    asked = zip(names, epochs, strict=True)
    before = disk.syncs()
    await asyncio.gather(*(append(store, b"x", expected=0, epoch=each, session=name) for name, each in asked))
    assert disk.syncs() - before == 2  # The first at once, the 29 others together.
    await store.close()


async def test_a_step_syncs_once_and_writes_little(folder: Path) -> None:
    """The bar of design.md, section 6, for a side-effecting step; `bench.steps` measures it at length."""
    disk = Disk("step")
    store = SQLiteStore(folder / "x.db", vfs=disk.name)
    await store.open()
    epoch, end, steps = await store.claim("s", at=1.0), 0, 1000
    for _ in range(steps):
        end = await append(store, b"r" * 400, b"s" * 200, expected=end, epoch=epoch)
        results = (b"e" * 300, b"c" * 50, b"a" * 80)
        end = await append(store, *results, expected=end, epoch=epoch, sync=Sync.NORMAL)
    await store.close()
    assert disk.syncs() / steps <= 1.1
    assert disk.bytes_written() / steps <= 25_000


async def test_the_log_is_checkpointed_while_the_store_works(store: SQLiteStore, folder: Path) -> None:
    epoch = await store.claim("s", at=1.0)
    for number in range(2000):
        await append(store, b"x" * 900, expected=number, epoch=epoch, sync=Sync.NORMAL)
    log = (folder / "x.db-wal").stat().st_size
    assert log < 2 * IDLE_CHECKPOINT_PAGES * PAGE_BYTES
