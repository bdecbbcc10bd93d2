from __future__ import annotations

import gc
import warnings
from collections.abc import AsyncIterator, Iterator

import pytest

from midstream.store.jetstream import JetStreamStore
from tests.nats_engine import NatsCluster
from tests.store.jetstream.jetstream_places import JetStreamPlace


@pytest.fixture
def place(nats_server: NatsCluster) -> JetStreamPlace:
    """Return streams of their own for a store."""
    return JetStreamPlace(nats_server)


@pytest.fixture
async def store(place: JetStreamPlace) -> AsyncIterator[JetStreamStore]:
    """Yield an open store in its own streams."""
    store = place.store()
    await store.open()
    yield store
    await store.close()


@pytest.fixture(scope="module", autouse=True)
def left_sockets() -> Iterator[None]:
    """Collect the sockets that the package leaves after a failed connection: no later test warns of them."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
