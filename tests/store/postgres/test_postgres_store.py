"""What the store in PostgreSQL promises: the contract, on a real server."""

from __future__ import annotations

from pathlib import Path

import pytest

from midstream.store.contract import Store
from midstream.store.encryption.encrypted_store import EncryptedStore, encrypt_store
from midstream.testing.store_contract import StoreContract
from midstream.testing.store_fakes import Storage
from tests.store.keys import keys_in
from tests.store.postgres.places import PostgresPlace


class EncryptedPostgres:
    """An encrypted store in a schema."""

    def __init__(self, place: PostgresPlace, folder: Path) -> None:
        self._place = place
        self._keys = keys_in(folder)

    def store(self) -> Store:
        return encrypt_store(self._place.store(), self._keys)

    def kill(self, store: Store) -> None:
        assert isinstance(store, EncryptedStore)
        self._place.kill(store._store)


class TestPostgresStore(StoreContract):
    @pytest.fixture
    def place(self, place: PostgresPlace) -> Storage:
        return place


class TestEncryptedPostgres(StoreContract):
    @pytest.fixture
    def place(self, place: PostgresPlace, folder: Path) -> Storage:
        return EncryptedPostgres(place, folder)
