"""The secret of an encrypted store: drawn once, and stored in the store's marker, wrapped under the operator's key.

It is the key of journal chains and of seals between nodes (`store.guard`). The marker shows every program that the
store is encrypted. After a change of the operator's key, the next opening wraps the same secret again.
"""

from __future__ import annotations

import logging

from midstream.environment import World
from midstream.errors import EntryMovedError, KeyMissingError, StoreDamagedError, UsageError
from midstream.store.contract import Store, StoreReader
from midstream.store.encryption.ciphers import OperatorKeys, fresh_key
from midstream.store.guard.chain import ChainKey, ChainKeys
from midstream.store.guard.store_marker import (
    StoreMarker,
    context_of,
    holds_encrypted,
    is_chained,
    read_marker,
    write_marker,
)
from midstream.store.node_reports import REPORT_COUNTS_S, has_fresh_reports

PLACE = "the marker of the store"

_log = logging.getLogger(__name__)


class WrappedKeySource:
    """The secret of an encrypted store.

    Args:
        is_mixed: Whether the store may have unencrypted journals.
        world: Source of a new secret.
    """

    def __init__(self, house: OperatorKeys, *, is_mixed: bool, world: World) -> None:
        self._house = house
        self._is_mixed = is_mixed
        self._world = world

    async def load(self, store: Store) -> ChainKeys:
        """Return the keys of an open store; mark it as encrypted if it is not yet.

        Raises:
            UsageError: The store has unencrypted sessions, or nodes without keys use it. Nothing was changed.
            KeyMissingError: The operator's keys are not those of this store. Nothing was changed.
            StoreDamagedError: The marker was changed or removed.
        """
        found = await read_marker(store)
        if found is None:
            await self._mark(store)
            found = await read_marker(store)
            if found is None:
                raise StoreDamagedError("the marker of the encrypted store was removed; restore a backup")
        secret = await self._unwrap(found.marker)
        if found.marker.generation != self._generation:
            marker = await self._wrap(secret, is_mixed=found.marker.is_mixed)
            try:
                await write_marker(store, marker, expected=found.version, at=self._world.now())
            except EntryMovedError:
                _log.debug("another process wrapped the secret of the store again")
        return self._keys_of(found.marker, secret)

    async def find(self, reader: StoreReader) -> ChainKeys:
        """Return the keys of a store that is only read; a store older than the marker has none.

        Raises:
            KeyMissingError, StoreDamagedError: As `load`.
        """
        found = await read_marker(reader)
        if found is None:
            return ChainKeys((), is_mixed=True, place=PLACE)
        return self._keys_of(found.marker, await self._unwrap(found.marker))

    @property
    def _generation(self) -> str:
        # A user's class may have only the two methods, without a name.
        return str(getattr(self._house, "generation", ""))

    def _keys_of(self, marker: StoreMarker, secret: bytes) -> ChainKeys:
        is_mixed = marker.is_mixed or self._is_mixed
        return ChainKeys((ChainKey(secret),), is_mixed=is_mixed, place=PLACE)

    async def _mark(self, store: Store) -> None:
        is_encrypted = await holds_encrypted(store)
        if is_encrypted is False and not self._is_mixed:
            raise UsageError(
                "this store has unencrypted sessions: start it without --key-file, or begin a new store "
                "with another --store (in a program, `is_mixed=True` serves both)"
            )
        if is_encrypted and await is_chained(store):
            raise StoreDamagedError("the marker of the encrypted store was removed; restore a backup")
        if not is_encrypted:
            await self._refuse_plain_nodes(store)
        marker = await self._wrap(fresh_key(self._world), is_mixed=is_encrypted is not None)
        try:
            await write_marker(store, marker, expected=0, at=self._world.now())
        except EntryMovedError:
            return  # another process was faster
        if marker.is_mixed:
            _log.warning("the store had sessions before it had a marker: their earlier records have no chain")

    async def _refuse_plain_nodes(self, store: Store) -> None:
        """Refuse to mark a store while servers without keys write to it: their next records would be damage."""
        if not await has_fresh_reports(store, now=self._world.now()) or await read_marker(store) is not None:
            return  # with a marker, the reports may be of nodes with keys
        raise UsageError(
            "servers without --key-file use this store: stop them first, or begin a new store with another --store. "
            f"A killed server counts as running for {REPORT_COUNTS_S:.0f} s"
        )

    async def _wrap(self, secret: bytes, *, is_mixed: bool) -> StoreMarker:
        generation = self._generation
        wrapped = await self._house.wrap(secret, context=context_of(generation, is_mixed=is_mixed))
        return StoreMarker(generation, wrapped, is_mixed)

    async def _unwrap(self, marker: StoreMarker) -> bytes:
        try:
            return await self._house.unwrap(marker.secret, context=marker.context)
        except KeyMissingError as error:
            message = f"these are not the operator's keys of this store: {error.message}"
            raise KeyMissingError(message) from error
