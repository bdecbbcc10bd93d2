from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from midstream.store.postgres import PostgresStore
from tests.postgres_engine import Engine
from tests.store.postgres.postgres_places import PostgresPlace


@pytest.fixture
def place(engine: Engine) -> PostgresPlace:
    """Return a fresh schema."""
    return PostgresPlace(engine)


@pytest.fixture
async def store(place: PostgresPlace) -> AsyncIterator[PostgresStore]:
    """Yield an open store in a fresh schema."""
    store = place.store()
    await store.open()
    yield store
    await store.close()
