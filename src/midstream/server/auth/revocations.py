"""Revocations: the time of each principal's lock-out, and a number that grows with each change of rights.

All processes of a store read them. A process that reads a new number checks its open connections. So a revocation ends
connections in every process within `WATCH_S` and the time of the check.
"""

from __future__ import annotations

import logging
import math

import msgspec
from msgspec import Struct

from midstream.environment import World
from midstream.errors import EntryDamagedError, EntryMovedError, KeyMissingError
from midstream.retries import REPLACE_ATTEMPTS_MAX
from midstream.server.auth.stored_rows import version_of
from midstream.store.contract import KeyValue

REVOKED_NAMESPACE = "access-revoked"
EVERYONE = "*"
"""Placeholder for all principals; the key of a principal contains a colon."""
_NUMBER = "#"
"""Key of the row whose version is the number of changes."""
WATCH_S = 5.0
"""Seconds between two checks of the number, and of files of credentials."""


_log = logging.getLogger(__name__)


class _LockOut(Struct, frozen=True):
    """Time of a lock-out. An encrypted store protects this time, but not its own time of the row.

    Args:
        at: Seconds since 1970; 0 in a row of an older version; then the store's own time applies.
    """

    at: float = 0.0


class Revocations:
    """Times of lock-outs, and the number of changes of rights."""

    def __init__(self, kv: KeyValue, world: World) -> None:
        self._kv = kv
        self._world = world

    async def lock_out(self, principal_key: str) -> None:
        """End the credentials that were issued to a principal until now, or to all with `EVERYONE`."""
        await self._write(principal_key)
        await self.announce()

    async def announce(self) -> None:
        """Make every process of the store check its open connections."""
        await self._write(_NUMBER)

    async def locked_out_at(self, principal_key: str) -> float:
        """Return the time of a principal's last lock-out, in seconds since 1970; 0 for never.

        A row that cannot be read locks the principal out until the next revocation replaces it.
        """
        return max([await self._read(key) for key in (principal_key, EVERYONE)])

    async def newest(self) -> int:
        """Return the number of the last change of rights."""
        return await version_of(self._kv, REVOKED_NAMESPACE, _NUMBER)

    async def _read(self, key: str) -> float:
        try:
            row = await self._kv.kv_get(REVOKED_NAMESPACE, key)
            return 0.0 if row is None else msgspec.json.decode(row.body, type=_LockOut).at or row.at
        except (EntryDamagedError, KeyMissingError, msgspec.DecodeError, RecursionError):
            _log.error("the time of a revocation cannot be read: %r is locked out", key)
            return math.inf

    async def _write(self, key: str) -> None:
        for _ in range(REPLACE_ATTEMPTS_MAX):
            version = await version_of(self._kv, REVOKED_NAMESPACE, key)
            now = self._world.now()
            body = msgspec.json.encode(_LockOut(now))
            try:
                await self._kv.kv_put(REVOKED_NAMESPACE, key, body, expected=version, at=now)
            except EntryMovedError:
                continue
            return
