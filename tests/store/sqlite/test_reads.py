"""Looking into a database from outside, while a store works on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from midstream.errors import NotFoundError
from midstream.store.contract import StoredRecord
from midstream.store.sqlite import SQLiteStore
from midstream.store.sqlite.reads import reading
from tests.store.stores import append


async def test_a_reader_sees_what_a_working_store_has(store: SQLiteStore, folder: Path) -> None:
    epoch = await store.claim("s", at=1.0)
    await append(store, b"a", expected=0, epoch=epoch)
    with reading(folder / "x.db") as reader:
        assert reader.records("s", 0, 10) == [StoredRecord(1, epoch, b"a")]
        assert reader.lines(reader.numbers(None)) == [await store.find("s")]
    assert await append(store, b"b", expected=1, epoch=epoch) == 2


def test_a_reader_makes_nothing(folder: Path) -> None:
    with pytest.raises(NotFoundError, match="no database"), reading(folder / "x.db"):
        pass
    (folder / "x.db").touch()
    with pytest.raises(NotFoundError, match="nothing was stored"), reading(folder / "x.db"):
        pass
    assert sorted(path.name for path in folder.iterdir()) == ["x.db"]
