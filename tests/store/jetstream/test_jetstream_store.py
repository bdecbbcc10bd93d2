"""The store in JetStream keeps the contract, on a real server."""

from __future__ import annotations

from pathlib import Path

import pytest

from midstream.store.contract import Store
from midstream.store.encryption.encrypted_store import EncryptedStore, encrypt_store
from midstream.store.guard.guarded_store import GuardedStore
from midstream.testing.store_contract import StoreContract
from midstream.testing.store_fakes import Storage
from tests.store.contract_parts import ContractParts
from tests.store.jetstream.jetstream_places import JetStreamPlace
from tests.store.keys import keys_in


class EncryptedJetStream:
    """An encrypted store in streams of its own."""

    def __init__(self, place: JetStreamPlace, folder: Path) -> None:
        self._place = place
        self._keys = keys_in(folder)

    def store(self) -> Store:
        return encrypt_store(self._place.store(), self._keys)

    def kill(self, store: Store) -> None:
        assert isinstance(store, EncryptedStore)
        assert isinstance(store._store, GuardedStore)
        self._place.kill(store._store._store)


class TestJetStreamStore(StoreContract):
    @pytest.fixture
    def place(self, place: JetStreamPlace) -> Storage:
        return place


class TestEncryptedJetStream(ContractParts):
    @pytest.fixture
    def place(self, place: JetStreamPlace, folder: Path) -> Storage:
        return EncryptedJetStream(place, folder)
