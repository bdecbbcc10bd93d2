"""Authenticated entries of the key-value part: logins, owners, viewers, records of a pool.

    entry = mark (4) | random (16) | seal (20) | body

The seal binds a body to its namespace and key under the store's key. An entry that this process replaced or deleted is
refused if another program puts it back (`replaced_entries`). An entry of an older version has no seal: it is accepted
in a store that had entries before it had a key.
"""

from __future__ import annotations

import hashlib

from msgspec.structs import replace

from midstream.environment import World
from midstream.errors import StoreDamagedError
from midstream.store.contract import KeyValueEntry
from midstream.store.guard.chain import MAC_BYTES, SEAL_BYTES, ChainKeys
from midstream.store.guard.replaced_entries import SpentEntries

MARK = b"\x05ms1"
RANDOM_BYTES = 16
HEAD_BYTES = len(MARK) + RANDOM_BYTES + SEAL_BYTES


class EntrySeals:
    """Makes and checks the seals of entries."""

    def __init__(self, keys: ChainKeys, world: World) -> None:
        self.spent = SpentEntries()
        self._keys = keys
        self._world = world

    def seal(self, namespace: str, key: str, body: bytes) -> bytes:
        """Return an entry's body for storage, with its seal; each result is unique."""
        number = hashlib.blake2b(self._world.new_secret().encode(), digest_size=RANDOM_BYTES).digest()
        return MARK + number + self._keys.newest.seal(_message(namespace, key, number, body)) + body

    def open(self, namespace: str, found: KeyValueEntry, *, since: int) -> KeyValueEntry:
        """Check an entry, and return it without the seal.

        Args:
            since: See `SpentEntries.check`.

        Raises:
            StoreDamagedError: Another program changed, moved, inserted or restored it.
        """
        self.spent.check(namespace, found, since=since)
        stored = found.body
        where = f"entry {found.key!r} of {namespace!r}"
        if not stored.startswith(MARK):
            if self._keys.is_mixed:
                return found
            raise StoreDamagedError(f"{where} is not sealed: another program wrote it")
        number, seal = (
            stored[len(MARK) : len(MARK) + RANDOM_BYTES],
            stored[HEAD_BYTES - SEAL_BYTES : HEAD_BYTES],
        )
        body = stored[HEAD_BYTES:]
        is_lost = self._keys.is_mixed and self._keys.find(seal) is None
        if not is_lost and not self._keys.has_sealed(seal, _message(namespace, found.key, number, body)):
            raise StoreDamagedError(f"{where} was changed by another program")
        return replace(found, body=body)

    def check_nothing(self, namespace: str, key: str) -> None:
        """Do the same work as for an entry, so that the time of a refusal does not show whether one exists."""
        seal = (self._keys.newest.id if self._keys.has_any else b"") + bytes(MAC_BYTES)
        self._keys.has_sealed(seal, _message(namespace, key, bytes(RANDOM_BYTES), b""))


def _message(namespace: str, key: str, number: bytes, body: bytes) -> bytes:
    space, name = namespace.encode(), key.encode()
    return b"entry %d %d %b%b%b%b" % (len(space), len(name), space, name, number, body)
