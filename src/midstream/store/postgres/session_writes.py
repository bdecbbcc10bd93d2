"""Writes other than appends: leases, pruning, deletion, entries. Each is one transaction.

If its connection is lost, a write may have happened. It is repeated with `is_repeated`.
"""

from __future__ import annotations

from collections.abc import Collection

from midstream.errors import EntryMovedError, LeaseHeldError
from midstream.extras import extra
from midstream.session.child_names import PART_MARK, PART_MARK_END
from midstream.store.contract import OF_SESSIONS, require_as_found, require_version

with extra("postgres"):
    import asyncpg

KEY_VALUE_TRIES_MAX = 5
# Claim a session, unless another living node has it, or its freedom differs from $5. A new session starts above the
# epochs of all deleted ones. Each era skips a thousand epochs: a promoted replica, or a restored backup, may lack the
# claims that used them.
CLAIM = """
insert into session (name, epoch, era, node, created_at, changed_at)
select $1, 1 + epochs_spent + 1000 * era, era, $2, $3, $3 from ledger
where $5::boolean is null or exists (select from session where name = $1)
on conflict (name) do update set
    epoch = session.epoch + 1 + 1000 * (excluded.era - session.era),
    era = excluded.era,
    node = excluded.node
where ($5::boolean is null or (session.node is null) = $5) and (
    session.node is null or session.node = $2 or session.node = any($4::integer[])
    or not exists (select from node where number = session.node)
)
returning epoch
"""
# Whether a session exists, and its node.
FIND_HOLDER = "select true, node from session where name = $1"
# The other listed node that has a session. (A refused claim would lock the row, and sync.)
FIND_OTHER = """
select session.node from session join node on node.number = session.node
where session.name = $1 and session.node <> $2 and session.node <> all($3::integer[])
"""
# Release a session, and return whether a turn is open in it.
RELEASE = "update session set node = null where name = $1 and epoch = $2 returning is_live"
# Replace the record at a position by a fold, and remove the records before it.
PRUNE = """
with folded as (
    update record set body = $2, link = coalesce($5, link)
    where session_id = (select id from session where name = $1) and position = $3 and epoch = $4
    returning session_id
), removed as (
    delete from record using folded where record.session_id = folded.session_id and record.position < $3
)
select exists (select from folded)
"""
# A session and its parts, locked, with their holders: null if no other node that may live has it.
LOCK_WITH_PARTS = """
select id, name, epoch, case
    when node = $4 or node = any($5::integer[]) or not exists (select from node where number = session.node) then null
    else node
end as holder
from session where name = $1 or (name > $1 || $2 and name < $1 || $3)
order by id for update
"""
# Delete the journals of these sessions.
DELETE_RECORDS = "delete from record where session_id = any($1::bigint[])"
# Delete their large results.
DELETE_BLOBS = "delete from blob where session_id = any($1::bigint[])"
# Delete their lines.
DELETE_SESSIONS = "delete from session where id = any($1::bigint[])"
# Delete their forwarded commands.
DELETE_FORWARDED = "delete from inbox where session = any($1::text[])"
# Delete the entries of sessions, and store the highest of their versions.
DELETE_ENTRIES = """
with gone as (
    delete from key_value where namespace = any($1::text[]) and key = any($2::text[]) returning version
)
update ledger set versions_spent = greatest(versions_spent, (select max(version) from gone))
where exists (select from gone)
"""
# Make new sessions start above this epoch.
SPEND_EPOCHS = "update ledger set epochs_spent = greatest(epochs_spent, $1)"

# Write a new entry. An entry of a deleted key starts above all its versions.
ADD_ENTRY = """
insert into key_value (namespace, key, version, body, at)
select $1, $2, 1 + versions_spent, $3, $4 from ledger
on conflict (namespace, key) do nothing returning version
"""
# Replace an entry at the version that was read.
REPLACE_ENTRY = """
update key_value set version = version + 1, body = $3, at = $4
where namespace = $1 and key = $2 and version = $5 returning version
"""
# The current entry.
FIND_WRITTEN = "select version, body, at from key_value where namespace = $1 and key = $2"
# Delete an entry at the version that was read, and make its key start above that.
DROP_ENTRY = """
with gone as (
    delete from key_value where namespace = $1 and key = $2 and version = $3 returning version
)
update ledger set versions_spent = greatest(versions_spent, version) from gone returning version
"""


class HeldError(Exception):
    """Another listed node has a session; its liveness must be checked."""

    def __init__(self, session: str, node: int) -> None:
        super().__init__(session)
        self.session = session
        self.node = node

    def refusal(self) -> LeaseHeldError:
        """Return the error for callers if that node lives."""
        message = f"session {self.session!r} belongs to node {self.node}, which is alive"
        return LeaseHeldError(message, session=self.session)


async def is_held_by_other(
    connection: asyncpg.Connection, session: str, *, node: int, frozen: Collection[int]
) -> bool:
    """Whether another listed node, which is not frozen, has a session."""
    return await connection.fetchval(FIND_OTHER, session, node, frozen) is not None


async def claim(
    connection: asyncpg.Connection,
    session: str,
    *,
    node: int,
    frozen: Collection[int],
    at: float,
    is_free: bool | None,
    is_repeated: bool,
) -> int:
    """See `Store.claim`.

    Raises:
        HeldError: Another node has it. Nothing was changed.
    """
    if (
        is_free is False
        and (other := await connection.fetchval(FIND_OTHER, session, node, frozen)) is not None
    ):
        raise HeldError(session, other)
    while True:
        epoch: int | None = await connection.fetchval(CLAIM, session, node, at, frozen, is_free)
        if epoch is not None:
            return epoch
        is_there, holder = await connection.fetchrow(FIND_HOLDER, session) or (False, None)
        if is_repeated and holder == node:
            is_free = None  # the answer to the first try was lost
        require_as_found(session, is_free=is_free, now=holder is None if is_there else None)
        if holder is not None and holder != node:
            raise HeldError(session, holder)


async def release(connection: asyncpg.Connection, session: str, *, epoch: int) -> bool:
    """See `Store.release`; return whether a turn is open in it."""
    is_live: bool | None = await connection.fetchval(RELEASE, session, epoch)
    return bool(is_live)


async def prune(
    connection: asyncpg.Connection,
    session: str,
    body: bytes,
    link: bytes | None,
    *,
    position: int,
    epoch: int,
) -> bool:
    """See `Store.prune`."""
    is_done: bool = await connection.fetchval(PRUNE, session, body, position, epoch, link)
    return is_done


async def delete(
    connection: asyncpg.Connection, session: str, *, node: int, frozen: Collection[int]
) -> list[str]:
    """Delete a session with its parts, and return their names; see `Store.delete`.

    Raises:
        HeldError: Another node has one of them. Nothing was changed.
    """
    async with connection.transaction():
        going = await connection.fetch(LOCK_WITH_PARTS, session, PART_MARK, PART_MARK_END, node, frozen)
        for row in going:
            if row["holder"] is not None:
                raise HeldError(row["name"], row["holder"])
        if going:
            ids, names = [row["id"] for row in going], [row["name"] for row in going]
            for statement in (DELETE_RECORDS, DELETE_BLOBS, DELETE_SESSIONS):
                await connection.execute(statement, ids)
            await connection.execute(DELETE_FORWARDED, names)
            await connection.execute(DELETE_ENTRIES, OF_SESSIONS, names)
            await connection.execute(SPEND_EPOCHS, max(row["epoch"] for row in going))
    return [row["name"] for row in going]


async def kv_put(
    connection: asyncpg.Connection,
    namespace: str,
    key: str,
    body: bytes,
    *,
    expected: int,
    at: float,
    is_repeated: bool,
) -> int:
    """See `KeyValue.kv_put`."""
    for _ in range(KEY_VALUE_TRIES_MAX):
        version: int | None = await (
            connection.fetchval(REPLACE_ENTRY, namespace, key, body, at, expected)
            if expected
            else connection.fetchval(ADD_ENTRY, namespace, key, body, at)
        )
        if version is not None:
            return version
        found = await connection.fetchrow(FIND_WRITTEN, namespace, key)
        if is_repeated and found is not None and tuple(found)[1:] == (body, at):
            return int(found["version"])
        require_version(key, 0 if found is None else found["version"], expected)
    raise EntryMovedError(f"entry {key!r} is continuously written and deleted by others")


async def kv_delete(
    connection: asyncpg.Connection, namespace: str, key: str, *, expected: int, is_repeated: bool
) -> bool:
    """See `KeyValue.kv_delete`."""
    if await connection.fetchval(DROP_ENTRY, namespace, key, expected) is not None:
        return True
    return is_repeated and await connection.fetchrow(FIND_WRITTEN, namespace, key) is None
