from __future__ import annotations

from pathlib import Path

import pytest

from midstream.core.records import Sync
from midstream.errors import KeyMissingError
from midstream.store.ciphers import FileKeys
from midstream.store.closed import decrypted
from midstream.store.contract import Mark
from midstream.store.encrypted import encrypted
from midstream.store.reading import reading
from midstream.store.sqlite import SQLiteStore

BODIES = [b'{"type":"a"}', b'{"type":"b"}']
MARK = Mark(is_live=False, at=5.0, title="What is in the harbour?", turns=1, status="completed")


@pytest.fixture
async def path(tmp_path: Path) -> Path:
    FileKeys.make(tmp_path / "keys")
    FileKeys.make(tmp_path / "other")
    store = encrypted(SQLiteStore(tmp_path / "s.db"), FileKeys(tmp_path / "keys"))
    await store.open()
    epoch = await store.claim("s", at=1.0)
    await store.append("s", BODIES, expected=0, epoch=epoch, mark=MARK, sync=Sync.FULL)
    await store.close()
    return tmp_path


async def test_a_closed_store_is_read_with_its_key(path: Path) -> None:
    with reading(path / "s.db") as reader:
        store = decrypted(reader, path / "keys")
        assert [each.body for each in await store.read("s", after=0, limit=10)] == BODIES
        assert [each.mark async for each in store.list()] == [MARK]
        found = await store.find("s")
        assert found is not None
        assert found.mark.title == "What is in the harbour?"
        assert await store.blob("s", "none") is None


async def test_another_key_opens_nothing(path: Path) -> None:
    with reading(path / "s.db") as reader:
        store = decrypted(reader, path / "other")
        with pytest.raises(KeyMissingError):
            await store.read("s", after=0, limit=10)
