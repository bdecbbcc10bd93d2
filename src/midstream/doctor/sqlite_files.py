"""Databases as files: reads without new files, and copies that include the log."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import apsw

from midstream.doctor.file_reading import stamp_of
from midstream.errors import UnavailableError, UnreadableHistoryError, UsageError
from midstream.file_safety import require_regular_database

BUSY_TIMEOUT_MS = 5_000
"""Milliseconds to wait for another program's lock: as long as opencode waits itself."""
PAGES_AT_ONCE = 1_000
Database = apsw.Connection
"""An open database."""

_NEW = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE


@contextlib.contextmanager
def reading(path: Path) -> Iterator[Database]:
    """Open a database for reading, without leaving files behind.

    A reader of a database in log mode creates an index beside it, which stays. Without a log no program is writing, so
    the file is read as immutable.
    """
    real = path.resolve()
    log = real.with_name(f"{real.name}-wal")
    if not _is_in_log_mode(real) or (log.exists() and log.stat().st_size):
        with _open(real, apsw.SQLITE_OPEN_READONLY) as db:
            yield db
        return
    before = stamp_of(real)
    with _open(f"{real.as_uri()}?immutable=1", apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI) as db:
        yield db
    if stamp_of(real) != before:
        raise UnreadableHistoryError("it was changed while it was read; try again", reason="busy")


def _is_in_log_mode(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(20)[18:] == b"\2\2"


@contextlib.contextmanager
def writing(path: Path) -> Iterator[Database]:
    """Open a database for changing rows, also while its program uses it."""
    with _open(path, apsw.SQLITE_OPEN_READWRITE) as db:
        yield db


@contextlib.contextmanager
def _open(name: Path | str, flags: int) -> Iterator[Database]:
    if isinstance(name, Path):
        _require_regular(name)
    db = apsw.Connection(os.fspath(name), flags=flags)
    try:
        db.set_busy_timeout(BUSY_TIMEOUT_MS)
        yield db
    finally:
        db.close()


def _require_regular(path: Path) -> None:
    """Check SQLite's files beside a database: a pipe would block it, and a link would leave the folder."""
    try:
        require_regular_database(path.resolve(), "the database")
    except UsageError as error:
        raise UnreadableHistoryError(error.message, reason="not-a-file") from error


@contextlib.contextmanager
def translate_read_errors() -> Iterator[None]:
    """Convert SQLite's errors during reads."""
    try:
        yield
    except (apsw.BusyError, apsw.LockedError) as error:
        raise UnreadableHistoryError("another program keeps it locked", reason="busy") from error
    except apsw.Error as error:
        raise UnreadableHistoryError(f"not an intact database: {error}", reason="damaged") from error


@contextlib.contextmanager
def translate_write_errors(target: Path) -> Iterator[None]:
    """Convert SQLite's errors during writes."""
    try:
        yield
    except apsw.Error as error:
        raise UnavailableError(f"{str(target)!r} cannot be written: {error}") from error


def copy(path: Path, target: Path, *, change: Callable[[Database], None] = lambda _: None) -> None:
    """Copy a database including its log, and change the copy, which has no log."""
    with reading(path) as source, _open(target, _NEW) as made:
        with made.backup("main", source, "main") as backup:
            while not backup.done:
                backup.step(PAGES_AT_ONCE)
        made.execute("pragma journal_mode = delete")  # one complete file
        change(made)


def is_whole(path: Path) -> bool:
    """Whether every page of a database is at its correct place.

    Raises:
        UnreadableHistoryError: It is not a database, or another program keeps it locked.
    """
    with translate_read_errors(), reading(path) as db:
        return [verdict for (verdict,) in db.execute("pragma quick_check(1)")] == ["ok"]
