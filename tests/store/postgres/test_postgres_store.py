"""The store in PostgreSQL keeps the contract, on a real server."""

from __future__ import annotations

import re
from pathlib import Path

import asyncpg
import pytest

from midstream.store.contract import Store
from midstream.store.encryption.encrypted_store import EncryptedStore, encrypt_store
from midstream.store.guard.guarded_store import GuardedStore
from midstream.testing.store_contract import StoreContract
from midstream.testing.store_fakes import Storage
from tests.store.contract_parts import ContractParts
from tests.store.keys import keys_in
from tests.store.postgres.postgres_places import PostgresPlace

PAGE = Path(__file__).parents[3] / "docs" / "design" / "ten_million_sessions.md"


class EncryptedPostgres:
    """An encrypted store in a schema."""

    def __init__(self, place: PostgresPlace, folder: Path) -> None:
        self._place = place
        self._keys = keys_in(folder)

    def store(self) -> Store:
        return encrypt_store(self._place.store(), self._keys)

    def kill(self, store: Store) -> None:
        assert isinstance(store, EncryptedStore)
        assert isinstance(store._store, GuardedStore)
        self._place.kill(store._store._store)


class TestPostgresStore(StoreContract):
    @pytest.fixture
    def place(self, place: PostgresPlace) -> Storage:
        return place


@pytest.mark.slow
class TestPartitionedPostgres(ContractParts):
    """Journals in the partitions that the page about ten million sessions shows."""

    @pytest.fixture
    async def place(self, place: PostgresPlace) -> Storage:
        [statements] = re.findall(r"```\n(alter table .*?)```", PAGE.read_text(), re.DOTALL)
        store = place.store()
        await store.open()  # Creates the tables.
        await store.close()
        operator = await asyncpg.connect(place.engine.url)
        await operator.execute(statements.replace("midstream.", f"{place.schema}."))
        await operator.close()
        return place


class TestEncryptedPostgres(ContractParts):
    @pytest.fixture
    def place(self, place: PostgresPlace, folder: Path) -> Storage:
        return EncryptedPostgres(place, folder)
