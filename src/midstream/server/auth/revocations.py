"""Revocations: when each principal was locked out, and a number that rises with each change of rights.

All processes of a store read them there. A process that reads a higher number checks its live connections again, so
that a revocation ends connections in every process within `WATCH_S` and the time of the check.
"""

from __future__ import annotations

from midstream.environment import World
from midstream.errors import EntryMovedError
from midstream.retries import REPLACE_ATTEMPTS_MAX
from midstream.store.contract import KeyValue, KeyValueEntry

REVOKED_NAMESPACE = "access-revoked"
EVERYONE = "*"
"""Stands for all principals; the key of one has a colon."""
_NUMBER = "#"
"""Key of the row whose version is the number."""
WATCH_S = 5.0
"""Seconds between two reads of the number, and of files with credentials."""


class Revocations:
    """Times of lock-outs, and the number of the last change of rights."""

    def __init__(self, kv: KeyValue, world: World) -> None:
        self._kv = kv
        self._world = world

    async def lock_out(self, principal_key: str) -> None:
        """End what was issued to a principal until now; `EVERYONE` is all of them."""
        await self._write(principal_key)
        await self.announce()

    async def announce(self) -> None:
        """Let every process of the store check its live connections again."""
        await self._write(_NUMBER)

    async def locked_out_at(self, principal_key: str) -> float:
        """Return when a principal was locked out last, in seconds since 1970; 0 for never."""
        rows = [await self._read(key) for key in (principal_key, EVERYONE)]
        return max((row.at for row in rows if row is not None), default=0.0)

    async def newest(self) -> int:
        """Return the number of the last change of rights."""
        row = await self._read(_NUMBER)
        return row.version if row is not None else 0

    async def _read(self, key: str) -> KeyValueEntry | None:
        return await self._kv.kv_get(REVOKED_NAMESPACE, key)

    async def _write(self, key: str) -> None:
        for _ in range(REPLACE_ATTEMPTS_MAX):
            row = await self._read(key)
            version = row.version if row is not None else 0
            try:
                now = self._world.now()
                await self._kv.kv_put(REVOKED_NAMESPACE, key, b"{}", expected=version, at=now)
            except EntryMovedError:
                continue
            return
