"""SQLite files as stores: see `store_registry`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from typing_extensions import override

from midstream.environment import World
from midstream.errors import UsageError
from midstream.store.contract import StoreReader
from midstream.store.sqlite import SQLiteStore
from midstream.store.sqlite.reads import SQLiteReader, reading
from midstream.store.store_registry import Backend


class SQLiteBackend(Backend):
    """See `store_registry.Backend`. An address is three slashes and a path."""

    @override
    def open(self, address: str, *, world: World) -> SQLiteStore:
        return SQLiteStore(self.file(address), world=world)

    @contextlib.asynccontextmanager
    @override
    async def read(self, address: str) -> AsyncIterator[StoreReader]:
        with reading(self.file(address)) as reader:
            yield SQLiteReader(reader)

    @override
    def file(self, address: str) -> Path:
        path = address.removeprefix("///")
        if path == address or not path:
            raise UsageError(f"'sqlite:{address}' has no path; write 'sqlite:///' and a path")
        return Path(path)
