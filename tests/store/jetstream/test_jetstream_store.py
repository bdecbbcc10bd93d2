"""The store in JetStream keeps the contract, on a real server."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest

from midstream.environment import World
from midstream.store.contract import Store
from midstream.store.encryption.encrypted_store import EncryptedStore, encrypt_store
from midstream.store.guard.guarded_store import GuardedStore
from midstream.store.jetstream import JetStreamStore
from midstream.testing.store_contract import StoreContract
from midstream.testing.store_fakes import Storage
from tests.store.contract_parts import ContractParts
from tests.store.jetstream.jetstream_places import JetStreamPlace
from tests.store.jetstream.nats_relay import NatsRelay
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


async def test_a_store_reports_when_it_was_connected_again(place: JetStreamPlace) -> None:
    world = World()
    async with NatsRelay(place).serving() as relay:
        store = JetStreamStore(relay.url)
        await store.open()
        joined_at, lost_at = store.joined_at, world.monotonic()
        assert joined_at < lost_at
        relay.cut()
        async with asyncio.timeout(60):
            while store.joined_at in (joined_at, math.inf):
                await world.sleep(0.005)
        assert store.joined_at > lost_at
        await store.close()
    assert store.joined_at == math.inf
