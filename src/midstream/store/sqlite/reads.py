"""Reads of a database, on a read-only connection."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import apsw
from typing_extensions import override

from midstream.environment import World
from midstream.errors import NotFoundError
from midstream.session.child_names import PART_MARK, PART_MARK_END
from midstream.store.contract import (
    KeyValueEntry,
    ListPlace,
    SessionInfo,
    SessionListing,
    StoredRecord,
    StoreReader,
)
from midstream.store.sqlite import key_values
from midstream.store.sqlite.database import DatabaseFile

T = TypeVar("T")

FIND_RECORDS = """
select position, epoch, body, link from record
where session_id = (select id from session where name = ?) and position > ? order by position limit ?
"""
# For a file of an older version, opened only for reading.
FIND_UNLINKED = FIND_RECORDS.replace(", link", "")
FIND_BLOB = "select body from blob where session_id = (select id from session where name = ?) and digest = ?"
LIST_BLOBS = "select digest from blob where session_id = (select id from session where name = ?)"
COLUMNS = """
select session.id, session.name, (select ifnull(max(position), 0) from record where session_id = session.id),
    session.epoch, session.created_at, is_live, changed_at, title, turns, status, node is null,
    (select ifnull(min(position), 0) from record where session_id = session.id)
"""
LINE = f"{COLUMNS} from session"
FIND_LINE = f"{LINE} where name = ?"
FIND_SEALED = f"{COLUMNS}, seal from session where name = ?"
HAS_SEALS = "select 1 from pragma_table_info('session') where name = 'seal'"
HAS_LINKS = "select 1 from pragma_table_info('record') where name = 'link'"
FIND_HOLDER = "select node from session where name = ?"
# Numbers of sessions after a place. A limit of -1 is none. Without a place, the list begins at the newest.
LIST_NUMBERS = """
select id from session
where (changed_at, name) < (?2, ?3) and (?1 is null or is_live = ?1)
order by changed_at desc, name desc limit ?4
"""
# `cross join` and the plus keep SQLite from reading other sessions by their time.
LIST_NUMBERS_OF = """
select session.id, changed_at, name from json_each(?5) as wanted cross join session on name = wanted.value
where (+changed_at, name) < (?2, ?3) and (?1 is null or is_live = ?1)
union
select session.id, changed_at, name from json_each(?5) as wanted
cross join session on name > wanted.value || ?6 and name < wanted.value || ?7
where (+changed_at, name) < (?2, ?3) and (?1 is null or is_live = ?1)
order by changed_at desc, name desc limit ?4
"""
LIST_LINES = f"{LINE}, json_each(?) as wanted where session.id = wanted.value order by wanted.key"


LIST_PAGE = 200
"""Sessions that a listing reads in one step."""
BEGINNING = ListPlace(math.inf, "")
"""The place before all sessions."""


class ReadConnection:
    """A read-only connection, for use in one thread (the store's reader thread)."""

    def __init__(self, file: DatabaseFile, db: apsw.Connection) -> None:
        self._file = file
        self._db = db
        self._has_seals = bool(self.rows(HAS_SEALS, ()))
        self._has_links = bool(self.rows(HAS_LINKS, ()))

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def records(self, session: str, after: int, limit: int) -> list[StoredRecord]:
        """See `Store.read`."""
        query = FIND_RECORDS if self._has_links else FIND_UNLINKED
        return [StoredRecord(*row) for row in self.rows(query, (session, after, limit))]

    def blob(self, session: str, digest: str) -> bytes | None:
        """See `Store.blob`."""
        rows = self.rows(FIND_BLOB, (session, digest))
        return rows[0][0] if rows else None

    def blob_digests(self, session: str) -> list[str]:
        """See `Store.blob_digests`."""
        return [digest for (digest,) in self.rows(LIST_BLOBS, (session,))]

    def find(self, session: str) -> SessionInfo | None:
        """See `Store.find`; a file of an older version has no seal."""
        rows = self.rows(FIND_SEALED if self._has_seals else FIND_LINE, (session,))
        return _line(rows[0]) if rows else None

    def holder(self, session: str) -> str | None:
        """Return the node that claimed a session last and did not release it, or None."""
        rows = self.rows(FIND_HOLDER, (session,))
        return rows[0][0] if rows else None

    def numbers(
        self,
        live: bool | None,  # noqa: FBT001 - three values, one column
        of: Collection[str] | None = None,
        after: ListPlace | None = None,
        limit: int | None = None,
    ) -> list[int]:
        """Return the rows of a listing, last changed first."""
        place = after or BEGINNING
        values = (live, place.at, place.session, -1 if limit is None else limit)
        if of is None:
            return [number for (number,) in self.rows(LIST_NUMBERS, values)]
        rows = self.rows(LIST_NUMBERS_OF, (*values, json.dumps([*of]), PART_MARK, PART_MARK_END))
        return [number for number, _, _ in rows]

    def lines(self, numbers: Sequence[int]) -> list[SessionInfo]:
        """Return the lines of these rows, in their order, without sessions that were deleted meanwhile."""
        wanted = ",".join(map(str, numbers))
        return [_line(row) for row in self.rows(LIST_LINES, (f"[{wanted}]",))]

    def kv_get(self, namespace: str, key: str) -> KeyValueEntry | None:
        """See `KeyValue.kv_get`. A file of an older version has none."""
        return key_values.get(self.rows, namespace, key)

    def kv_list(self, namespace: str) -> list[KeyValueEntry]:
        """See `KeyValue.kv_list`. A file of an older version has none."""
        return key_values.entries(self.rows, namespace)

    def kv_namespaces(self) -> list[str]:
        """See `KeyValue.kv_namespaces`. A file of an older version has none."""
        return key_values.namespaces(self.rows)

    def rows(self, query: str, values: tuple[Any, ...]) -> list[Any]:  # as SQLite has them
        """Run a query and return its rows."""
        with self._file.convert_errors(self._db):
            return self._file.retry_while_busy(lambda: self._db.execute(query, values).fetchall())


class SQLiteReads(StoreReader):
    """The reading half of a SQLite store, on a connection that `_query` selects."""

    async def _query(self, name: str, question: Callable[[ReadConnection], T]) -> T:
        """Run a query about a name."""
        raise NotImplementedError

    @override
    async def read(self, session: str, *, after: int, limit: int) -> list[StoredRecord]:
        return await self._query(session, lambda reader: reader.records(session, after, limit))

    @override
    async def blob(self, session: str, digest: str) -> bytes | None:
        return await self._query(session, lambda reader: reader.blob(session, digest))

    @override
    async def blob_digests(self, session: str) -> Sequence[str]:
        return await self._query(session, lambda reader: reader.blob_digests(session))

    @override
    async def find(self, session: str) -> SessionInfo | None:
        return await self._query(session, lambda reader: reader.find(session))

    async def list(
        self,
        *,
        live: bool | None = None,
        of: Collection[str] | None = None,
        after: ListPlace | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[SessionInfo]:
        """See `StoreReader.list`. The first step fixes the order; sessions that are deleted meanwhile are omitted."""
        numbers = await self._query("", lambda reader: reader.numbers(live, of, after, limit))
        for start in range(0, len(numbers), LIST_PAGE):
            page = numbers[start : start + LIST_PAGE]
            for line in await self._query("", partial(ReadConnection.lines, numbers=page)):
                yield line

    @override
    async def kv_get(self, namespace: str, key: str) -> KeyValueEntry | None:
        return await self._query(namespace + key, lambda reader: reader.kv_get(namespace, key))

    @override
    async def kv_list(self, namespace: str) -> Sequence[KeyValueEntry]:
        return await self._query(namespace, lambda reader: reader.kv_list(namespace))

    @override
    async def kv_namespaces(self) -> Sequence[str]:
        return await self._query("", ReadConnection.kv_namespaces)


class SQLiteReader(SQLiteReads):
    """A database that is opened only for reading."""

    def __init__(self, reader: ReadConnection) -> None:
        self._reader = reader

    async def _query(self, name: str, question: Callable[[ReadConnection], T]) -> T:  # noqa: ARG002 - see SQLiteReads
        return question(self._reader)


@contextlib.contextmanager
def reading(path: str | Path, *, world: World = World()) -> Iterator[ReadConnection]:
    """Open a database for reading, also while a server uses it. Nothing is created, locked or written.

    Raises:
        NotFoundError: There is no such file, or nothing was ever stored in it.
        UsageError: The file belongs to another program, or may not be read.
        StoreBusyError: A process has opened and changed the database meanwhile.
        StoreDamagedError: The database is damaged.
    """
    file = DatabaseFile(Path(path), world, None)
    if not file.path.is_file():
        raise NotFoundError(f"no database {str(file.path)!r}; name another store, or start a server")
    with file.convert_errors(), file.open_reader() as db:
        with file.convert_errors(db):
            if not file.retry_while_busy(partial(file.is_prepared, db)):
                raise NotFoundError(f"nothing was stored in {str(file.path)!r} yet")
        yield ReadConnection(file, db)


def _line(row: tuple[Any, ...]) -> SessionInfo:  # as SQLite has them
    _, session, end, epoch, created_at, is_live, at, title, turns, status, is_free, oldest, *seal = row
    mark = SessionListing(bool(is_live), at, title, turns, status)
    return SessionInfo(session, end, epoch, created_at, mark, bool(is_free), oldest, *seal)
