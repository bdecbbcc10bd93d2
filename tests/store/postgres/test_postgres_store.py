"""What the store in PostgreSQL promises: the contract, on a real server."""

from __future__ import annotations

import pytest

from midstream.testing.store_contract import StoreContract
from midstream.testing.store_fakes import Storage
from tests.store.postgres.places import PostgresPlace


class TestPostgresStore(StoreContract):
    @pytest.fixture
    def place(self, place: PostgresPlace) -> Storage:
        return place
