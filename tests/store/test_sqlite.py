from __future__ import annotations

from pathlib import Path

import pytest

from midstream.store.contract import Store
from midstream.store.sqlite import SQLiteStore
from midstream.testing.store_contract import Place, StoreContract


class FilePlace:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "midstream.db"

    def store(self) -> Store:
        return SQLiteStore(self.path)

    def kill(self, store: Store) -> None:
        assert isinstance(store, SQLiteStore)
        assert store._opened is not None
        store._opened.lock.drop()


class TestSQLiteStore(StoreContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Place:
        return FilePlace(tmp_path)
