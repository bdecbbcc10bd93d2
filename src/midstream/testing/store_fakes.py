"""Stores for tests: shared places, a base for wrappers, and a store that fails by script."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping
from contextlib import asynccontextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from midstream.errors import MidstreamError
from midstream.store.contract import ListPlace, SessionInfo, Store

P = ParamSpec("P")
T = TypeVar("T")

ODD_NAMES = ("s", "a/b", "it's", '"', "%_", "naïve ☃ 😀", "x" * 500, "line\nbreak", " ")
ODD_BODIES = (b"", b"{}", b"\x00\xff\r\n'", b"x" * 300_000)


class Storage(Protocol):
    """Storage that outlives a process: a file, a server."""

    def store(self) -> Store:
        """Return another store of this place, not open, as another process would create it."""

    def kill(self, store: Store) -> None:
        """Let an open store's node die without closing it. The store is not used again."""


@asynccontextmanager
async def open_store(place: Storage) -> AsyncIterator[Store]:
    """Open another store of a place for the length of the block."""
    store = place.store()
    await store.open()
    try:
        yield store
    finally:
        await store.close()


def _in_front(
    method: Callable[Concatenate[Store, P], Awaitable[T]],
) -> Callable[Concatenate[StoreInFront, P], Coroutine[Any, Any, T]]:
    """Return a method that calls the inner store's after `before_operation`."""
    name = method.__name__
    is_of_session = "session" in inspect.signature(method).parameters

    @wraps(method)
    async def call(front: StoreInFront, /, *args: P.args, **kwargs: P.kwargs) -> T:
        session = kwargs.get("session", args[0] if args else "") if is_of_session else ""
        await front.before_operation(name, str(session))
        result: T = await getattr(front.store, name)(*args, **kwargs)
        return result

    return call


class StoreInFront(Store):
    """A wrapper of any store that calls `before_operation` before each operation. It declares no abilities."""

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
        """Called before each operation, by its name in `Store`; it may wait or raise."""

    async def list(
        self,
        *,
        live: bool | None = None,
        of: Collection[str] | None = None,
        after: ListPlace | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[SessionInfo]:
        """See `StoreReader.list`."""
        await self.before_operation("list", "")
        async for each in self.store.list(live=live, of=of, after=after, limit=limit):
            yield each

    open = _in_front(Store.open)
    close = _in_front(Store.close)
    claim = _in_front(Store.claim)
    release = _in_front(Store.release)
    append = _in_front(Store.append)
    read = _in_front(Store.read)
    prune = _in_front(Store.prune)
    blob = _in_front(Store.blob)
    blob_digests = _in_front(Store.blob_digests)
    find = _in_front(Store.find)
    delete = _in_front(Store.delete)
    watch = _in_front(Store.watch)
    is_held_elsewhere = _in_front(Store.is_held_elsewhere)
    forward = _in_front(Store.forward)
    answer = _in_front(Store.answer)
    kv_get = _in_front(Store.kv_get)
    kv_list = _in_front(Store.kv_list)
    kv_namespaces = _in_front(Store.kv_namespaces)
    kv_put = _in_front(Store.kv_put)
    kv_delete = _in_front(Store.kv_delete)


class FailingStore(StoreInFront):
    """A wrapper of any store, with scripted failures: a failed call has written nothing, and reads succeed.

    Args:
        failures: The error of the n-th append, counted from 1 over all sessions; a repeated append counts again.
    """

    def __init__(self, store: Store, failures: Mapping[int, MidstreamError] | None = None) -> None:
        super().__init__(store)
        self.appends = 0
        """Appends so far, including failed ones."""
        self.outage: MidstreamError | None = None
        """While set, every append and every claim raises it: a full disk, or a locked database."""
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
