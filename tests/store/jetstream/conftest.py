from __future__ import annotations

import gc
import warnings
from collections.abc import AsyncIterator, Iterator

import pytest

from midstream.store.jetstream import JetStreamStore
from tests.nats_engine import NatsCluster
from tests.store.jetstream.places import JetStreamPlace


@pytest.fixture
def place(nats_server: NatsCluster) -> JetStreamPlace:
    """A store of its own."""
    return JetStreamPlace(nats_server)


@pytest.fixture
async def store(place: JetStreamPlace) -> AsyncIterator[JetStreamStore]:
    """An open store of its own."""
    store = place.store()
    await store.open()
    yield store
    await store.close()


@pytest.fixture(scope="module", autouse=True)
def left_sockets() -> Iterator[None]:
    """Collect the sockets that the package leaves behind a failed attempt to connect: no later test warns of them."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
