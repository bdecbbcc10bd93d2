"""Small values kept by name, for several processes at once: the SQL, one function each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from midstream.errors import ShelfMovedError
from midstream.store.contract import OF_SESSIONS, Kept
from midstream.store.inbox import Connection

FIND_VERSION = "select version from shelf_entry where shelf = ? and key = ?"
# A dropped key starts again above all its versions, so that nobody who read the old entry replaces the new one.
ADD = """
insert into shelf_entry (shelf, key, version, body, at)
values (?, ?, 1 + (select versions_spent from ledger), ?, ?) returning version
"""
REPLACE = """
update shelf_entry set version = version + 1, body = ?, at = ? where shelf = ? and key = ? returning version
"""
DROP = "delete from shelf_entry where shelf = ? and key = ?"
DROP_ANY = "delete from shelf_entry where shelf = ? and key = ? returning version"
SPEND_VERSIONS = "update ledger set versions_spent = max(versions_spent, ?)"

FIND = "select key, version, body, at from shelf_entry where shelf = ? and key = ?"
LIST = "select key, version, body, at from shelf_entry where shelf = ? order by at desc, key"
HAS_SHELVES = "select 1 from sqlite_schema where name = 'shelf_entry'"

Rows = Callable[[str, tuple[Any, ...]], list[Any]]  # as SQLite has them
"""Runs a query and returns its rows."""


# --- writing: each is one operation of a transaction ---------------------------------------------------------------


def keep(db: Connection, shelf: str, key: str, body: bytes, *, expected: int, at: float) -> int:
    """Write an entry where it has the version `expected` (0: where there is none), and return its new version.

    Raises:
        ShelfMovedError: It has another one. Nothing was written.
    """
    row = db.execute(FIND_VERSION, (shelf, key)).fetchone()
    found = row[0] if row else 0
    require_version(key, found, expected)
    values = (body, at, shelf, key) if found else (shelf, key, body, at)
    version: int = db.execute(REPLACE if found else ADD, values).get
    return version


def drop(db: Connection, shelf: str, key: str, *, expected: int) -> bool:
    """Remove an entry if it has this version; return whether it was removed."""
    row = db.execute(FIND_VERSION, (shelf, key)).fetchone()
    if row is None or row[0] != expected:
        return False
    db.execute(DROP, (shelf, key))
    db.execute(SPEND_VERSIONS, (expected,))
    return True


def drop_of_session(db: Connection, session: str) -> None:
    """Remove what is kept of a session that is being deleted."""
    for shelf in OF_SESSIONS:
        for (version,) in db.execute(DROP_ANY, (shelf, session)).fetchall():
            db.execute(SPEND_VERSIONS, (version,))


# --- looking -------------------------------------------------------------------------------------------------------


def kept(rows: Rows, shelf: str, key: str) -> Kept | None:
    """Return an entry, or None where there is none."""
    found = rows(FIND, (shelf, key))
    return Kept(*found[0]) if found else None


def entries(rows: Rows, shelf: str) -> list[Kept]:
    """Return all entries, last written first; none where an older midstream made the file."""
    if not rows(HAS_SHELVES, ()):
        return []
    return [Kept(*row) for row in rows(LIST, (shelf,))]


# --- refusing ------------------------------------------------------------------------------------------------------


def require_version(key: str, found: int, expected: int) -> None:
    """Raise `ShelfMovedError` where an entry has another version than the one it is to replace; 0 is no entry."""
    if found != expected:
        raise ShelfMovedError(f"entry {key!r} has version {found}, not {expected}")
