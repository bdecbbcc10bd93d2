"""Errors of SQLite, converted to errors of midstream."""

from __future__ import annotations

import errno

import apsw

from midstream.errors import (
    JournalMovedError,
    MidstreamError,
    StoreBusyError,
    StoreDamagedError,
    StoreFullError,
    UsageError,
)


def refusal_of(error: apsw.Error, where: str, db: apsw.Connection | None) -> MidstreamError:
    """Return the error of midstream for one of SQLite; `where` names the database."""
    match error:
        case apsw.ConstraintError():
            return JournalMovedError("another writer appended at this position first")
        case apsw.BusyError() | apsw.LockedError() | apsw.ProtocolError():
            return StoreBusyError(f"{where} is locked by another process", retry_after_s=1.0)
        case apsw.FullError():
            return StoreFullError(f"no space left for {where}: free some and try again")
        case apsw.IOError() if _is_for_lack_of_space(error, db):
            return StoreFullError(f"no space left for {where}: free some and try again")
        case apsw.TooBigError():
            return UsageError("a record is larger than SQLite can hold")
        case apsw.CantOpenError() | apsw.ReadOnlyError() | apsw.PermissionsError():
            return UsageError(
                f"{where} cannot be opened for writing: check that its folder exists "
                "and that this user may write to both"
            )
        case apsw.NotADBError():
            return StoreDamagedError(f"{where} is not an SQLite database, or its header is damaged")
        case _:
            return StoreDamagedError(f"{where}: {error} ({type(error).__name__})")


def _is_for_lack_of_space(error: apsw.Error, db: apsw.Connection | None) -> bool:
    # SQLite detects a full disk itself, except when it creates the log's index, or when a quota or the limit for the
    # size of a file is reached.
    is_index = getattr(error, "extendedresult", 0) == apsw.SQLITE_IOERR_SHMSIZE
    return is_index or (db is not None and db.system_errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
