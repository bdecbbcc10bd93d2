"""Reads of a store in PostgreSQL."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from typing import Any, TypeVar

from typing_extensions import override

from midstream.errors import UsageError
from midstream.extras import extra
from midstream.session.child_names import PART_MARK, PART_MARK_END
from midstream.store.contract import (
    KeyValueEntry,
    ListPlace,
    SessionInfo,
    SessionListing,
    StoredRecord,
    StoreReader,
)
from midstream.store.postgres.postgres_connections import Postgres

with extra("postgres"):
    import asyncpg

T = TypeVar("T")
Question = Callable[[asyncpg.Connection], Awaitable[T]]

LIST_PAGE = 200
"""Sessions that a listing reads in one step."""
BEGINNING = ListPlace(math.inf, "")
"""The place before all sessions."""

# The records of a session after a position, in order.
FIND_RECORDS = """
select position, epoch, body, link from record
where session_id = (select id from session where name = $1) and position > $2 order by position limit $3
"""
# A large result of a session.
FIND_BLOB = """
select body from blob where session_id = (select id from session where name = $1) and digest = $2
"""
# The digests of all large results of a session.
LIST_BLOBS = "select digest from blob where session_id = (select id from session where name = $1)"
# The columns of a line in a listing.
COLUMNS = """
select session.name, last, epoch, created_at, is_live, changed_at, title, turns, status, node is null,
    (select coalesce(min(position), 0) from record where session_id = session.id)
"""
# The line of one session, with its seal.
FIND_LINE = f"{COLUMNS}, seal from session where name = $1"
# All sessions after a place, or those with or without an open turn, last changed first.
LIST_IDS = """
select id from session
where (changed_at, name) < ($2::double precision, $3) and ($1::boolean is null or is_live = $1)
order by changed_at desc, name desc limit $4
"""
# The same for some sessions and their parts.
LIST_IDS_OF = """
select id from (
    select session.id, session.name, changed_at from unnest($5::text[]) as wanted (name)
    join session on session.name = wanted.name
    where (changed_at, session.name) < ($2::double precision, $3) and ($1::boolean is null or is_live = $1)
    union
    select session.id, session.name, changed_at from unnest($5::text[]) as wanted (name)
    join session on session.name > wanted.name || $6 and session.name < wanted.name || $7
    where (changed_at, session.name) < ($2::double precision, $3) and ($1::boolean is null or is_live = $1)
) as found order by changed_at desc, name desc limit $4
"""
# The lines of these sessions, in the order of the given ids.
LIST_LINES = f"""
{COLUMNS} from session join unnest($1::bigint[]) with ordinality as wanted (id, place) on session.id = wanted.id
order by wanted.place
"""
# One entry.
FIND_ENTRY = "select key, version, body, at from key_value where namespace = $1 and key = $2"
# All namespaces that have entries.
LIST_NAMESPACES = "select distinct namespace from key_value"
# The entries of a namespace, last written first.
LIST_ENTRIES = "select key, version, body, at from key_value where namespace = $1 order by at desc, key"


def require_name(name: str) -> None:
    """Refuse a name that PostgreSQL cannot store.

    Raises:
        UsageError: It is not valid Unicode, or has the character zero.
    """
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise UsageError("a name is not valid Unicode") from error
    if "\0" in name:
        raise UsageError("a name in a PostgreSQL store cannot have the character zero")


class PostgresReads(StoreReader):
    """The reading half of a store, on a connection that `_query` selects."""

    async def _query(self, name: str, question: Question[T]) -> T:
        """Run a query about a name."""
        raise NotImplementedError

    @override
    async def read(self, session: str, *, after: int, limit: int) -> list[StoredRecord]:
        rows: list[Any] = await self._query(session, lambda db: db.fetch(FIND_RECORDS, session, after, limit))
        return [StoredRecord(*row) for row in rows]

    @override
    async def blob(self, session: str, digest: str) -> bytes | None:
        found: bytes | None = await self._query(
            session + digest, lambda db: db.fetchval(FIND_BLOB, session, digest)
        )
        return found

    @override
    async def blob_digests(self, session: str) -> Sequence[str]:
        rows: Any = await self._query(session, lambda db: db.fetch(LIST_BLOBS, session))
        return [row[0] for row in rows]

    @override
    async def find(self, session: str) -> SessionInfo | None:
        row: Any = await self._query(session, lambda db: db.fetchrow(FIND_LINE, session))
        return None if row is None else _line_of(row)

    async def list(
        self,
        *,
        live: bool | None = None,
        of: Collection[str] | None = None,
        after: ListPlace | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[SessionInfo]:
        """See `StoreReader.list`. The first step fixes the order; sessions that are deleted meanwhile are omitted."""
        place = after or BEGINNING

        async def find_ids(db: asyncpg.Connection) -> Any:  # noqa: ANN401 - the driver's rows
            values = (live, place.at, place.session, limit)
            if of is None:
                return await db.fetch(LIST_IDS, *values)
            return await db.fetch(LIST_IDS_OF, *values, [*of], PART_MARK, PART_MARK_END)

        ids = [row[0] for row in await self._query("".join((place.session, *(of or ()))), find_ids)]
        for start in range(0, len(ids), LIST_PAGE):
            page = ids[start : start + LIST_PAGE]
            rows: Any = await self._query("", lambda db, page=page: db.fetch(LIST_LINES, page))  # type: ignore[misc]
            for row in rows:
                yield _line_of(row)

    @override
    async def kv_get(self, namespace: str, key: str) -> KeyValueEntry | None:
        row: Any = await self._query(namespace + key, lambda db: db.fetchrow(FIND_ENTRY, namespace, key))
        return None if row is None else KeyValueEntry(*row)

    @override
    async def kv_list(self, namespace: str) -> Sequence[KeyValueEntry]:
        rows: Any = await self._query(namespace, lambda db: db.fetch(LIST_ENTRIES, namespace))
        return [KeyValueEntry(*row) for row in rows]

    @override
    async def kv_namespaces(self) -> Sequence[str]:
        rows: Any = await self._query("", lambda db: db.fetch(LIST_NAMESPACES))
        return [row[0] for row in rows]


class PostgresReader(PostgresReads):
    """A store that is opened only for reading."""

    def __init__(self, postgres: Postgres, connection: asyncpg.Connection) -> None:
        self._postgres = postgres
        self._connection = connection

    async def _query(self, name: str, question: Question[T]) -> T:
        require_name(name)
        async with self._postgres.errors():
            return await question(self._connection)


def _line_of(row: Any) -> SessionInfo:  # noqa: ANN401 - the driver's row
    session, end, epoch, created_at, is_live, at, title, turns, status, is_free, oldest, *seal = row
    mark = SessionListing(is_live, at, title, turns, status)
    return SessionInfo(session, end, epoch, created_at, mark, is_free, oldest, *seal)
