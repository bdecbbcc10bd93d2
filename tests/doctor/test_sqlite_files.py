"""Databases are read without a trace, and copied with the contents of their logs."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import apsw
import pytest

from midstream.doctor import sqlite_files
from midstream.errors import UnavailableError, UnreadableHistoryError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "with space # and ?.db"
    with closing(apsw.Connection(str(path))) as db:
        db.execute("pragma journal_mode = wal; create table t (a); insert into t values (1)").fetchall()
    return path


def test_reading_leaves_nothing_behind(path: Path) -> None:
    with sqlite_files.reading(path) as db:
        assert db.execute("select a from t").fetchall() == [(1,)]
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def _add_a_row(db: apsw.Connection) -> None:
    db.execute("insert into t values (3)")


def test_the_contents_of_the_log_are_read_and_copied(path: Path) -> None:
    target = path.with_name("copy.db")
    with closing(apsw.Connection(str(path))) as writer:
        writer.execute("insert into t values (2)")
        with sqlite_files.reading(path) as db:
            assert db.execute("select count(*) from t").fetchall() == [(2,)]
        sqlite_files.copy(path, target, change=_add_a_row)
    assert not target.with_name("copy.db-wal").exists()
    with sqlite_files.reading(target) as db:
        assert db.execute("select a from t").fetchall() == [(1,), (2,), (3,)]
    assert sqlite_files.is_whole(target)


def test_a_file_that_changes_under_the_reader_is_reported(path: Path) -> None:
    with pytest.raises(UnreadableHistoryError) as refused, sqlite_files.reading(path):
        path.write_bytes(path.read_bytes() + bytes(4096))
    assert refused.value.reason == "busy"


def test_a_file_that_is_not_a_database_is_reported(path: Path) -> None:
    path.write_bytes(b"SQLite format 3\0" + bytes(200))
    with pytest.raises(UnreadableHistoryError) as refused:
        sqlite_files.is_whole(path)
    assert refused.value.reason == "damaged"


def test_a_lock_and_an_unwritable_folder_are_reported(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_files, "BUSY_TIMEOUT_MS", 10)
    with closing(apsw.Connection(str(path))) as db:
        db.execute("pragma journal_mode = delete; begin exclusive").fetchall()
        with pytest.raises(UnreadableHistoryError) as refused:
            sqlite_files.is_whole(path)
    assert refused.value.reason == "busy"
    with pytest.raises(UnavailableError), sqlite_files.translate_write_errors(path):
        sqlite_files.copy(path, path.parent / "no folder" / "copy.db")
