"""Creation, migration and refusal of the file of a store."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from midstream.environment import World
from midstream.errors import MidstreamError, StoreDamagedError, UsageError
from midstream.store.contract import KeyValueEntry
from midstream.store.sqlite import SQLiteStore
from midstream.store.sqlite.database import PRERELEASE_ID, SCHEMA_VERSION, DatabaseFile
from midstream.store.sqlite.reads import reading


async def test_a_missing_folder_is_reported_and_not_created(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"x\.db' cannot be created: No such file"):
        await SQLiteStore(folder / "no" / "x.db").open()
    assert _names(folder) == []


async def test_a_folder_is_refused_as_a_database(folder: Path) -> None:
    with pytest.raises(UsageError, match="not a regular file"):
        await SQLiteStore(folder).open()


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"This is a shopping list.\n" * 100, StoreDamagedError),
        (b"SQLite format 3\0" + b"\xff" * 5000, StoreDamagedError),
    ],
)
async def test_a_file_that_is_no_database_is_refused_and_left_unchanged(
    folder: Path, content: bytes, error: type[MidstreamError]
) -> None:
    path = folder / "x.db"
    path.write_bytes(content)
    with pytest.raises(error, match=r"x\.db"):
        await SQLiteStore(path).open()
    assert path.read_bytes() == content
    assert _names(folder) == ["x.db"]


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("create table theirs (a)", "another program"),
        ("pragma user_version = 3", "another program"),
        ("pragma application_id = 7", "another program"),
    ],
)
async def test_another_programs_database_is_refused_and_left_unchanged(
    folder: Path, sql: str, message: str
) -> None:
    path = folder / "x.db"
    _execute(path, sql)
    before = path.read_bytes()
    with pytest.raises(UsageError, match=message):
        await SQLiteStore(path).open()
    assert path.read_bytes() == before
    assert _names(folder) == ["x.db"]


def test_tables_created_concurrently_by_another_process_are_accepted(folder: Path) -> None:
    file = DatabaseFile(folder / "x.db", World(), None)
    with closing(file.connect()) as us, closing(file.connect()) as other:
        us.execute("pragma journal_mode = wal")

        def be_slow(_: object, statement: str, __: object) -> bool:
            if "user_version" in statement:
                us.exec_trace = None
                file.prepare(other)
            return True

        us.exec_trace = be_slow
        assert [file.is_prepared(us), file.is_prepared(us)] == [False, True]


async def test_a_newer_schema_is_refused_with_advice(folder: Path) -> None:
    store = SQLiteStore(folder / "x.db")
    await store.open()
    await store.close()
    _execute(folder / "x.db", f"pragma user_version = {SCHEMA_VERSION + 1}")
    with pytest.raises(UsageError, match="install the newer midstream"):
        await SQLiteStore(folder / "x.db").open()


async def test_a_database_from_before_the_first_release_is_refused_with_advice(
    folder: Path,
) -> None:
    _execute(folder / "x.db", f"create table record (x); pragma application_id = {PRERELEASE_ID}")
    before = (folder / "x.db").read_bytes()
    with pytest.raises(UsageError, match="move the file away to begin a new one"):
        await SQLiteStore(folder / "x.db").open()
    assert (folder / "x.db").read_bytes() == before


async def test_a_reader_sees_the_namespace_of_an_open_store(folder: Path) -> None:
    store = SQLiteStore(folder / "x.db")
    await store.open()
    await store.kv_put("pool", "k", b"{}", expected=0, at=2.0)
    with reading(folder / "x.db") as reader:
        assert reader.kv_list("pool") == [KeyValueEntry("k", 1, b"{}", 2.0)]
    await store.close()


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _execute(path: Path, sql: str) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.executescript(sql)
        db.commit()
