"""A client's files: the check of their origin, and the errors for unusable ones."""

from __future__ import annotations

import contextlib
import errno
import itertools
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from midstream.client.sqlite_checks import is_laid_out, lay_out, transaction, translate_errors
from midstream.errors import MidstreamError, StoreBusyError, StoreDamagedError, StoreFullError, UsageError

OURS, LAYOUT = 77, 3


@pytest.fixture
def db() -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        yield db


def test_a_file_has_no_layout_until_it_is_created(db: sqlite3.Connection) -> None:
    assert not is_laid_out(db, OURS, LAYOUT, called="file")
    lay_out(db, "CREATE TABLE one (x);\nCREATE TABLE two (x)", OURS, LAYOUT)
    assert is_laid_out(db, OURS, LAYOUT, called="file")
    assert db.execute("SELECT name FROM sqlite_schema").fetchall() == [("one",), ("two",)]


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("PRAGMA application_id = 77; PRAGMA user_version = 4", "later version"),
        ("PRAGMA application_id = 77; PRAGMA user_version = 2", "before the first release"),
        ("PRAGMA application_id = 78", "another program"),
        ("PRAGMA user_version = 1", "another program"),
        ("CREATE TABLE theirs (x)", "another program"),
    ],
)
def test_a_foreign_file_is_refused(db: sqlite3.Connection, script: str, text: str) -> None:
    db.executescript(script)
    with pytest.raises(UsageError, match=text):
        is_laid_out(db, OURS, LAYOUT, called="file")


@pytest.mark.parametrize("moment", range(1, 4))
def test_a_file_that_another_process_creates_meanwhile_is_ours_before_and_after(
    tmp_path: Path, moment: int
) -> None:
    with (
        closing(sqlite3.connect(tmp_path / "x.db", isolation_level=None)) as looking,
        closing(sqlite3.connect(tmp_path / "x.db", isolation_level=None, timeout=0.0)) as other,
    ):
        steps = itertools.count(1)

        def step(statement: str) -> None:
            if next(steps) == moment:
                # Locked: it follows later.
                with (
                    contextlib.suppress(sqlite3.OperationalError),
                    transaction(other),
                ):
                    lay_out(other, "CREATE TABLE one (x)", OURS, LAYOUT)

        looking.set_trace_callback(step)
        is_laid_out(looking, OURS, LAYOUT, called="file")  # either result, and no error
        looking.set_trace_callback(None)
        assert is_laid_out(looking, OURS, LAYOUT, called="file") == is_laid_out(
            other, OURS, LAYOUT, called="file"
        )


def _sqlite(code: int) -> sqlite3.Error:
    error = sqlite3.OperationalError("words of SQLite")
    error.sqlite_errorcode = code
    return error


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (_sqlite(sqlite3.SQLITE_BUSY), StoreBusyError),
        (_sqlite(sqlite3.SQLITE_LOCKED), StoreBusyError),
        (_sqlite(sqlite3.SQLITE_FULL), StoreFullError),
        (_sqlite(sqlite3.SQLITE_CANTOPEN), UsageError),
        (_sqlite(sqlite3.SQLITE_CORRUPT), StoreDamagedError),
        (sqlite3.DatabaseError("no code"), StoreDamagedError),
        (msgspec.DecodeError("an entry"), StoreDamagedError),
        (OSError(errno.EACCES, "not yours"), UsageError),
    ],
)
def test_system_errors_are_translated(raised: Exception, kind: type[MidstreamError]) -> None:
    def work() -> None:
        raise raised

    with pytest.raises(kind) as caught:
        translate_errors(work, called="file of ours", busy="the file of ours is taken")
    assert "file of ours" in str(caught.value) or "an entry" in str(caught.value)
    assert translate_errors(lambda: 5, called="file", busy="") == 5
