from __future__ import annotations

from collections.abc import Iterator

import apsw
import pytest

from midstream.errors import EntryMovedError
from midstream.store.contract import KeyValueEntry
from midstream.store.sqlite import key_values
from midstream.store.sqlite.database import schema


@pytest.fixture
def db() -> Iterator[apsw.Connection]:
    connection = apsw.Connection(":memory:")
    connection.execute(schema())
    yield connection
    connection.close()


def test_an_entry_is_replaced_only_with_its_current_version(db: apsw.Connection) -> None:
    assert key_values.put(db, "pool", "k", b"1", expected=0, at=1.0) == 1
    with pytest.raises(EntryMovedError, match="entry 'k' has version 1, not 2"):
        key_values.put(db, "pool", "k", b"2", expected=2, at=2.0)
    assert _entries(db) == [KeyValueEntry("k", 1, b"1", 1.0)]


def test_a_deleted_entry_leaves_only_its_version_behind(db: apsw.Connection) -> None:
    key_values.put(db, "pool", "k", b"1", expected=0, at=1.0)
    assert not key_values.delete(db, "pool", "k", expected=2)
    assert key_values.delete(db, "pool", "k", expected=1)
    assert _entries(db) == []
    assert key_values.put(db, "pool", "other", b"2", expected=0, at=2.0) == 2


def test_a_file_of_an_older_version_has_no_entries() -> None:
    db = apsw.Connection(":memory:")
    assert _entries(db) == []
    db.close()


def _entries(db: apsw.Connection) -> list[KeyValueEntry]:
    return key_values.entries(lambda query, values: db.execute(query, values).fetchall(), "pool")
