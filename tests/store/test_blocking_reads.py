from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from midstream.errors import KeyMissingError
from midstream.session.records import Sync
from midstream.store.blocking_reads import LIST_PAGE
from midstream.store.contract import Batch, SessionListing
from midstream.store.encryption.ciphers import FileKeys
from midstream.store.encryption.encrypted_store import encrypt_store
from midstream.store.sqlite import SQLiteStore
from midstream.store.store_registry import read_store

BODIES = [b'{"type":"a"}', b'{"type":"b"}']
MARK = SessionListing(is_live=False, at=5.0, title="What is in the harbour?", turns=1, status="completed")


@pytest.fixture
async def path(tmp_path: Path) -> Path:
    FileKeys.make(tmp_path / "keys")
    FileKeys.make(tmp_path / "other")
    store = encrypt_store(SQLiteStore(tmp_path / "s.db"), FileKeys(tmp_path / "keys"))
    await store.open()
    epoch = await store.claim("s", at=1.0)
    await store.append("s", Batch(BODIES, expected=0, epoch=epoch, mark=MARK, sync=Sync.FULL))
    await store.close()
    return tmp_path


def test_a_closed_store_can_be_read_with_its_key(path: Path) -> None:
    with read_store(path / "s.db", key_file=path / "keys") as store:
        assert [each.body for each in store.read("s", after=0, limit=10)] == BODIES
        assert [each.mark for each in store.list()] == [MARK]
        found = store.find("s")
        assert found is not None
        assert found.mark.title == "What is in the harbour?"
        assert store.blob("s", "none") is None
        assert not store.is_under_client_key("s")


def test_another_key_opens_nothing(path: Path) -> None:
    with read_store(path / "s.db", key_file=path / "other") as store, pytest.raises(KeyMissingError):
        store.read("s", after=0, limit=10)


def test_a_long_listing_is_read_in_pages_and_can_be_left_early(tmp_path: Path) -> None:
    asyncio.run(_fill(tmp_path / "s.db", LIST_PAGE + 1))
    with read_store(f"sqlite:///{tmp_path / 's.db'}") as store:
        assert [line.session for line in store.list()] == [
            f"s{number}" for number in range(LIST_PAGE, -1, -1)
        ]
        assert next(store.list()).session == f"s{LIST_PAGE}"


async def _fill(path: Path, count: int) -> None:
    store = SQLiteStore(path)
    await store.open()
    await asyncio.gather(*(store.claim(f"s{number}", at=float(number)) for number in range(count)))
    await store.close()
