"""Reads of a database from outside, while a store works on it."""

from __future__ import annotations

from pathlib import Path

import apsw
import pytest

from midstream.errors import NotFoundError
from midstream.store.contract import StoredRecord
from midstream.store.sqlite import SQLiteStore, reads
from midstream.store.sqlite.database import schema
from midstream.store.sqlite.reads import reading
from tests.spec import spec
from tests.store.stores import append


async def test_a_reader_sees_the_content_of_a_working_store(store: SQLiteStore, folder: Path) -> None:
    epoch = await store.claim("s", at=1.0)
    await append(store, b"a", expected=0, epoch=epoch)
    with reading(folder / "x.db") as reader:
        assert reader.records("s", 0, 10) == [StoredRecord(1, epoch, b"a")]
        assert reader.lines(reader.numbers(None)) == [await store.find("s")]
    assert await append(store, b"b", expected=1, epoch=epoch) == 2


def test_a_reader_creates_nothing(folder: Path) -> None:
    with pytest.raises(NotFoundError, match="no database"), reading(folder / "x.db"):
        pass
    (folder / "x.db").touch()
    with pytest.raises(NotFoundError, match="nothing was stored"), reading(folder / "x.db"):
        pass
    assert sorted(path.name for path in folder.iterdir()) == ["x.db"]


@spec("SEC-59")
@pytest.mark.parametrize(
    ("query", "values", "is_found_by"),
    [
        (reads.LIST_NUMBERS, (None, 2.0, "s", 200), "session_changed"),
        (reads.LIST_NUMBERS_OF, (None, 2.0, "s", 200, "[]", "a", "b"), "sqlite_autoindex_session_1"),
    ],
)
def test_a_page_reads_only_sessions_after_its_cursor_by_an_index(
    tmp_path: Path, query: str, values: tuple[object, ...], is_found_by: str
) -> None:
    db = apsw.Connection(str(tmp_path / "x.db"))
    db.execute(schema())
    steps = [row[3] for row in db.execute(f"explain query plan {query}", values)]
    of_sessions = [step for step in steps if " session " in f"{step} "]
    assert of_sessions != []
    assert all(step.startswith("SEARCH session USING INDEX " + is_found_by) for step in of_sessions), steps
    db.close()
