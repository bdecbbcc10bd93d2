"""Stores in tests: the places they share, one in front of another to build on, and one that fails by script."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from typing_extensions import override

from midstream.errors import MidstreamError
from midstream.store.contract import Batch, KeyValueEntry, ListPlace, News, SessionInfo, Store, StoredRecord

ODD_NAMES = ("s", "a/b", "it's", '"', "%_", "naïve ☃ 😀", "x" * 500, "line\nbreak", " ")
ODD_BODIES = (b"", b"{}", b"\x00\xff\r\n'", b"x" * 300_000)


class Storage(Protocol):
    """Storage that outlives a process: a file, a server."""

    def store(self) -> Store:
        """Return another store of this place, not open: what another process would make."""

    def kill(self, store: Store) -> None:
        """Let an open store's node die without closing it. That store is not used again."""


@asynccontextmanager
async def open_store(place: Storage) -> AsyncIterator[Store]:
    """Open another store of a place for the length of the block."""
    store = place.store()
    await store.open()
    try:
        yield store
    finally:
        await store.close()


class StoreInFront(Store):
    """Any store, with a call of `before_operation` each time, which may wait or refuse. It declares no abilities.

    Args:
        store: The store behind it.
    """

    def __init__(self, store: Store) -> None:
        self.store = store

    @property
    def node(self) -> str:  # type: ignore[override]  # that of the store behind it
        """See `Store.node`."""
        return self.store.node

    @property
    def key_file(self) -> Path | None:
        """See `Store.key_file`."""
        return self.store.key_file

    async def before_operation(self, operation: str, session: str) -> None:
        """Called before each operation, by its name in `Store`; whatever it raises is raised instead."""

    @override
    async def open(self) -> None:
        await self.before_operation("open", "")
        await self.store.open()

    @override
    async def close(self) -> None:
        await self.before_operation("close", "")
        await self.store.close()

    @override
    async def claim(self, session: str, *, at: float, is_free: bool | None = None) -> int:
        await self.before_operation("claim", session)
        return await self.store.claim(session, at=at, is_free=is_free)

    @override
    async def release(self, session: str, *, epoch: int) -> None:
        await self.before_operation("release", session)
        await self.store.release(session, epoch=epoch)

    @override
    async def append(self, session: str, batch: Batch) -> int:
        await self.before_operation("append", session)
        return await self.store.append(session, batch)

    @override
    async def read(self, session: str, *, after: int, limit: int) -> list[StoredRecord]:
        await self.before_operation("read", session)
        return await self.store.read(session, after=after, limit=limit)

    @override
    async def prune(
        self, session: str, body: bytes, *, position: int, epoch: int, link: bytes | None = None
    ) -> bool:
        await self.before_operation("prune", session)
        return await self.store.prune(session, body, position=position, epoch=epoch, link=link)

    @override
    async def blob(self, session: str, digest: str) -> bytes | None:
        await self.before_operation("blob", session)
        return await self.store.blob(session, digest)

    @override
    async def blob_digests(self, session: str) -> Sequence[str]:
        await self.before_operation("blob_digests", session)
        return await self.store.blob_digests(session)

    @override
    async def find(self, session: str) -> SessionInfo | None:
        await self.before_operation("find", session)
        return await self.store.find(session)

    @override
    async def list(
        self,
        *,
        live: bool | None = None,
        of: Collection[str] | None = None,
        after: ListPlace | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[SessionInfo]:
        await self.before_operation("list", "")
        async for each in self.store.list(live=live, of=of, after=after, limit=limit):
            yield each

    @override
    async def delete(self, session: str) -> bool:
        await self.before_operation("delete", session)
        return await self.store.delete(session)

    @override
    async def watch(self, followed: Mapping[str, int]) -> News:
        await self.before_operation("watch", "")
        return await self.store.watch(followed)

    @override
    async def forward(self, session: str, body: bytes) -> bytes:
        await self.before_operation("forward", session)
        return await self.store.forward(session, body)

    @override
    async def answer(self, forwarded: int, body: bytes) -> None:
        await self.before_operation("answer", "")
        await self.store.answer(forwarded, body)

    @override
    async def kv_get(self, namespace: str, key: str) -> KeyValueEntry | None:
        await self.before_operation("kv_get", "")
        return await self.store.kv_get(namespace, key)

    @override
    async def kv_list(self, namespace: str) -> Sequence[KeyValueEntry]:
        await self.before_operation("kv_list", "")
        return await self.store.kv_list(namespace)

    @override
    async def kv_namespaces(self) -> Sequence[str]:
        await self.before_operation("kv_namespaces", "")
        return await self.store.kv_namespaces()

    @override
    async def kv_put(self, namespace: str, key: str, body: bytes, *, expected: int, at: float) -> int:
        await self.before_operation("kv_put", "")
        return await self.store.kv_put(namespace, key, body, expected=expected, at=at)

    @override
    async def kv_delete(self, namespace: str, key: str, *, expected: int) -> bool:
        await self.before_operation("kv_delete", "")
        return await self.store.kv_delete(namespace, key, expected=expected)


class FailingStore(StoreInFront):
    """Any store, with failures by script. A failed call has written nothing, as in the contract; reading goes on.

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

    async def before_operation(self, operation: str, session: str) -> None:  # noqa: ARG002 - see StoreInFront
        """Raise the error of the script or the outage."""
        failure = self.outage if operation in _WRITES else None
        if operation == "append":
            self.appends += 1
            failure = failure or self._failures.get(self.appends)
        if failure is not None:
            raise failure.again()


_WRITES = frozenset(("append", "claim", "prune", "forward", "answer", "kv_put", "kv_delete"))
