"""Decrypt what a `Reader` finds in a store that no process here has open."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import cast

from midstream.errors import UsageError
from midstream.store.contract import SessionInfo, Store, Stored
from midstream.store.reading import Reader


class ClosedStore:
    """The methods of a `Store` that only read, on a database that is opened for reading only.

    Args:
        reader: The database.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    async def read(self, session: str, *, after: int, limit: int) -> list[Stored]:
        """See `Store.read`."""
        return self._reader.records(session, after, limit)

    async def blob(self, session: str, digest: str) -> bytes | None:
        """See `Store.blob`."""
        return self._reader.blob(session, digest)

    async def find(self, session: str) -> SessionInfo | None:
        """See `Store.find`."""
        return self._reader.find_sealed(session)

    async def list(
        self, *, live: bool | None = None, of: Collection[str] | None = None
    ) -> AsyncIterator[SessionInfo]:
        """See `Store.list`."""
        for info in self._reader.lines(self._reader.numbers(live, of)):
            yield info


def decrypted(reader: Reader, key_file: Path) -> Store:
    """Return a store of which only `read`, `blob`, `find` and `list` may be called: they decrypt what `reader` finds.

    Args:
        reader: The database.
        key_file: The operator's keys, as `midstream serve --key-file` takes them.

    Raises:
        UsageError: The extra is not installed, or the key file cannot be read.
    """
    try:
        from midstream.store.ciphers import FileKeys  # noqa: PLC0415 - an extra that few need
        from midstream.store.encrypted import encrypted  # noqa: PLC0415 - see above
    except ModuleNotFoundError as error:
        raise UsageError("encryption needs more: pip install 'midstream[crypto]'") from error
    return encrypted(cast("Store", ClosedStore(reader)), FileKeys(key_file))
