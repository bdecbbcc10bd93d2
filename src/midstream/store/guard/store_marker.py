"""The marker of an encrypted store, which stops programs without its keys from writing into it.

The marker is a key-value entry. It has the name of the operator's key that wraps the store's secret, and the wrapped
secret. The wrap authenticates the marker.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from midstream.errors import KeyMissingError, StoreDamagedError
from midstream.store.contract import KeyValueReader, Store, StoreReader

NAMESPACE = "midstream-store"
KEY = "encryption"
MARKER_BYTES_MAX = 16 * 1024
ENCRYPTED_MARKS = (b"\x01", b"\x02")
"""First bytes of encrypted records: see `store.encryption.ciphers`."""


class StoreMarker(Struct, frozen=True):
    """The content of the marker.

    Args:
        generation: Name of the operator's key that wraps; "" if unknown.
        secret: The store's secret, wrapped.
        is_mixed: The store had journals before it had this marker.
    """

    generation: str
    secret: bytes
    is_mixed: bool = False

    @property
    def context(self) -> bytes:
        """Associated data of the wrap, which authenticate the marker."""
        return context_of(self.generation, is_mixed=self.is_mixed)


def context_of(generation: str, *, is_mixed: bool) -> bytes:
    """Return the associated data for the wrap of a marker's secret."""
    return f"midstream 1 store {is_mixed:d} {generation}".encode()


class FoundMarker(Struct, frozen=True):
    """A marker as it was read, with the version of its entry."""

    version: int
    marker: StoreMarker


async def read_marker(store: KeyValueReader) -> FoundMarker | None:
    """Return the marker of a store, or None if it has none.

    Raises:
        StoreDamagedError: The marker cannot be read.
    """
    found = await store.kv_get(NAMESPACE, KEY)
    if found is None:
        return None
    try:
        return FoundMarker(
            found.version, msgspec.json.decode(found.body[:MARKER_BYTES_MAX], type=StoreMarker)
        )
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise StoreDamagedError(
            "the marker of an encrypted store cannot be read; restore a backup"
        ) from error


async def write_marker(store: Store, marker: StoreMarker, *, expected: int, at: float) -> None:
    """Write the marker of a store.

    Raises:
        EntryMovedError: Another process wrote it first. Nothing was written.
    """
    await store.kv_put(NAMESPACE, KEY, msgspec.json.encode(marker), expected=expected, at=at)


async def holds_encrypted(store: StoreReader) -> bool | None:
    """Whether the last changed session of a store is encrypted; None without records.

    For stores without a marker, of older versions.
    """
    async for line in store.list():
        for stored in await store.read(line.session, after=0, limit=1):
            return stored.body[:1] in ENCRYPTED_MARKS
    return None


async def refuse_encrypted(store: StoreReader) -> None:
    """Refuse to use a store without its keys, also one of an older version, without a marker.

    Raises:
        KeyMissingError: The store is encrypted. Nothing was written.
    """
    await refuse_marked(store)
    if await holds_encrypted(store):
        raise _key_missing("")


async def refuse_marked(store: KeyValueReader) -> None:
    """Refuse to use a store with a marker without its keys.

    Raises:
        KeyMissingError: The store is encrypted. Nothing was written.
    """
    found = await read_marker(store)
    if found is not None:
        raise _key_missing(found.marker.generation)


def _key_missing(generation: str) -> KeyMissingError:
    named = f" {generation!r}" if generation else ""
    return KeyMissingError(
        f"this store is encrypted under the operator's key{named}: give its key file with --key-file, "
        "or wrap the store with `encrypt_store`"
    )


async def is_chained(store: StoreReader) -> bool:
    """Whether the last changed session of a store has links: see `chain`."""
    async for line in store.list():
        for stored in await store.read(line.session, after=0, limit=1):
            return bool(stored.link)
    return False
