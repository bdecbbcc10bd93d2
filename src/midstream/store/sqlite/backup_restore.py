"""Restore of a SQLite store from a copy."""

from __future__ import annotations

import contextlib
from pathlib import Path

import apsw
from msgspec import Struct

from midstream.environment import World
from midstream.errors import StoreBusyError, UsageError
from midstream.paths import sync_names
from midstream.store.sqlite import liveness
from midstream.store.sqlite.database import COMPANIONS, DatabaseFile
from midstream.store.sqlite.online_backup import back_up


class Restored(Struct, frozen=True):
    """A restored database: its path, sessions and records, and the path of the previous one ("" if there was none)."""

    path: str
    sessions: int
    records: int
    replaced: str = ""


def put_back(source: Path, target: Path, *, may_replace: bool = False, world: World = World()) -> Restored:
    """Replace `target` by a checked copy of `source`. The previous database is kept under another name.

    A kill at any point leaves the old database or the new one, whole.

    Args:
        source: A copy that `back_up` created.
        target: The database; no server may use it.
        may_replace: Whether `target` may exist.

    Raises:
        UsageError: `source` is not a database of midstream, or `target` exists. Nothing was changed.
        StoreBusyError: A server uses `target`. Nothing was changed.
        StoreFullError: The disk is full. Nothing was changed.
        StoreDamagedError: `source` is damaged. Nothing was changed.
    """
    if target.exists() and source.samefile(target):
        raise UsageError(f"{str(source)!r} is the database itself; name a copy of it")
    if target.exists() and not may_replace:
        raise UsageError(f"{str(target)!r} exists; replace it with --force")
    file = DatabaseFile(target, world, None)
    if liveness.has_others(file.nodes, ""):
        raise StoreBusyError(f"a server uses {str(target)!r}; stop it first")
    name = world.new_id("restore")
    unfinished = target.with_name(f".{target.name}.{name}")
    try:
        copied = back_up(source, unfinished, world=world)
        replaced = _set_aside(target, target.with_name(f"{target.name}.{name}")) if target.exists() else None
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
    sync_names(target.resolve().parent)
    return Restored(str(target), copied.sessions, copied.records, str(replaced or ""))


def _set_aside(target: Path, aside: Path) -> Path:
    """Give a database a second name, after merging its log, and remove the log."""
    with contextlib.suppress(apsw.Error):  # a damaged database takes its log along
        db = apsw.Connection(str(target), flags=apsw.SQLITE_OPEN_READWRITE)
        db.execute("pragma wal_checkpoint(truncate)").fetchall()
        db.close()
    aside.hardlink_to(target)
    for companion in COMPANIONS:
        log = target.with_name(f"{target.name}{companion}")
        if log.exists():
            log.replace(aside.with_name(f"{aside.name}{companion}"))
    return aside
