"""Stores by their URL: one registry of the kinds of stores, to which a program adds its own.

sqlite:///sessions.db    a file in the current folder; four slashes begin an absolute path
sessions.db              the same: a path is a SQLite file
memory:                  nothing survives the process
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from midstream.environment import World
from midstream.errors import UsageError
from midstream.store.blocking_reads import ClosedStore, LoopThread, decrypt_reader
from midstream.store.contract import Store, StoreReader

SQLITE = "sqlite"
_URL = re.compile(r"([a-z][a-z0-9+.-]+):(.*)", re.DOTALL)
"""A scheme has two letters at least: a single letter is a drive of Windows."""


class Backend(Protocol):
    """One kind of store. Its addresses are what follows the colon in its URLs."""

    def open(self, address: str, *, world: World) -> Store:
        """Return the store of an address, not opened yet.

        Raises:
            UsageError: It is no address of this kind.
        """

    def read(self, address: str) -> AbstractContextManager[StoreReader]:
        """Open a store for reading, also while a server works on it. Nothing is created, locked or written.

        Raises:
            NotFoundError: There is no such store, or nothing was ever stored in it.
            UsageError: It is no address of this kind, or another program's data.
            StoreDamagedError: It cannot be read.
        """

    def file(self, address: str) -> Path | None:
        """Return the file that is the store, where it is one."""


def _sqlite() -> Backend:
    from midstream.store.sqlite.backend import SQLiteBackend  # noqa: PLC0415 - other stores need no SQLite

    return SQLiteBackend()


def _memory() -> Backend:
    from midstream.store.memory import MemoryBackend  # noqa: PLC0415 - as above

    return MemoryBackend()


BACKENDS: dict[str, Callable[[], Backend]] = {SQLITE: _sqlite, "memory": _memory}
"""The kinds of stores, by the schemes of their URLs."""


def open_store(named: Store | str | Path, *, world: World = World()) -> Store:
    """Return the store that `named` stands for, not opened yet.

    Args:
        named: A store, its URL, or the path of a SQLite file.
        world: Clock and ids of a store that is made here.

    Raises:
        UsageError: No kind of store has this scheme.
    """
    if not isinstance(named, str | Path):
        return named
    backend, address = _find_backend(named)
    return backend.open(address, world=world)


@contextlib.contextmanager
def read_store(named: str | Path, *, key_file: Path | None = None) -> Iterator[ClosedStore]:
    """Open a store for reading, without `await`; a server may work on it meanwhile.

    Args:
        named: Its URL, or the path of a SQLite file.
        key_file: The operator's keys, where it is encrypted under them.

    Raises:
        NotFoundError: There is no such store, or nothing was ever stored in it.
        UsageError: It is another program's, or may not be read; or the keys cannot be.
        StoreDamagedError: It cannot be read.
    """
    backend, address = _find_backend(named)
    with backend.read(address) as reader, contextlib.closing(LoopThread()) as loop:
        yield ClosedStore(reader, reader if key_file is None else decrypt_reader(reader, key_file), loop)


@contextlib.contextmanager
def read_stored(named: str | Path) -> Iterator[StoreReader]:
    """Open a store for reading, as it is stored; a server may work on it meanwhile.

    Raises:
        NotFoundError, UsageError, StoreDamagedError: As `read_store`.
    """
    backend, address = _find_backend(named)
    with backend.read(address) as reader:
        yield reader


def file_of(named: str | Path) -> Path | None:
    """Return the file that a store is, where it is one; see `read_store`."""
    backend, address = _find_backend(named)
    return backend.file(address)


def _find_backend(named: str | Path) -> tuple[Backend, str]:
    url = _URL.fullmatch(named) if isinstance(named, str) else None
    if url is None:
        return BACKENDS[SQLITE](), f"///{named}"
    scheme, address = url.groups()
    if scheme not in BACKENDS:
        known = ", ".join(f"'{each}:'" for each in sorted(BACKENDS))
        raise UsageError(f"store {named!r} has an unknown scheme; known: {known}. A path needs none.")
    return BACKENDS[scheme](), address
