"""Rows of wrapped keys in the key-value part: readable, and authenticated under the store's own secret.

    row = 3 | random (16) | seal (20) | JSON

So a wrap that was withdrawn cannot be written into a row again. A row that this process replaced is not accepted when
it is put back.
"""

from __future__ import annotations

import hashlib

from msgspec import Struct

from midstream.environment import World
from midstream.errors import StoreDamagedError
from midstream.store.contract import Store
from midstream.store.guard.chain import LINK_BYTES, MAC_BYTES, ChainKeys
from midstream.store.guard.spent_entries import SpentEntries

SEALED = 3
RANDOM_BYTES = 16
_HEAD = 1 + RANDOM_BYTES + LINK_BYTES


class SealedRow(Struct, frozen=True):
    """The JSON of a row, and the version of its entry."""

    version: int
    body: bytes


class SealedRows:
    """The rows of one namespace.

    Args:
        store: Keeps them.
        namespace: Theirs.
        keys: The store's.
        world: Random numbers, and the clock.
    """

    def __init__(self, store: Store, namespace: str, keys: ChainKeys, world: World) -> None:
        self._store = store
        self._namespace = namespace
        self._keys = keys
        self._world = world
        self._spent = SpentEntries()

    async def get(self, key: str) -> SealedRow | None:
        """Return a row, or None where there is none.

        Raises:
            StoreDamagedError: Another program changed it, or put an old one back.
        """
        found = await self._store.kv_get(self._namespace, key)
        if found is None:
            # As much is done as for a row: how long a refusal takes does not show whether there is one.
            nothing = self._message(key, bytes(RANDOM_BYTES), b"")
            self._keys.has_sealed(self._keys.newest.id + bytes(MAC_BYTES), nothing)
            return None
        self._spent.check(self._namespace, found)
        return SealedRow(found.version, self._open(key, found.body))

    async def put(self, key: str, body: bytes, *, expected: int) -> None:
        """Write a row.

        Raises:
            EntryMovedError: It has another version. Nothing was written.
        """
        number = hashlib.blake2b(self._world.new_secret().encode(), digest_size=RANDOM_BYTES).digest()
        sealed = b"%c%b%b%b" % (
            SEALED,
            number,
            self._keys.newest.seal(self._message(key, number, body)),
            body,
        )
        version = await self._store.kv_put(
            self._namespace, key, sealed, expected=expected, at=self._world.now()
        )
        self._spent.replace(self._namespace, key, expected=expected, version=version, body=sealed)

    def drop(self, key: str) -> None:
        """Note that a row was deleted with its session."""
        self._spent.spend(self._namespace, key)

    def _open(self, key: str, stored: bytes) -> bytes:
        if stored[:1] != b"%c" % SEALED:
            if self._keys.is_mixed:
                return stored
            raise StoreDamagedError(f"the wrapped keys of session {key!r} are not sealed")
        number, seal = stored[1 : 1 + RANDOM_BYTES], stored[1 + RANDOM_BYTES : _HEAD]
        body = stored[_HEAD:]
        if not self._keys.has_sealed(seal, self._message(key, number, body)):
            raise StoreDamagedError(f"the wrapped keys of session {key!r} were changed by another program")
        return body

    def _message(self, key: str, number: bytes, body: bytes) -> bytes:
        return b"row %d %d %b%b%b%b" % (
            len(self._namespace),
            len(key.encode()),
            self._namespace.encode(),
            key.encode(),
            number,
            body,
        )
