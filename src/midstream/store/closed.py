"""Decrypt what a `Reader` finds in a store that no process here has open."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from pathlib import Path
from typing import Protocol, cast

from midstream.core.parts import root_of
from midstream.errors import UsageError
from midstream.store.contract import ESCROW, Kept, SessionInfo, Shelf, Store, Stored
from midstream.store.reading import Reader

ENTRY_MARK = b"\x02"
"""First byte of an encrypted value of a shelf: see `store.ciphers`."""
ENCRYPTED_MARKS = (b"\x01", ENTRY_MARK)
"""First bytes of encrypted records."""


def is_under_client_key(reader: Reader, session: str) -> bool:
    """Return whether a session is encrypted under its client's secret too."""
    return any(kept.key == root_of(session) for kept in reader.shelf(ESCROW))


class ClosedStore:
    """The methods of a `Store` and of a `Shelf` that only read, on a database that is opened for reading only.

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

    async def kept(self, shelf: str, key: str) -> Kept | None:
        """See `Shelf.kept`."""
        return next((each for each in self._reader.shelf(shelf) if each.key == key), None)

    async def shelf(self, shelf: str) -> Sequence[Kept]:
        """See `Shelf.shelf`."""
        return self._reader.shelf(shelf)

    async def keep(self, *_: object, **__: object) -> int:
        """Refuse.

        Raises:
            UsageError: Always.
        """
        raise UsageError("this database was opened for reading only")

    async def drop(self, *_: object, **__: object) -> bool:
        """Refuse.

        Raises:
            UsageError: Always.
        """
        raise UsageError("this database was opened for reading only")


class ReadOnly(Store, Shelf, Protocol):
    """A store and a shelf."""


def decrypted(reader: Reader, key_file: Path) -> ReadOnly:
    """Return a store of which only `read`, `blob`, `find`, `list` and, as a `Shelf`, `kept` and `shelf` may be called.

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
    return cast("ReadOnly", encrypted(cast("Store", ClosedStore(reader)), FileKeys(key_file)))
