"""Stores by their URL: a registry of the backends, to which a program can add its own.

sqlite:///sessions.db    a file in the current folder; four slashes begin an absolute path
sessions.db              the same: a path is a SQLite file
postgresql://host/db     tables of a PostgreSQL database, for any number of servers
nats://host,host,host    streams of a NATS JetStream cluster, for any number of servers
memory:                  nothing survives the process
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from midstream.environment import World
from midstream.errors import UsageError
from midstream.store.blocking_reads import ClosedStore, LoopThread, decrypt_reader
from midstream.store.contract import Store, StoreReader
from midstream.store.guard.chain import NoKeySource
from midstream.store.guard.guarded_store import GuardedReader, guard_store
from midstream.store.guard.store_marker import holds_encrypted, read_marker
from midstream.store.key_location import KeyLocation
from midstream.store.store_copy import Copied, copy_store

SQLITE = "sqlite"
POSTGRES = "postgresql"
NATS = "nats"
_URL = re.compile(r"([a-z][a-z0-9+.-]+):(.*)", re.DOTALL)
"""A scheme has at least two letters: a single letter is a drive of Windows."""


_SECRETS = frozenset(("password", "sslpassword"))
"""Parameters of a URL that are never shown."""


class Prepared(Struct, frozen=True):
    """Versions of a store's tables before and after its preparation; 0: there were none."""

    before: int
    after: int


class Backend(Protocol):
    """One kind of store. Its addresses are the part of a URL after the scheme's colon."""

    def open(self, address: str, *, world: World) -> Store:
        """Return the store of an address, not opened yet.

        Raises:
            UsageError: It is not a valid address.
        """

    def read(self, address: str) -> AbstractAsyncContextManager[StoreReader]:
        """Open a store for reading, also while a server uses it. Nothing is created, locked or written.

        Raises:
            NotFoundError: There is no such store, or nothing was ever stored in it.
            UsageError: It is not a valid address, or the data belong to another program.
            StoreDamagedError: The store cannot be read.
        """

    def file(self, address: str) -> Path | None:
        """Return the file of the store, or None if it is not one file."""

    async def prepare(self, address: str, *, grant: str = "") -> Prepared:  # noqa: ARG002 - kinds differ
        """Create or migrate the tables of a store.

        Args:
            grant: A role of the database that gets the rights with which a server runs.

        Raises:
            UsageError: This kind of store needs no preparation, or the database refused.
        """
        raise UsageError("this kind of store needs no preparation: it creates its tables when it is opened")


def _sqlite() -> Backend:
    from midstream.store.sqlite.backend import SQLiteBackend  # noqa: PLC0415 - other stores need no SQLite

    return SQLiteBackend()


def _memory() -> Backend:
    from midstream.store.memory import MemoryBackend  # noqa: PLC0415 - as above

    return MemoryBackend()


def _postgres() -> Backend:
    from midstream.store.postgres.postgres_backend import PostgresBackend  # noqa: PLC0415 - an extra

    return PostgresBackend()


def _jetstream() -> Backend:
    from midstream.store.jetstream.jetstream_backend import JetStreamBackend  # noqa: PLC0415 - an extra

    return JetStreamBackend()


BACKENDS: dict[str, Callable[[], Backend]] = {
    SQLITE: _sqlite,
    POSTGRES: _postgres,
    "postgres": _postgres,
    NATS: _jetstream,
    "memory": _memory,
}
"""The kinds of stores, by the schemes of their URLs."""


def open_store(named: Store | str | Path, *, world: World = World()) -> Store:
    """Return the store of a name, not opened yet.

    Args:
        named: A store, its URL, or the path of a SQLite file.
        world: Clock and ids of a new store.

    Raises:
        UsageError: No kind of store has this scheme.
    """
    if not isinstance(named, str | Path):
        return named
    backend, address = _find_backend(named)
    return backend.open(address, world=world)


@contextlib.contextmanager
def read_store(named: str | Path, *, key_file: KeyLocation | None = None) -> Iterator[ClosedStore]:
    """Open a store for reading, without `await`; a server may use it meanwhile.

    Args:
        named: The URL of the store, or the path of a SQLite file.
        key_file: The operator's keys, or their endpoint, if the store is encrypted.

    Raises:
        NotFoundError: There is no such store, or nothing was ever stored in it.
        UsageError: The data belong to another program, or the store or the keys cannot be read.
        StoreDamagedError: The store cannot be read.
    """
    backend, address = _find_backend(named)
    with contextlib.closing(LoopThread()) as loop, loop.within(backend.read(address)) as reader:
        guarded = GuardedReader(reader, NoKeySource())
        yield ClosedStore(reader, guarded if key_file is None else decrypt_reader(reader, key_file), loop)


def read_stored(named: str | Path) -> AbstractAsyncContextManager[StoreReader]:
    """Open a store for reading, without decryption and checks; a server may use it meanwhile.

    Raises:
        NotFoundError, UsageError, StoreDamagedError: As `read_store`.
    """
    backend, address = _find_backend(named)
    return backend.read(address)


async def copy_named(source: str | Path, target: str | Path, *, world: World = World()) -> Copied:
    """Copy a store into another one, and compare them; see `copy_store`.

    An encrypted store is copied without decryption. Any other is checked while it is read; the target's key guards it.

    Raises:
        NotFoundError: There is no such source.
        UsageError: Both are the same, or the target has other sessions.
        StoreDamagedError: Another program has changed the source, or the copy differs.
    """
    if show_store(source) == show_store(target):
        raise UsageError("FROM and TO are the same store")
    async with read_stored(source) as stored:
        is_encrypted = await read_marker(stored) is not None or await holds_encrypted(stored)
        reader = stored if is_encrypted else GuardedReader(stored, NoKeySource())
        opened = open_store(target, world=world)
        store = opened if is_encrypted else guard_store(opened, world=world)
        await store.open()
        try:
            return await copy_store(reader, store)
        finally:
            await store.close()


def file_of(named: str | Path) -> Path | None:
    """Return the file of a store, or None if it is not one file; see `read_store`."""
    backend, address = _find_backend(named)
    return backend.file(address)


def is_store_url(named: str) -> bool:
    """Whether a text is the URL of a store without a file, such as `postgresql://host/db`."""
    url = _URL.fullmatch(named)
    return url is not None and url[1] in BACKENDS and file_of(named) is None


def is_shareable(named: str | Path) -> bool:
    """Whether several processes can use a store; a store in memory belongs to its process."""
    return not isinstance(_find_backend(named)[0], type(_memory()))


async def prepare_store(named: str | Path, *, grant: str = "") -> Prepared:
    """Create or migrate the tables of a store; see `Backend.prepare`."""
    backend, address = _find_backend(named)
    return await backend.prepare(address, grant=grant)


def show_store(named: str | Path) -> str:
    """Return the name of a store for messages and logs: without a password."""
    url = _URL.fullmatch(named) if isinstance(named, str) else None
    return str(named) if url is None else f"{url[1]}:{hide_password(url[2])}"


def hide_password(address: str) -> str:
    """Return the part of a URL after the scheme, without passwords."""
    place, mark, rest = address.partition("?")
    slashes = "//" if place.startswith("//") else ""
    authority, slash, path = place.removeprefix("//").partition("/")
    user, at, host = authority.rpartition("@")
    shown = f"{slashes}{user.partition(':')[0]}{at}{host}{slash}{path}"
    kept = [each for each in rest.split("&") if each.partition("=")[0].lower() not in _SECRETS]
    return f"{shown}?{'&'.join(kept)}" if mark and kept else shown


def _find_backend(named: str | Path) -> tuple[Backend, str]:
    url = _URL.fullmatch(named) if isinstance(named, str) else None
    if url is None:
        return BACKENDS[SQLITE](), f"///{named}"
    scheme, address = url.groups()
    if scheme not in BACKENDS:
        known = ", ".join(f"'{each}:'" for each in sorted(BACKENDS))
        raise UsageError(
            f"store {show_store(named)!r} has an unknown scheme; known: {known}. A path needs none."
        )
    return BACKENDS[scheme](), address
