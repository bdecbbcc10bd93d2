"""Copies of a SQLite store while a server uses it."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import apsw
from msgspec import Struct

from midstream.environment import World
from midstream.errors import StoreDamagedError, StoreFullError, UsageError
from midstream.paths import sync_names
from midstream.store.sqlite.database import DatabaseFile, number_of
from midstream.store.sqlite.reads import reading

PAGES_PER_STEP = 2000
"""Pages copied between two calls of `progress` (4 MB)."""
IMMUTABLE = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
COUNT_SESSIONS = "select count(*) from session"
COUNT_RECORDS = "select count(*) from record"


class Backup(Struct, frozen=True):
    """A finished copy: its path, and its numbers of sessions, records and bytes."""

    path: str
    sessions: int
    records: int
    bytes: int


def back_up(
    source: Path,
    target: Path,
    *,
    may_replace: bool = False,
    progress: Callable[[float], None] = lambda _: None,
    world: World = World(),
) -> Backup:
    """Copy a snapshot of a database into one file, check the copy, and sync it. The server is not interrupted.

    The copy appears under its name only when it is complete. It is readable by this user only.

    Args:
        source: The database; a server may use it.
        target: The new file, in a folder that exists.
        may_replace: Whether a file of this name may be replaced.
        progress: Called with the copied share, 0 to 1.

    Raises:
        NotFoundError: There is no such database, or nothing was ever stored in it.
        UsageError: `source` is not a midstream database, or `target` exists or cannot be created.
        StoreFullError: The disk of `target` is full.
        StoreDamagedError: `source` is damaged. In each case, nothing was changed.
    """
    if target.exists() and source.exists() and target.samefile(source):
        raise UsageError(f"{str(target)!r} is the database itself; choose another name")
    if target.exists() and not may_replace:
        raise UsageError(f"{str(target)!r} exists; choose another name, or replace it with --force")
    with reading(source, world=world):
        pass  # refuses other files
    file = DatabaseFile(source, world, None)
    unfinished = target.with_name(f".{target.name}.{world.new_id('part')}")
    try:
        os.close(os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        with file.convert_errors(), file.open_reader() as live:
            # One snapshot, until it is closed.
            file.retry_while_busy(partial(live.execute, f"begin; {COUNT_SESSIONS}"))
            _copy(live, unfinished, progress)
        sessions, records = _check(unfinished)
        _publish(unfinished, target, may_replace=may_replace)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFullError(f"no space left for {str(target)!r}: free some and try again") from error
        raise UsageError(f"{str(target)!r} cannot be written: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
    return Backup(str(target), sessions, records, target.stat().st_size)


def _copy(live: apsw.Connection, unfinished: Path, progress: Callable[[float], None]) -> None:
    target = DatabaseFile(unfinished, World(), None)
    with target.convert_errors(), _connect(unfinished, apsw.SQLITE_OPEN_READWRITE) as copy:
        # Without a journal: an unfinished copy is deleted.
        copy.execute("pragma journal_mode = off; pragma synchronous = off")
        with copy.backup("main", live, "main") as backup:
            while not backup.done:
                backup.step(PAGES_PER_STEP)
                progress(1 - backup.remaining / max(backup.page_count, 1))


def _check(unfinished: Path) -> tuple[int, int]:
    """Check a copy, and return its numbers of sessions and records.

    Raises:
        StoreDamagedError: It is damaged, like its source.
    """
    uri = f"{unfinished.resolve().as_uri()}?immutable=1"  # creates no files beside it
    with DatabaseFile(unfinished, World(), None).convert_errors(), _connect(uri, IMMUTABLE) as copy:
        if (found := copy.execute("pragma quick_check(1)").get) != "ok":
            raise StoreDamagedError(f"the database is damaged and was not copied: {found}")
        return number_of(copy.execute(COUNT_SESSIONS)), number_of(copy.execute(COUNT_RECORDS))


def _publish(unfinished: Path, target: Path, *, may_replace: bool) -> None:
    with unfinished.open("rb") as file:
        os.fsync(file.fileno())
    if may_replace:
        unfinished.replace(target)
    else:
        try:
            target.hardlink_to(unfinished)
        except FileExistsError:
            raise UsageError(f"{str(target)!r} was created by another program meanwhile") from None
    sync_names(target.resolve().parent)


@contextlib.contextmanager
def _connect(place: Path | str, flags: int) -> Iterator[apsw.Connection]:
    db = apsw.Connection(str(place), flags=flags)
    try:
        yield db
    finally:
        db.close()
