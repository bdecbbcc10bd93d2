"""Shared parts of a client's SQLite files: identification, schema, transactions, and errors."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import msgspec

from midstream.errors import MidstreamError, StoreBusyError, StoreDamagedError, StoreFullError, UsageError

T = TypeVar("T")

# Identify a file in one statement, because another process may create the schema between two.
_FOUND = """
SELECT (SELECT user_version FROM pragma_user_version),
       (SELECT application_id FROM pragma_application_id),
       (SELECT count(*) FROM sqlite_schema)
"""


def is_laid_out(connection: sqlite3.Connection, application: int, layout: int, *, called: str) -> bool:
    """Return whether a file has the schema; False if it is empty.

    Args:
        application: Expected value of `pragma application_id`.
        layout: The only schema version that this version supports.
        called: Name of the file in messages.

    Raises:
        UsageError: The file belongs to another program, or has another version. Nothing was changed.
    """
    version, found, tables = connection.execute(_FOUND).fetchone()
    if found == application and version > layout:
        raise UsageError(f"this {called} was written by a later version of midstream; install that version")
    if found == application and version < layout:
        raise UsageError(f"this {called} was written before the first release of midstream; use another file")
    if found != application and (found or version or tables):
        raise UsageError(f"this {called} belongs to another program; use another file")
    return bool(version)


def lay_out(connection: sqlite3.Connection, schema: str, application: int, version: int) -> None:
    """Create the schema of a file, within the open transaction."""
    for statement in schema.split(";\n"):
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {application}")
    connection.execute(f"PRAGMA user_version = {version}")


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Run a transaction: commit at the end, or roll back after an exception."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def translate_errors(work: Callable[[], T], *, called: str, busy: str) -> T:
    """Convert errors of SQLite and of the system about a file to a `MidstreamError`.

    Args:
        called: Name of the file in messages.
        busy: Message if another process holds the file.

    Raises:
        MidstreamError: The converted error; a failed transaction has changed nothing.
    """
    try:
        return work()
    except sqlite3.Error as error:
        raise _error_of(error, called, busy) from error
    except msgspec.DecodeError as error:
        raise StoreDamagedError(f"an entry in the {called} cannot be read") from error
    except OSError as error:
        advice = "choose a folder that this user can write to"
        raise UsageError(f"the {called} cannot be created ({error.strerror}); {advice}") from error


def _error_of(error: sqlite3.Error, called: str, busy: str) -> MidstreamError:
    code = getattr(error, "sqlite_errorcode", None) or 0
    match code & 0xFF:
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return StoreBusyError(busy)
        case sqlite3.SQLITE_FULL:
            return StoreFullError(f"no space is left for the {called}; free some space")
        case sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM:
            return UsageError(f"the {called} cannot be opened for writing ({error}); use another file")
        case _:
            return StoreDamagedError(f"the {called} cannot be used: {error}")
