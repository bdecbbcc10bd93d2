from __future__ import annotations

import stat
from pathlib import Path

import pytest

from midstream.environment import World
from midstream.errors import UsageError
from midstream.store.contract import Store
from midstream.store.guard.store_key import ACCEPTS_OLDER, FileKeySource, has_sessions, read_chain_keys
from midstream.store.memory import MemoryStore
from tests.spec import spec


async def _open() -> Store:
    store = MemoryStore()
    await store.open()
    return store


@spec("SEC-52")
async def test_the_key_is_created_once_and_readable_by_this_user_only(tmp_path: Path) -> None:
    store, path = await _open(), tmp_path / "x.db.store-key"
    keys = await FileKeySource(path, World()).load(store)
    again = await FileKeySource(path, World()).load(store)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert keys.newest.id == again.newest.id
    assert not keys.is_mixed


@spec("SEC-45", "SEC-52")
async def test_a_new_key_for_an_existing_store_accepts_older_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, path = await _open(), tmp_path / "key"
    assert not await has_sessions(store)
    await store.claim("s", at=1.0)
    assert await has_sessions(store)
    assert (await FileKeySource(path, World()).load(store)).is_mixed
    assert "not authenticated" in caplog.text
    assert ACCEPTS_OLDER in path.read_text()
    assert read_chain_keys(path).is_mixed


@spec("SEC-55", "SEC-57")
async def test_an_unsafe_key_file_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    store, path = await _open(), tmp_path / "key"
    for text in ("", "no key\n", "QUJD\n"):
        path.write_text(text)
        path.chmod(0o600)
        with pytest.raises(UsageError, match="key"):
            await FileKeySource(path, World()).load(store)
        assert path.read_text() == text
    path.unlink()
    await FileKeySource(path, World()).load(store)
    path.chmod(0o640)
    with pytest.raises(UsageError, match="chmod 600"):
        await FileKeySource(path, World()).load(store)
    with pytest.raises(UsageError, match="cannot be used"):
        await FileKeySource(tmp_path / "no folder" / "key", World()).load(store)
