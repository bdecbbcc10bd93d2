"""Removal of expired plain streams in the background.

A stream with a lifetime has an entry in the namespace of the ten minutes in which it expires. The entry is written
before the stream is created. A sweep lists only namespaces whose time has passed, so its cost does not depend on the
number of streams. The servers of a store share the place of the next namespace.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

import msgspec

from midstream.background_loops import spawn_loop
from midstream.engine.host import Host
from midstream.errors import EntryMovedError, MidstreamError
from midstream.server.api.plain_streams import PlainStreams, StreamGoneError
from midstream.store.contract import KeyValueEntry

SWEEP_S = 60.0
"""Seconds between sweeps."""
BUCKET_S = 600
"""Seconds of expiry times in one namespace."""
SWEPT_MAX = 250
"""Streams that one sweep checks."""
BUCKETS_MAX = 250
"""Namespaces that one sweep lists."""
PLACE, _NEXT = "plain-stream-sweep", "next"
"""Entry with the first namespace that may have entries."""

_log = logging.getLogger(__name__)


class StreamSweeper:
    """Removes expired streams, from `start` to `stop`."""

    def __init__(self, host: Host, streams: PlainStreams) -> None:
        self._store = host.store
        self._world = host.world
        self._streams = streams
        self._sweeping: asyncio.Task[None] | None = None
        self._has_place = False

    def start(self) -> None:
        """Start sweeping, after the store was opened."""
        self._sweeping = spawn_loop(self._world, self._sweep_on, name="sweep of plain streams")

    async def stop(self) -> None:
        """Stop sweeping. Idempotent."""
        sweeping, self._sweeping = self._sweeping, None
        if sweeping is not None:
            sweeping.cancel()
            await asyncio.wait([sweeping])

    async def note(self, journal: str, ends_at: float) -> None:
        """Store an entry for the expiry of a stream at `ends_at`, in seconds since 1970."""
        now = self._world.now()
        if not self._has_place:  # the place at which the first sweep begins
            with suppress(EntryMovedError):
                body = msgspec.json.encode(_bucket_of(now) - 1)
                await self._store.kv_put(PLACE, _NEXT, body, expected=0, at=now)
            self._has_place = True
        namespace = _namespace_of(max(_bucket_of(ends_at), _bucket_of(now)))
        kept = await self._store.kv_get(namespace, journal)
        with suppress(EntryMovedError):  # another server writes the same entry
            body = msgspec.json.encode(ends_at)
            version = 0 if kept is None else kept.version
            await self._store.kv_put(namespace, journal, body, expected=version, at=now)

    async def sweep(self, *, limit: int = SWEPT_MAX) -> int:
        """Remove expired streams; return the number of checked streams, at most `limit`."""
        now = self._world.now()
        kept = await self._store.kv_get(PLACE, _NEXT)
        if kept is None:
            return 0
        current, looked_at = _bucket_of(now), 0
        first = msgspec.json.decode(kept.body, type=int)
        place = first
        for bucket in range(first, min(current, first + BUCKETS_MAX) + 1):
            entries = await self._store.kv_list(_namespace_of(bucket))
            due = [each for each in entries if msgspec.json.decode(each.body, type=float) <= now]
            for entry in due[: limit - looked_at]:
                await self._look_at(bucket, entry)
                looked_at += 1
            if looked_at >= limit or len(due) < len(entries):
                break
            place = min(bucket + 1, current - 1)  # the previous bucket may still get a late entry
        if place > first:
            with suppress(EntryMovedError):  # another server sweeps at the same time
                body = msgspec.json.encode(place)
                await self._store.kv_put(PLACE, _NEXT, body, expected=kept.version, at=now)
        return looked_at

    async def _look_at(self, bucket: int, entry: KeyValueEntry) -> None:
        """Remove a stream if it has expired; otherwise store an entry for its new expiry."""
        journal = entry.key
        ends_at: float | None = self._world.now() + BUCKET_S
        try:
            known = await self._streams.find(journal)
            ends_at = None if known is None else await self._streams.ends_at(known)
        except StreamGoneError:  # its forks need it: check again later
            pass
        except MidstreamError as error:
            _log.warning("an expired stream cannot be removed: %s", error.message)
        if ends_at is not None:
            await self.note(journal, max(ends_at, self._world.now() + 1.0))
        if ends_at is None or _bucket_of(ends_at) != bucket:
            await self._store.kv_delete(_namespace_of(bucket), journal, expected=entry.version)

    async def _sweep_on(self) -> None:
        while True:
            await self._world.sleep(SWEEP_S * (0.5 + self._world.chance()))
            try:
                await self.sweep()
            except MidstreamError as error:  # the store may be unavailable for a while
                _log.warning("expired streams cannot be removed: %s", error.message)


def _bucket_of(at: float) -> int:
    return int(at // BUCKET_S)


def _namespace_of(bucket: int) -> str:
    return f"plain-stream-ends-{bucket}"
