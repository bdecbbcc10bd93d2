from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path

import apsw
import pytest

from midstream.environment import World
from midstream.errors import (
    StoreBusyError,
    StoreDamagedError,
    UsageError,
)
from midstream.store.contract import Store
from midstream.store.sqlite import SQLiteStore
from midstream.store.sqlite.database import PAGE_BYTES, SCHEMA_VERSION
from midstream.testing.store_contract import StoreContract
from midstream.testing.store_fakes import Storage
from tests.store.stores import append, bodies, copy_as_it_lies


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
    def place(self, folder: Path) -> Storage:
        return FilePlace(folder)


# --- the file


async def test_all_files_are_private_to_this_user(store: SQLiteStore, folder: Path) -> None:
    await store.claim("s", at=1.0)
    assert {name: oct((folder / name).stat().st_mode & 0o777) for name in _names(folder)} == {
        "x.db": "0o600",
        "x.db-wal": "0o600",
        "x.db-shm": "0o600",
        "x.db.nodes": "0o700",
    }


async def test_after_closing_only_the_database_is_left(folder: Path) -> None:
    store = SQLiteStore(folder / "x.db")
    await store.open()
    epoch = await store.claim("s", at=1.0)
    await append(store, b"a", expected=0, epoch=epoch)
    await store.close()
    assert _names(folder) == ["x.db", "x.db.nodes"]
    assert _names(folder / "x.db.nodes") == []


async def test_the_tables_can_be_read_with_any_tool(store: SQLiteStore, folder: Path) -> None:
    epoch = await store.claim("s", at=1.0)
    await append(store, b'{"type":"x"}', expected=0, epoch=epoch)
    tool = apsw.Connection(str(folder / "x.db"), flags=apsw.SQLITE_OPEN_READONLY)
    assert tool.execute("select * from journal").fetchall() == [("s", 1, 1, '{"type":"x"}')]
    assert tool.pragma("page_size") == PAGE_BYTES
    assert tool.pragma("user_version") == SCHEMA_VERSION
    tool.close()


def test_an_unknown_durability_is_refused() -> None:
    with pytest.raises(UsageError, match="durability is one of"):
        SQLiteStore("x.db", durability="sometimes")  # type: ignore[arg-type]


async def test_damage_is_reported_and_does_not_stop_the_store(folder: Path) -> None:
    path = folder / "x.db"
    async with asyncio.timeout(60):
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


# --- other processes


async def test_a_locked_database_is_busy_and_then_works_again(store: SQLiteStore, folder: Path) -> None:
    epoch = await store.claim("s", at=1.0)
    other = apsw.Connection(str(folder / "x.db"))
    other.execute("begin immediate")
    with pytest.raises(StoreBusyError):
        await append(store, b"a", expected=0, epoch=epoch)
    assert await bodies(store) == [], "reading goes on"
    other.execute("rollback")
    other.close()
    assert await append(store, b"a", expected=0, epoch=epoch) == 1


async def test_a_foreign_write_at_our_position_is_a_conflict(store: SQLiteStore, folder: Path) -> None:
    epoch = await store.claim("s", at=1.0)
    await append(store, b"a", expected=0, epoch=epoch)
    _execute(folder / "x.db", f"insert into record values (1, 2, {epoch}, x'00', x'')")
    second = await store.claim("t", at=1.0)
    results = await asyncio.gather(
        append(store, b"b", expected=1, epoch=epoch),
        append(store, b"c", expected=0, epoch=second, session="t"),
        return_exceptions=True,
    )
    assert [type(result).__name__ for result in results] == ["JournalMovedError", "int"]
    assert await append(store, b"b", expected=2, epoch=epoch) == 3


# --- deleting


async def test_deleted_data_is_in_no_file_any_more(store: SQLiteStore, folder: Path) -> None:
    epoch = await store.claim("s", at=1.0)
    await append(store, b"a secret" * 1000, b"a secret", expected=0, epoch=epoch)
    await append(store, b"a secret", expected=2, epoch=epoch)
    await store.delete("s")
    copy = folder / "copy"
    copy_as_it_lies(folder, copy)
    found = [path.name for path in copy.rglob("*") if path.is_file() and b"a secret" in path.read_bytes()]
    assert found == []


# --- invalid callers


async def test_bodies_must_be_bytes_and_names_text(store: SQLiteStore) -> None:
    epoch = await store.claim("s", at=1.0)
    with pytest.raises(UsageError, match="bytes"):
        await append(store, "text", expected=0, epoch=epoch)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="Unicode"):
        await store.claim("\ud800", at=1.0)
    assert await append(store, b"a", expected=0, epoch=epoch) == 1


async def test_closing_waits_for_operations_that_wait_for_another_process(folder: Path) -> None:
    store = SQLiteStore(folder / "x.db")
    await store.open()
    epoch = await store.claim("s", at=1.0)
    other = apsw.Connection(str(folder / "x.db"))
    other.execute("begin immediate")
    appends = []
    for number in range(3):
        appending = append(store, b"x", expected=number, epoch=epoch)
        appends.append(asyncio.create_task(appending))
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
    async with asyncio.timeout(60):
        while _names(folder / "x.db.nodes"):  # noqa: ASYNC110 - files send no events
            await asyncio.sleep(0)


async def _make(path: Path, *, sessions: int = 1) -> None:
    store = SQLiteStore(path)
    await store.open()
    for number in range(sessions):
        epoch = await store.claim(f"s{number}", at=1.0)
        await append(store, b"x" * 900, expected=0, epoch=epoch, session=f"s{number}")
    await store.close()


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _execute(path: Path, sql: str) -> None:
    db = apsw.Connection(str(path))
    db.execute(sql)
    db.close()


async def test_a_cancelled_open_leaves_no_node(folder: Path) -> None:
    before = {*threading.enumerate()}
    opening = asyncio.create_task(SQLiteStore(folder / "x.db").open())
    await asyncio.sleep(0)  # the thread has its work
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    for thread in {*threading.enumerate()} - before:
        thread.join(60)
    assert _names(folder / "x.db.nodes") == []


@pytest.mark.skipif(sys.platform == "win32", reason="an open file cannot be moved")
async def test_a_database_that_is_moved_away_from_a_running_process_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def until(message: str) -> None:
        async with asyncio.timeout(60):
            while message not in caplog.text:
                await World().sleep(0.005)

    path, elsewhere = tmp_path / "x.db", tmp_path / "y.db"
    store = SQLiteStore(path)
    await store.open()
    path.rename(elsewhere)
    await until("deleted, moved or replaced")
    elsewhere.rename(path)
    await until("at its path again")
    await store.close()
    assert [each.levelname for each in caplog.records] == ["ERROR", "WARNING"]
