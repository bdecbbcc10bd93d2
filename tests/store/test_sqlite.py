from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import apsw
import pytest

from midstream.core.records import Sync
from midstream.errors import (
    NotFoundError,
    StoreBusyError,
    StoreDamagedError,
    StoreFullError,
    UsageError,
)
from midstream.store.commits import IDLE_CHECKPOINT_PAGES, Durability
from midstream.store.contract import Store, Stored
from midstream.store.database import PAGE_BYTES, SCHEMA_VERSION
from midstream.store.sqlite import AT_ONCE_BYTES_MAX, SQLiteStore, reading
from midstream.testing.immediate_contract import ImmediateContract
from midstream.testing.shelf_contract import ShelfContract
from midstream.testing.store_contract import Place, StoreContract
from midstream.world import World
from tests.store.disk import Disk


class FilePlace:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "midstream.db"

    def store(self) -> Store:
        return SQLiteStore(self.path)

    def kill(self, store: Store) -> None:
        assert isinstance(store, SQLiteStore)
        assert store._opened is not None
        store._opened.lock.drop()


class TestSQLiteStore(StoreContract):
    @pytest.fixture
    def place(self, folder: Path) -> Place:
        return FilePlace(folder)


class TestSQLiteAtOnce(ImmediateContract):
    @pytest.fixture
    def place(self, folder: Path) -> Place:
        return FilePlace(folder)


class TestSQLiteShelf(ShelfContract):
    @pytest.fixture
    def place(self, folder: Path) -> Place:
        return FilePlace(folder)


class Impatient(World):
    """It waits as short as it may between tries."""

    def chance(self) -> float:
        return 0.0


class Neighbour(World):
    """Another process: it writes until somebody waits for it."""

    def __init__(self) -> None:
        self.db: apsw.Connection | None = None
        self.waited_in: list[str] = []

    def chance(self) -> float:
        if self.db is not None:
            self.waited_in.append(threading.current_thread().name)
            self.db.close()
            self.db = None
        return 0.0


@pytest.fixture
async def store(folder: Path) -> AsyncIterator[SQLiteStore]:
    """An open store at `folder / "x.db"`."""
    store = SQLiteStore(folder / "x.db", world=Impatient())
    await store.open()
    yield store
    await store.close()


async def _append(
    store: Store,
    *bodies: bytes,
    expected: int,
    epoch: int,
    sync: Sync = Sync.FULL,
    session: str = "s",
) -> int:
    return await store.append(session, bodies, expected=expected, epoch=epoch, sync=sync)


async def _bodies(store: Store, session: str = "s") -> list[bytes]:
    return [record.body for record in await store.read(session, after=0, limit=10_000)]


def _writer(store: SQLiteStore) -> apsw.Connection:
    assert store._opened is not None
    return store._opened.writer._db


# --- the file


async def test_all_files_are_this_users_only(store: SQLiteStore, folder: Path) -> None:
    await store.claim("s", at=1.0)
    assert {name: oct((folder / name).stat().st_mode & 0o777) for name in _names(folder)} == {
        "x.db": "0o600",
        "x.db-wal": "0o600",
        "x.db-shm": "0o600",
        "x.db.owners": "0o700",
    }


async def test_after_closing_only_the_database_is_left(folder: Path) -> None:
    store = SQLiteStore(folder / "x.db")
    await store.open()
    epoch = await store.claim("s", at=1.0)
    await _append(store, b"a", expected=0, epoch=epoch)
    await store.close()
    assert _names(folder) == ["x.db", "x.db.owners"]
    assert _names(folder / "x.db.owners") == []


async def test_the_tables_can_be_read_with_any_tool(store: SQLiteStore, folder: Path) -> None:
    epoch = await store.claim("s", at=1.0)
    await _append(store, b'{"type":"x"}', expected=0, epoch=epoch)
    tool = apsw.Connection(str(folder / "x.db"), flags=apsw.SQLITE_OPEN_READONLY)
    assert tool.execute("select * from journal").fetchall() == [("s", 1, 1, '{"type":"x"}')]
    assert tool.pragma("page_size") == PAGE_BYTES
    assert tool.pragma("user_version") == SCHEMA_VERSION
    tool.close()


def test_an_unknown_durability_is_refused() -> None:
    with pytest.raises(UsageError, match="durability is one of"):
        SQLiteStore("x.db", durability="sometimes")  # type: ignore[arg-type]


async def test_damage_is_said_and_does_not_stop_the_store(folder: Path) -> None:
    path = folder / "x.db"
    async with asyncio.timeout(30):
        await _make(path, sessions=40)
    content = bytearray(path.read_bytes())
    middle = len(content) // 2 // PAGE_BYTES * PAGE_BYTES
    content[middle : middle + 8 * PAGE_BYTES] = b"\xa5" * (8 * PAGE_BYTES)
    path.write_bytes(content)
    store = SQLiteStore(path)
    await store.open()
    results = await asyncio.gather(
        *(store.read(f"s{number}", after=0, limit=100) for number in range(40)),
        return_exceptions=True,
    )
    assert {type(result) for result in results} == {list, StoreDamagedError}
    await store.close()


# --- somebody else


async def test_a_locked_database_is_busy_and_then_works_again(store: SQLiteStore, folder: Path) -> None:
    epoch = await store.claim("s", at=1.0)
    other = apsw.Connection(str(folder / "x.db"))
    other.execute("begin immediate")
    with pytest.raises(StoreBusyError):
        await _append(store, b"a", expected=0, epoch=epoch)
    assert await _bodies(store) == [], "reading goes on"
    other.execute("rollback")
    other.close()
    assert await _append(store, b"a", expected=0, epoch=epoch) == 1


async def test_a_foreign_write_at_our_position_is_a_conflict(store: SQLiteStore, folder: Path) -> None:
    epoch = await store.claim("s", at=1.0)
    await _append(store, b"a", expected=0, epoch=epoch)
    _execute(folder / "x.db", f"insert into record values (1, 2, {epoch}, x'00')")
    second = await store.claim("t", at=1.0)
    results = await asyncio.gather(
        _append(store, b"b", expected=1, epoch=epoch),
        _append(store, b"c", expected=0, epoch=second, session="t"),
        return_exceptions=True,
    )
    assert [type(result).__name__ for result in results] == ["JournalMovedError", "int"]
    assert await _append(store, b"b", expected=2, epoch=epoch) == 3


# --- commits on the event loop


def _at_once(append: Coroutine[Any, Any, int]) -> int:
    """Return the answer of an append that lets nobody else have the event loop."""
    try:
        append.send(None)
    except StopIteration as answered:
        return int(answered.value)
    append.close()
    raise AssertionError("it waits")


async def test_a_small_append_that_nobody_syncs_holds_nobody_up(store: SQLiteStore) -> None:
    epoch = await store.claim("s", at=1.0)
    assert store.append_at_once("s", lambda: b"a", expected=0, epoch=epoch) is None
    assert await _append(store, b"a", expected=0, epoch=epoch) == 1, "the first of an epoch is synced"
    assert _at_once(_append(store, b"b", expected=1, epoch=epoch, sync=Sync.NORMAL)) == 2
    assert await _bodies(store) == [b"a", b"b"]


async def test_a_record_is_appended_here_and_now_and_not_even_made_where_somebody_was_first(
    store: SQLiteStore,
) -> None:
    epoch = await store.claim("s", at=1.0)
    await _append(store, b"a", expected=0, epoch=epoch)
    assert store.append_at_once("s", lambda: b"b", expected=1, epoch=epoch) == b"b"
    synced = asyncio.ensure_future(_append(store, b"c", expected=2, epoch=epoch))
    await asyncio.sleep(0)
    assert store.append_at_once("s", _refuse_to_be_made, expected=3, epoch=epoch) is None, (
        "it overtakes nobody"
    )
    assert await synced == 3


def _refuse_to_be_made() -> bytes:
    raise AssertionError("made")


async def test_an_append_waits_for_another_process_apart_from_the_event_loop(folder: Path) -> None:
    neighbour = Neighbour()
    store = SQLiteStore(folder / "x.db", world=neighbour)
    await store.open()
    epoch = await store.claim("s", at=1.0)
    await _append(store, b"a", expected=0, epoch=epoch)
    neighbour.db = apsw.Connection(str(folder / "x.db"))
    neighbour.db.execute("begin immediate")
    assert await _append(store, b"b", expected=1, epoch=epoch, sync=Sync.FULL) == 2
    assert neighbour.waited_in == ["midstream-sqlite-writer"]
    await store.close()


async def test_an_append_that_fails_on_the_event_loop_leaves_nothing(folder: Path) -> None:
    disk = Disk("full at once")
    store = SQLiteStore(folder / "x.db", vfs=disk.name)
    await store.open()
    epoch = await store.claim("s", at=1.0)
    await _append(store, b"a", expected=0, epoch=epoch)
    disk.is_full = True
    with pytest.raises(StoreFullError):
        await _append(store, b"b", expected=1, epoch=epoch, sync=Sync.NORMAL)
    assert await _bodies(store) == [b"a"]
    disk.is_full = False
    assert await _append(store, b"c", expected=1, epoch=epoch, sync=Sync.NORMAL) == 2
    await store.close()
    assert await _found_in(folder / "x.db") == [b"a", b"c"]


async def test_a_large_append_is_not_made_on_the_event_loop(store: SQLiteStore) -> None:
    epoch = await store.claim("s", at=1.0)
    await _append(store, b"a", expected=0, epoch=epoch)
    large = _append(store, b"x" * (AT_ONCE_BYTES_MAX + 1), expected=1, epoch=epoch, sync=Sync.NORMAL)
    with pytest.raises(AssertionError, match="it waits"):
        _at_once(large)


# --- no room


async def test_a_full_disk_is_said_and_changes_nothing(store: SQLiteStore) -> None:
    epochs = [await store.claim(session, at=1.0) for session in ("s", "t")]
    await _append(store, b"a", expected=0, epoch=epochs[0])
    db = _writer(store)
    db.execute(f"pragma max_page_count = {db.pragma('page_count') + 2}")
    large = b"x" * 20 * PAGE_BYTES
    results = await asyncio.gather(
        _append(store, b"b", large, expected=1, epoch=epochs[0]),
        _append(store, b"c", expected=0, epoch=epochs[1], session="t"),
        return_exceptions=True,
    )
    assert [type(result) for result in results] == [StoreFullError, int], "small ones go on"
    assert await _bodies(store) == [b"a"]
    assert await _bodies(store, "t") == [b"c"]
    db.execute("pragma max_page_count = 1000000")
    assert await _append(store, b"b", large, expected=1, epoch=epochs[0]) == 3


async def test_a_disk_that_runs_full_under_the_log_changes_nothing(folder: Path) -> None:
    disk = Disk("full")
    store = SQLiteStore(folder / "x.db", vfs=disk.name)
    await store.open()
    epoch = await store.claim("s", at=1.0)
    await _append(store, b"a", expected=0, epoch=epoch)
    disk.is_full = True
    for _ in range(3):
        with pytest.raises(StoreFullError, match="free some"):
            await _append(store, b"b", expected=1, epoch=epoch)
        assert await _bodies(store) == [b"a"]
    disk.is_full = False
    assert await _append(store, b"c", expected=1, epoch=epoch) == 2
    await store.close()
    assert await _found_in(folder / "x.db") == [b"a", b"c"]


async def test_an_append_whose_sync_failed_never_comes_back(folder: Path) -> None:
    """Its pages lie in the log, whole; only what is written over them keeps a later opening from reading them."""
    disk = Disk("broken")
    store = SQLiteStore(folder / "x.db", vfs=disk.name)
    await store.open()
    epoch = await store.claim("s", at=1.0)
    await _append(store, b"a", expected=0, epoch=epoch)
    disk.is_sync_broken = True
    with pytest.raises(StoreDamagedError):
        await _append(store, b"b", expected=1, epoch=epoch)
    assert await _bodies(store) == [b"a"]
    copy = folder / "copy"
    _copy_as_it_lies(folder, copy)
    assert await _found_in(copy / "x.db") == [b"a"]
    disk.is_sync_broken = False
    assert await _append(store, b"c", expected=1, epoch=epoch) == 2
    await store.close()
    assert await _found_in(folder / "x.db") == [b"a", b"c"]


# --- syncs


@pytest.mark.parametrize(
    ("durability", "syncs"), [("default", [1, 0]), ("power", [1, 1]), ("process", [0, 0])]
)
async def test_what_is_asked_to_be_synced_is_synced_once_and_nothing_else(
    folder: Path, durability: Durability, syncs: list[int]
) -> None:
    disk = Disk(f"syncs-{durability}")
    store = SQLiteStore(folder / "x.db", vfs=disk.name, durability=durability)
    await store.open()
    epoch = await store.claim("s", at=1.0)
    await _append(store, b"first", expected=0, epoch=epoch)
    counted = []
    for end, sync in enumerate((Sync.FULL, Sync.NORMAL), start=1):
        before = disk.syncs()
        await _append(store, b"x", expected=end, epoch=epoch, sync=sync)
        counted.append(disk.syncs() - before)
    assert counted == syncs
    await store.close()


async def test_those_who_ask_at_once_share_a_sync(folder: Path) -> None:
    disk = Disk("shared")
    store = SQLiteStore(folder / "x.db", vfs=disk.name)
    await store.open()
    names = [f"s{number}" for number in range(30)]
    epochs = await asyncio.gather(*(store.claim(name, at=1.0) for name in names))
    before = disk.syncs()
    await asyncio.gather(
        *(
            _append(store, b"x", expected=0, epoch=epoch, session=name)
            for name, epoch in zip(names, epochs, strict=True)
        )
    )
    assert disk.syncs() - before == 1
    await store.close()


async def test_who_was_alone_last_time_waits_for_no_company(folder: Path) -> None:
    disk = Disk("alone")
    store = SQLiteStore(folder / "x.db", vfs=disk.name)
    await store.open()
    names = [f"s{number}" for number in range(30)]
    epochs = [await store.claim(name, at=1.0) for name in names]
    asked = zip(names, epochs, strict=True)
    before = disk.syncs()
    await asyncio.gather(
        *(_append(store, b"x", expected=0, epoch=each, session=name) for name, each in asked)
    )
    assert disk.syncs() - before == 2  # the first at once, the 29 others together
    await store.close()


async def test_a_step_syncs_once_and_writes_little(folder: Path) -> None:
    """The bar of design.md, section 6, for a side-effecting step; `bench.steps` measures it at length."""
    disk = Disk("step")
    store = SQLiteStore(folder / "x.db", vfs=disk.name)
    await store.open()
    epoch, end, steps = await store.claim("s", at=1.0), 0, 1000
    for _ in range(steps):
        end = await _append(store, b"r" * 400, b"s" * 200, expected=end, epoch=epoch)
        results = (b"e" * 300, b"c" * 50, b"a" * 80)
        end = await _append(store, *results, expected=end, epoch=epoch, sync=Sync.NORMAL)
    await store.close()
    assert disk.syncs() / steps <= 1.1
    assert disk.bytes_written() / steps <= 25_000


async def test_the_log_is_copied_back_while_the_store_works(store: SQLiteStore, folder: Path) -> None:
    epoch = await store.claim("s", at=1.0)
    for number in range(2000):
        await _append(store, b"x" * 900, expected=number, epoch=epoch, sync=Sync.NORMAL)
    log = (folder / "x.db-wal").stat().st_size
    assert log < 2 * IDLE_CHECKPOINT_PAGES * PAGE_BYTES


# --- deleting


async def test_what_is_deleted_lies_nowhere_any_more(store: SQLiteStore, folder: Path) -> None:
    epoch = await store.claim("s", at=1.0)
    await _append(store, b"a secret" * 1000, b"a secret", expected=0, epoch=epoch)
    await store.delete("s")
    copy = folder / "copy"
    _copy_as_it_lies(folder, copy)
    found = [path.name for path in copy.iterdir() if b"a secret" in path.read_bytes()]
    assert found == []


# --- odd callers


async def test_bodies_are_bytes_and_names_are_text(store: SQLiteStore) -> None:
    epoch = await store.claim("s", at=1.0)
    with pytest.raises(UsageError, match="bytes"):
        await _append(store, "text", expected=0, epoch=epoch)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="Unicode"):
        await store.claim("\ud800", at=1.0)
    assert await _append(store, b"a", expected=0, epoch=epoch) == 1


async def test_closing_waits_for_those_who_wait_for_another_process(folder: Path) -> None:
    store = SQLiteStore(folder / "x.db")
    await store.open()
    epoch = await store.claim("s", at=1.0)
    other = apsw.Connection(str(folder / "x.db"))
    other.execute("begin immediate")
    appends = []
    for number in range(3):
        append = _append(store, b"x", expected=number, epoch=epoch)
        appends.append(asyncio.create_task(append))
        for _ in range(5):
            await asyncio.sleep(0)
    closing = asyncio.create_task(store.close())
    await asyncio.to_thread(other.execute, "rollback")
    other.close()
    assert await asyncio.gather(*appends) == [1, 2, 3]
    await closing


async def test_a_cancelled_close_still_closes(folder: Path) -> None:
    store = SQLiteStore(folder / "x.db")
    await store.open()
    await store.claim("s", at=1.0)
    closing = asyncio.create_task(store.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    async with asyncio.timeout(30):
        while _names(folder / "x.db.owners"):  # noqa: ASYNC110 - files send no events
            await asyncio.sleep(0)


# --- looking in from outside


async def test_a_reader_sees_what_a_working_store_has(store: SQLiteStore, folder: Path) -> None:
    epoch = await store.claim("s", at=1.0)
    await _append(store, b"a", expected=0, epoch=epoch)
    with reading(folder / "x.db") as reader:
        assert reader.records("s", 0, 10) == [Stored(1, epoch, b"a")]
        assert reader.lines(reader.numbers(None)) == [await store.find("s")]
    assert await _append(store, b"b", expected=1, epoch=epoch) == 2


def test_a_reader_makes_nothing(folder: Path) -> None:
    with pytest.raises(NotFoundError, match="no database"), reading(folder / "x.db"):
        pass
    (folder / "x.db").touch()
    with pytest.raises(NotFoundError, match="nothing was stored"), reading(folder / "x.db"):
        pass
    assert _names(folder) == ["x.db"]


async def _make(path: Path, *, sessions: int = 1) -> None:
    store = SQLiteStore(path)
    await store.open()
    for number in range(sessions):
        epoch = await store.claim(f"s{number}", at=1.0)
        await _append(store, b"x" * 900, expected=0, epoch=epoch, session=f"s{number}")
    await store.close()


async def _found_in(path: Path) -> list[bytes]:
    store = SQLiteStore(path)
    await store.open()
    try:
        return await _bodies(store)
    finally:
        await store.close()


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _execute(path: Path, sql: str) -> None:
    db = apsw.Connection(str(path))
    db.execute(sql)
    db.close()


def _copy_as_it_lies(folder: Path, copy: Path) -> None:
    """Copy the database and its log while they are in use, as a dead process leaves them.

    In another process: to close a file of SQLite's frees this process' locks on it.
    """
    copy.mkdir()
    files = [str(folder / name) for name in ("x.db", "x.db-wal")]
    assert os.spawnlp(os.P_WAIT, "cp", "cp", *files, str(copy)) == 0
