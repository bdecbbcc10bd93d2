"""Looking into a database from outside, while a store works on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from midstream.core.records import Sync
from midstream.errors import NotFoundError
from midstream.store.ahead import Ahead, AheadFile
from midstream.store.contract import Stored
from midstream.store.reading import reading
from midstream.store.sqlite import SQLiteStore
from tests.store.stores import append, claimed, in_the_database, say


async def test_a_reader_sees_what_a_working_store_has(store: SQLiteStore, folder: Path) -> None:
    epoch = await store.claim("s", at=1.0)
    await append(store, b"a", expected=0, epoch=epoch)
    with reading(folder / "x.db") as reader:
        assert reader.records("s", 0, 10) == [Stored(1, epoch, b"a")]
        assert reader.lines(reader.numbers(None)) == [await store.find("s")]
    assert await append(store, b"b", expected=1, epoch=epoch) == 2


def test_a_reader_makes_nothing(folder: Path) -> None:
    with pytest.raises(NotFoundError, match="no database"), reading(folder / "x.db"):
        pass
    (folder / "x.db").touch()
    with pytest.raises(NotFoundError, match="nothing was stored"), reading(folder / "x.db"):
        pass
    assert sorted(path.name for path in folder.iterdir()) == ["x.db"]


async def test_who_only_reads_the_file_sees_what_was_written_ahead(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    async with claimed(path) as (store, epoch):
        assert say(store, b"1", expected=1, epoch=epoch)
        await store.append("s", [b"2", b"3"], expected=2, epoch=epoch, sync=Sync.FULL)
        other = await store.claim("other", at=1.0)  # commits all of it
        await store.append("other", [b"x"], expected=0, epoch=other, sync=Sync.FULL)
        await store.append("s", [b"4"], expected=4, epoch=epoch, sync=Sync.FULL)
        assert say(store, b"5", expected=5, epoch=epoch)
        assert in_the_database(path) == [b"0", b"1", b"2", b"3", b"x"]
        with reading(path) as reader:
            for after, limit in ((0, 10), (0, 4), (0, 5), (3, 2), (4, 10), (5, 1), (6, 1), (9, 9)):
                found = [(each.position, each.body) for each in reader.records("s", after, limit)]
                told = [(position + 1, b"%d" % position) for position in range(6)]
                assert found == told[after : after + limit]
            lines = {line.session: line.end for line in reader.lines(reader.numbers(None))}
            found_end = reader.find("s")
            assert found_end is not None
            assert (lines, found_end.end) == ({"s": 6, "other": 1}, 6)


async def test_who_only_reads_is_not_shown_what_is_of_another_epoch_or_leaves_a_gap(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    async with claimed(path) as (_, epoch):
        old = AheadFile(tmp_path / "x.db.owners", "old")
        others = [Ahead(1, 2, epoch + 1, b"x"), Ahead(2, 2, epoch, b"x"), Ahead(1, 3, epoch, b"x")]
        assert old.put_all(others, is_synced=False)
        with reading(path) as reader:
            assert [each.body for each in reader.records("s", 0, 10)] == [b"0"]
            assert [line.end for line in reader.lines([1])] == [1]
