"""Reads of a store from a program without an event loop, such as a command."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from midstream.environment import World
from midstream.session.child_names import root_of
from midstream.store.contract import ESCROW, KeyValueEntry, SessionInfo, StoredRecord, StoreReader
from midstream.store.guard.guarded_store import GuardedReader
from midstream.store.key_location import KeyLocation, open_keys

T = TypeVar("T")

ENTRY_MARK = b"\x02"
"""First byte of an encrypted value of a key-value entry: see `store.encryption.ciphers`."""
ENCRYPTED_MARKS = (b"\x01", ENTRY_MARK)
"""First bytes of encrypted records."""
LIST_PAGE = 200
"""Sessions of a listing that are read in one step."""


class LoopThread:
    """An event loop in a thread, for callers that may run in a loop of their own."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._runner = asyncio.Runner()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine, and return its result."""
        return self._thread.submit(self._runner.run, work).result()

    @contextlib.contextmanager
    def within(self, place: AbstractAsyncContextManager[T]) -> Iterator[T]:
        """Enter an asynchronous context in the loop, and leave it there."""
        opened = self.run(_entered(place))
        try:
            yield opened
        finally:
            self.run(_left(place))

    def close(self) -> None:
        """Close the loop's asynchronous generators, and end the thread."""
        with self._thread:
            self._thread.submit(self._runner.close).result()


class ClosedStore:
    """The methods of a `StoreReader`, without `await`. `store_registry.read_store` opens one.

    Args:
        reader: The reader, which decrypts with the given keys.
    """

    def __init__(self, stored: StoreReader, reader: StoreReader, loop: LoopThread) -> None:
        self._stored = stored
        self._reader = reader
        self._run = loop.run

    def read(self, session: str, *, after: int, limit: int) -> list[StoredRecord]:
        """See `StoreReader.read`."""
        return self._run(self._reader.read(session, after=after, limit=limit))

    def read_stored(self, session: str, *, after: int, limit: int) -> list[StoredRecord]:
        """Read records as they are stored: not decrypted, not checked, and with their links."""
        return self._run(self._stored.read(session, after=after, limit=limit))

    def blob(self, session: str, digest: str) -> bytes | None:
        """See `StoreReader.blob`."""
        return self._run(self._reader.blob(session, digest))

    def find(self, session: str) -> SessionInfo | None:
        """See `StoreReader.find`."""
        return self._run(self._reader.find(session))

    def list(self) -> Iterator[SessionInfo]:
        """See `StoreReader.list`."""
        lines = self._reader.list()
        while page := self._run(_page_of(lines)):
            yield from page

    def kv_list(self, namespace: str) -> Sequence[KeyValueEntry]:
        """See `KeyValueReader.kv_list`."""
        return self._run(self._reader.kv_list(namespace))

    def ask(self, question: Callable[[StoreReader], Coroutine[Any, Any, T]]) -> T:
        """Run a query on the store, and return its result."""
        return self._run(question(self._reader))

    def is_under_client_key(self, session: str) -> bool:
        """Whether a session is encrypted under its client's secret."""
        return self._run(self._stored.kv_get(ESCROW, root_of(session))) is not None


async def _entered(place: AbstractAsyncContextManager[T]) -> T:
    return await place.__aenter__()


async def _left(place: AbstractAsyncContextManager[T]) -> None:
    await place.__aexit__(None, None, None)


async def _page_of(lines: AsyncIterator[SessionInfo]) -> list[SessionInfo]:
    page: list[SessionInfo] = []
    async for line in lines:
        page.append(line)
        if len(page) == LIST_PAGE:
            break
    return page


def decrypt_reader(reader: StoreReader, key_location: KeyLocation) -> StoreReader:
    """Return a reader that decrypts with the operator's keys.

    Args:
        key_location: The keys, as in `midstream serve --key-file`.

    Raises:
        UsageError: The extra is not installed, or the keys cannot be read.
    """
    keys = open_keys(key_location)
    from midstream.store.encryption.encrypted_store import EncryptedReader, OneForAll  # noqa: PLC0415 - an extra
    from midstream.store.encryption.store_secret import WrappedKeySource  # noqa: PLC0415 - see above

    guarded = GuardedReader(reader, WrappedKeySource(keys, is_mixed=False, world=World()))
    return EncryptedReader(guarded, OneForAll(keys))
