"""SQLite files as a kind of store: see `store.opening`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from midstream.errors import UsageError
from midstream.store.contract import StoreReader
from midstream.store.sqlite import SQLiteStore
from midstream.store.sqlite.reading import SQLiteReader, reading
from midstream.world import World


class SQLiteBackend:
    """See `opening.Backend`. An address is three slashes and a path."""

    def open(self, address: str, *, world: World) -> SQLiteStore:
        """See `Backend.open`."""
        return SQLiteStore(self.file(address), world=world)

    @contextlib.contextmanager
    def read(self, address: str) -> Iterator[StoreReader]:
        """See `Backend.read`."""
        with reading(self.file(address)) as reader:
            yield SQLiteReader(reader)

    def file(self, address: str) -> Path:
        """See `Backend.file`."""
        path = address.removeprefix("///")
        if path == address or not path:
            raise UsageError(f"'sqlite:{address}' names no file: write 'sqlite:///' and a path")
        return Path(path)
