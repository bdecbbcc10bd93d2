"""Stores in JetStream for programs without an event loop."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from midstream.errors import (
    NotFoundError,
)
from midstream.store.jetstream import JetStreamStore
from midstream.store.store_registry import read_store
from tests.nats_engine import NatsCluster
from tests.store.stores import append

GUIDE = (Path(__file__).parents[3] / "docs" / "guides" / "jetstream.md").read_text(encoding="utf-8")


def test_a_store_is_read_without_an_event_loop_and_not_created(nats_server: NatsCluster) -> None:
    url = nats_server.url("never_made")
    with pytest.raises(NotFoundError), read_store(url):
        pass

    async def fill() -> None:
        store = JetStreamStore(nats_server.url("read_1", streams=2))
        await store.open()
        epoch = await store.claim("s", at=1.0)
        await append(store, b"a", expected=0, epoch=epoch)
        await store.close()

    asyncio.run(fill())
    with read_store(nats_server.url("read_1")) as reader:
        assert [line.session for line in reader.list()] == ["s"]
        assert [each.body for each in reader.read("s", after=0, limit=9)] == [b"a"]
