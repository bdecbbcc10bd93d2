from __future__ import annotations

import apsw
import pytest

from midstream.errors import (
    JournalMovedError,
    MidstreamError,
    StoreBusyError,
    StoreDamagedError,
    StoreFullError,
    UsageError,
)
from midstream.store.sqlite.sqlite_errors import refusal_of


@pytest.mark.parametrize(
    ("error", "refusal"),
    [
        (apsw.ConstraintError("x"), JournalMovedError),
        (apsw.BusyError("x"), StoreBusyError),
        (apsw.LockedError("x"), StoreBusyError),
        (apsw.FullError("x"), StoreFullError),
        (apsw.TooBigError("x"), UsageError),
        (apsw.ReadOnlyError("x"), UsageError),
        (apsw.NotADBError("x"), StoreDamagedError),
        (apsw.IOError("x"), StoreDamagedError),
        (apsw.CorruptError("x"), StoreDamagedError),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value.__name__,
)
def test_each_error_of_sqlite_maps_to_one_of_ours(error: apsw.Error, refusal: type[MidstreamError]) -> None:
    found = refusal_of(error, "database 'x.db'", None)
    assert type(found) is refusal
    assert refusal is JournalMovedError or "x.db" in found.message or "larger" in found.message


def test_a_log_index_without_space_is_a_full_disk() -> None:
    error = apsw.IOError("x")
    error.extendedresult = apsw.SQLITE_IOERR_SHMSIZE  # type: ignore[attr-defined] # set by apsw
    assert type(refusal_of(error, "database 'x.db'", None)) is StoreFullError
