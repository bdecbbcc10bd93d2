"""The SQL of key-value entries: one function each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from midstream.store.contract import OF_SESSIONS, KeyValueEntry, require_version
from midstream.store.sqlite.inbox import SqlConnection

FIND_VERSION = "select version from key_value where namespace = ? and key = ?"
# An entry of a deleted key starts above all its versions, so that no reader of the old entry replaces the new one.
ADD = """
insert into key_value (namespace, key, version, body, at)
values (?, ?, 1 + (select versions_spent from ledger), ?, ?) returning version
"""
REPLACE = """
update key_value set version = version + 1, body = ?, at = ? where namespace = ? and key = ? returning version
"""
DROP = "delete from key_value where namespace = ? and key = ?"
DROP_ANY = "delete from key_value where namespace = ? and key = ? returning version"
SPEND_VERSIONS = "update ledger set versions_spent = max(versions_spent, ?)"

FIND = "select key, version, body, at from key_value where namespace = ? and key = ?"
LIST = "select key, version, body, at from key_value where namespace = ? order by at desc, key"
LIST_NAMESPACES = "select distinct namespace from key_value"
HAS_ENTRIES = "select 1 from sqlite_schema where name = 'key_value'"

Rows = Callable[[str, tuple[Any, ...]], list[Any]]  # as SQLite has them
"""Runs a query and returns its rows."""


# --- writes: each is one operation of a transaction ----------------------------------------------------------------


def put(db: SqlConnection, namespace: str, key: str, body: bytes, *, expected: int, at: float) -> int:
    """Write an entry if it has the version `expected` (0: if there is none), and return its new version.

    Raises:
        EntryMovedError: It has another version. Nothing was written.
    """
    row = db.execute(FIND_VERSION, (namespace, key)).fetchone()
    found = row[0] if row else 0
    require_version(key, found, expected)
    values = (body, at, namespace, key) if found else (namespace, key, body, at)
    version: int = db.execute(REPLACE if found else ADD, values).get
    return version


def delete(db: SqlConnection, namespace: str, key: str, *, expected: int) -> bool:
    """Remove an entry if it has this version; return whether it was removed."""
    row = db.execute(FIND_VERSION, (namespace, key)).fetchone()
    if row is None or row[0] != expected:
        return False
    db.execute(DROP, (namespace, key))
    db.execute(SPEND_VERSIONS, (expected,))
    return True


def delete_of_session(db: SqlConnection, session: str) -> None:
    """Delete the entries of a session that is being deleted."""
    for namespace in OF_SESSIONS:
        for (version,) in db.execute(DROP_ANY, (namespace, session)).fetchall():
            db.execute(SPEND_VERSIONS, (version,))


# --- reads ----------------------------------------------------------------------------------------------------------


def get(rows: Rows, namespace: str, key: str) -> KeyValueEntry | None:
    """Return an entry, or None if there is none, as in a file of an older version."""
    found = rows(FIND, (namespace, key)) if rows(HAS_ENTRIES, ()) else None
    return KeyValueEntry(*found[0]) if found else None


def entries(rows: Rows, namespace: str) -> list[KeyValueEntry]:
    """Return all entries, last written first; none from a file of an older version."""
    if not rows(HAS_ENTRIES, ()):
        return []
    return [KeyValueEntry(*row) for row in rows(LIST, (namespace,))]


def namespaces(rows: Rows) -> list[str]:
    """Return the namespaces that have entries; none from a file of an older version."""
    return [name for (name,) in rows(LIST_NAMESPACES, ())] if rows(HAS_ENTRIES, ()) else []
