"""Stores in front of others: one to build on, and one that fails when it is told to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence

from midstream.core.blobs import Blob
from midstream.core.records import Sync
from midstream.errors import MidstreamError
from midstream.store.contract import Mark, News, SessionInfo, Store, Stored


class StoreInFront:
    """Any store, with a word said before each operation: `asked` may wait, or refuse.

    Args:
        store: The store behind it.
    """

    def __init__(self, store: Store) -> None:
        self.store = store

    async def asked(self, operation: str, session: str) -> None:
        """Called before each operation, by its name in `Store`; whatever it raises is raised instead."""

    async def open(self) -> None:
        """See `Store.open`."""
        await self.asked("open", "")
        await self.store.open()

    async def close(self) -> None:
        """See `Store.close`."""
        await self.asked("close", "")
        await self.store.close()

    async def claim(self, session: str, *, at: float) -> int:
        """See `Store.claim`."""
        await self.asked("claim", session)
        return await self.store.claim(session, at=at)

    async def release(self, session: str, *, epoch: int) -> None:
        """See `Store.release`."""
        await self.asked("release", session)
        await self.store.release(session, epoch=epoch)

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
        """See `Store.append`."""
        await self.asked("append", session)
        return await self.store.append(
            session, bodies, expected=expected, epoch=epoch, sync=sync, mark=mark, blobs=blobs, seal=seal
        )

    async def read(self, session: str, *, after: int, limit: int) -> list[Stored]:
        """See `Store.read`."""
        await self.asked("read", session)
        return await self.store.read(session, after=after, limit=limit)

    async def prune(self, session: str, body: bytes, *, position: int, epoch: int) -> bool:
        """See `Store.prune`."""
        await self.asked("prune", session)
        return await self.store.prune(session, body, position=position, epoch=epoch)

    async def blob(self, session: str, digest: str) -> bytes | None:
        """See `Store.blob`."""
        await self.asked("blob", session)
        return await self.store.blob(session, digest)

    async def find(self, session: str) -> SessionInfo | None:
        """See `Store.find`."""
        await self.asked("find", session)
        return await self.store.find(session)

    async def list(
        self, *, live: bool | None = None, of: Collection[str] | None = None
    ) -> AsyncIterator[SessionInfo]:
        """See `Store.list`."""
        await self.asked("list", "")
        async for each in self.store.list(live=live, of=of):
            yield each

    async def delete(self, session: str) -> bool:
        """See `Store.delete`."""
        await self.asked("delete", session)
        return await self.store.delete(session)

    async def watch(self, followed: Mapping[str, int]) -> News:
        """See `Store.watch`."""
        await self.asked("watch", "")
        return await self.store.watch(followed)

    async def hand_over(self, session: str, body: bytes) -> bytes:
        """See `Store.hand_over`."""
        await self.asked("hand_over", session)
        return await self.store.hand_over(session, body)

    async def answer(self, letter: int, body: bytes) -> None:
        """See `Store.answer`."""
        await self.asked("answer", "")
        await self.store.answer(letter, body)


class FailingStore(StoreInFront):
    """Any store, with failures by script. A failed call has written nothing, as the contract says; reading goes on.

    Args:
        store: The store behind it.
        failures: What the n-th append raises, counted from 1 over all sessions; a repeated append counts again.
    """

    def __init__(self, store: Store, failures: Mapping[int, MidstreamError] | None = None) -> None:
        super().__init__(store)
        self.appends = 0
        """Appends asked for so far, failed ones included."""
        self.outage: MidstreamError | None = None
        """While set, every append and every claim raises it: a full disk, a database that is locked."""
        self._failures = dict(failures or {})

    async def asked(self, operation: str, session: str) -> None:  # noqa: ARG002 - see StoreInFront
        """Raise what the script or the outage says."""
        failure = self.outage if operation in _WRITES else None
        if operation == "append":
            self.appends += 1
            failure = failure or self._failures.get(self.appends)
        if failure is not None:
            raise failure.again()


_WRITES = frozenset(("append", "claim", "prune", "hand_over", "answer"))
