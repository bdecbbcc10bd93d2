"""An escrowed store keeps the contract of a store while its clients are connected."""

from __future__ import annotations

from pathlib import Path

import pytest

from midstream.environment import World
from midstream.session.child_names import PART_MARK, root_of
from midstream.store.contract import Store
from midstream.store.encryption.ciphers import FileKeys, OperatorKeys
from midstream.store.encryption.escrow import ClientKeys, EscrowedStore
from midstream.store.memory import Memory, MemoryStore
from midstream.testing.store_contract import StoreContract
from midstream.testing.store_fakes import Storage

SECRET = "s" * 43


class Attended(ClientKeys):
    """Keys whose clients are always connected.

    Parts of missing sessions, and commands for a session without a record, are under the operator's key.
    """

    async def reading(self, session: str) -> OperatorKeys:
        found = await self._store.find(root_of(session))
        if found is None or not found.end or PART_MARK in session:
            return self.house
        await self.open(session, SECRET)
        return await super().reading(session)

    async def has_title(self, session: str) -> bool:
        return True

    async def writing(self, session: str, epoch: int) -> OperatorKeys:
        if PART_MARK in session:
            return self.house
        await self.open(session, SECRET, begins=True)
        return await super().writing(session, epoch)


class EscrowedPlace:
    def __init__(self, folder: Path) -> None:
        self.memory = Memory()
        FileKeys.make(folder / "keys")
        self._house = FileKeys(folder / "keys")
        self._inner: dict[Store, MemoryStore] = {}

    def store(self) -> Store:
        inner = MemoryStore(self.memory)
        keys = Attended(inner, self._house, world=World(), is_mixed=False)
        store = EscrowedStore(inner, keys, world=World(), is_mixed=False)
        self._inner[store] = inner
        return store

    def kill(self, store: Store) -> None:
        self.memory.kill(self._inner[store].node)


class TestEscrowedStore(StoreContract):
    @pytest.fixture
    def place(self, folder: Path) -> Storage:
        return EscrowedPlace(folder)
