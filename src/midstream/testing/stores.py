"""A store that fails when it is told to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence

from midstream.core.blobs import Blob
from midstream.core.records import Sync
from midstream.errors import MidstreamError
from midstream.store.contract import Mark, News, SessionInfo, Store, Stored


class FailingStore:
    """Any store, with failures by script. A failed call has written nothing, as the contract says.

    Args:
        store: The store behind it.
        failures: What the n-th append raises, counted from 1 over all sessions; a repeated append counts again.
    """

    def __init__(self, store: Store, failures: Mapping[int, MidstreamError] | None = None) -> None:
        self.appends = 0
        """Appends asked for so far, failed ones included."""
        self.outage: MidstreamError | None = None
        """While set, every append and every claim raises it: a full disk, a database that is locked."""
        self._store = store
        self._failures = dict(failures or {})

    async def open(self) -> None:
        """See `Store.open`."""
        await self._store.open()

    async def close(self) -> None:
        """See `Store.close`."""
        await self._store.close()

    async def claim(self, session: str, *, at: float) -> int:
        """See `Store.claim`; raises the outage, if there is one."""
        if self.outage is not None:
            raise self.outage
        return await self._store.claim(session, at=at)

    async def release(self, session: str, *, epoch: int) -> None:
        """See `Store.release`."""
        await self._store.release(session, epoch=epoch)

    async def append(
        self,
        session: str,
        bodies: Sequence[bytes],
        *,
        expected: int,
        epoch: int,
        sync: Sync,
        mark: Mark | None = None,
        blobs: Sequence[Blob] = (),
        seal: bytes = b"",
    ) -> int:
        """See `Store.append`; raises what the script or the outage says. Then nothing was written."""
        self.appends += 1
        failure = self.outage or self._failures.get(self.appends)
        if failure is not None:
            raise failure
        return await self._store.append(
            session, bodies, expected=expected, epoch=epoch, sync=sync, mark=mark, blobs=blobs, seal=seal
        )

    async def read(self, session: str, *, after: int, limit: int) -> list[Stored]:
        """See `Store.read`: reading works while writing does not."""
        return await self._store.read(session, after=after, limit=limit)

    async def prune(self, session: str, body: bytes, *, position: int, epoch: int) -> bool:
        """See `Store.prune`; raises the outage, if there is one."""
        if self.outage is not None:
            raise self.outage
        return await self._store.prune(session, body, position=position, epoch=epoch)

    async def blob(self, session: str, digest: str) -> bytes | None:
        """See `Store.blob`: reading works while writing does not."""
        return await self._store.blob(session, digest)

    async def find(self, session: str) -> SessionInfo | None:
        """See `Store.find`."""
        return await self._store.find(session)

    def list(self, *, live: bool | None = None) -> AsyncIterator[SessionInfo]:
        """See `Store.list`."""
        return self._store.list(live=live)

    async def delete(self, session: str) -> bool:
        """See `Store.delete`."""
        return await self._store.delete(session)

    async def watch(self, followed: Mapping[str, int]) -> News:
        """See `Store.watch`."""
        return await self._store.watch(followed)

    async def hand_over(self, session: str, body: bytes) -> bytes:
        """See `Store.hand_over`; raises the outage, if there is one."""
        if self.outage is not None:
            raise self.outage
        return await self._store.hand_over(session, body)

    async def answer(self, letter: int, body: bytes) -> None:
        """See `Store.answer`; raises the outage, if there is one."""
        if self.outage is not None:
            raise self.outage
        await self._store.answer(letter, body)
