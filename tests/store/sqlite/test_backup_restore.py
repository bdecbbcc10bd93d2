"""A copy replaces a database in any state."""

from __future__ import annotations

from pathlib import Path

import pytest

from midstream.errors import UsageError
from midstream.session.records import Sync
from midstream.store.contract import Batch
from midstream.store.sqlite import SQLiteStore
from midstream.store.sqlite.backup_restore import put_back
from midstream.store.sqlite.online_backup import back_up


async def _write(path: Path, session: str) -> None:
    store = SQLiteStore(path)
    await store.open()
    epoch = await store.claim(session, at=1.0)
    await store.append(session, Batch([b"record"], 0, epoch, Sync.FULL))
    await store.close()


def _is_kept(path: str) -> bool:
    return Path(path).read_bytes() == b"damaged"


async def test_a_damaged_database_is_replaced_and_kept(tmp_path: Path) -> None:
    store, copy = tmp_path / "s.db", tmp_path / "copy.db"
    await _write(store, "s")
    back_up(store, copy)
    store.write_bytes(b"damaged")
    restored = put_back(copy, store, may_replace=True)
    assert (restored.sessions, restored.records) == (1, 1)
    assert _is_kept(restored.replaced)
    again = SQLiteStore(store)
    await again.open()
    assert [each.body for each in await again.read("s", after=0, limit=9)] == [b"record"]
    await again.close()


async def test_a_database_cannot_replace_itself(tmp_path: Path) -> None:
    await _write(tmp_path / "s.db", "s")
    with pytest.raises(UsageError, match="itself"):
        put_back(tmp_path / "s.db", tmp_path / "s.db", may_replace=True)
