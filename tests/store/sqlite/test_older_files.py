"""A database that an older midstream left: `older/killed-server.tar.gz` was made by one that was killed.

Its session "plain" has 8 records, of which the database has the first; "other" has 3, and a seal.
"""

from __future__ import annotations

import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from midstream.store.sqlite import SQLiteStore
from tests.store.stores import bodies

ARCHIVE = Path(__file__).parent / "older" / "killed-server.tar.gz"
HEAD_BYTES, ENTRY_BYTES = 64, 48


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "server.db"


@asynccontextmanager
async def _opened(path: Path) -> AsyncIterator[SQLiteStore]:
    store = SQLiteStore(path)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


def _numbered(count: int) -> list[bytes]:
    return [b'{"number":%d}' % number for number in range(1, count + 1)]


async def test_the_records_beside_an_older_database_are_read_once(path: Path) -> None:
    for _ in range(2):
        async with _opened(path) as store:
            assert await bodies(store, "plain") == _numbered(8)
            assert await bodies(store, "other") == _numbered(3)
            other = await store.find("other")
            assert other is not None
            assert (other.end, other.seal) == (3, b"seal")
    assert not [*path.with_name("server.db.owners").glob("*.ahead")]


async def test_a_deleted_session_does_not_return_with_a_file_that_could_not_be_removed(path: Path) -> None:
    [beside] = path.with_name("server.db.owners").glob("*.ahead")
    content = beside.read_bytes()
    async with _opened(path) as store:
        assert await store.delete("plain")
    beside.write_bytes(content)
    async with _opened(path) as store:
        assert await bodies(store, "plain") == []
        assert await store.claim("plain", at=2.0) == 2
        assert await bodies(store, "plain") == []


@pytest.mark.parametrize("at", range(HEAD_BYTES, HEAD_BYTES + ENTRY_BYTES, 5))
async def test_of_a_record_that_is_not_whole_and_of_what_follows_it_nothing_is_read(
    path: Path, at: int
) -> None:
    [beside] = path.with_name("server.db.owners").glob("*.ahead")
    content = bytearray(beside.read_bytes())
    content[at + ENTRY_BYTES] ^= 1  # the second one
    beside.write_bytes(content)
    async with _opened(path) as store:
        assert await bodies(store, "plain") == _numbered(2)


@pytest.mark.parametrize("length", [0, 1, 100, 4096])
async def test_a_file_whose_process_died_when_it_made_it_is_no_obstacle(path: Path, length: int) -> None:
    [beside] = path.with_name("server.db.owners").glob("*.ahead")
    beside.write_bytes(bytes(length))
    async with _opened(path) as store:
        assert await bodies(store, "plain") == _numbered(1)
    assert not beside.exists()


async def test_an_older_process_that_is_alive_is_stopped_from_writing_beside_the_database(path: Path) -> None:
    async with _opened(path) as older:
        beside = path.with_name("server.db.owners") / f"{older.owner}.ahead"
        beside.write_bytes(bytes(256 * 1024))
        async with _opened(path):
            assert beside.read_bytes()[0] == 1
        beside.unlink()
