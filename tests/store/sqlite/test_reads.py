"""Reads of a database from outside, while a store works on it."""

from __future__ import annotations

from pathlib import Path

import apsw
import pytest

from midstream.errors import NotFoundError, StoreBusyError
from midstream.store.contract import StoredRecord
from midstream.store.sqlite import SQLiteStore, reads
from midstream.store.sqlite.backup_restore import put_back
from midstream.store.sqlite.database import schema
from midstream.store.sqlite.online_backup import back_up
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


async def test_reads_of_a_database_that_no_server_uses_leave_no_files_beside_it(folder: Path) -> None:
    await _store_one_record(folder / "x.db")
    before = _names(folder)
    with reading(folder / "x.db") as reader:
        assert reader.records("s", 0, 10) == [StoredRecord(1, 1, b"a")]
        assert _names(folder) == before  # so it can be read where no file can be created
    back_up(folder / "x.db", folder / "copy.db")
    put_back(folder / "copy.db", folder / "restored.db")
    assert _names(folder) == {*before, "copy.db", "restored.db"}


async def test_a_reader_reports_that_a_server_changed_the_file_meanwhile(folder: Path) -> None:
    await _store_one_record(folder / "x.db")
    opened = reading(folder / "x.db")
    opened.__enter__()
    store = SQLiteStore(folder / "x.db")
    await store.open()
    await store.claim("t", at=2.0)
    await store.close()  # writes the log into the file
    with pytest.raises(StoreBusyError, match="was changed while it was read"):
        opened.__exit__(None, None, None)


async def _store_one_record(path: Path) -> None:
    store = SQLiteStore(path)
    await store.open()
    epoch = await store.claim("s", at=1.0)
    await append(store, b"a", expected=0, epoch=epoch)
    await store.close()


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}
