"""Appends of one process in groups: one statement and one commit for all waiting appends.

A group has at most one append of each session, and only appends with the same sync. `Sync.FULL` is a synced commit of
the server, `Sync.NORMAL` an asynchronous one. The server syncs its log in order, so a synced commit includes all
earlier ones.

If the connection is lost during a commit, its outcome is unknown. The last record of the journal shows it, before any
other operation on that session. So nothing is appended twice, and no append is refused that has happened.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from midstream.environment import World
from midstream.errors import (
    JournalMovedError,
    LeaseLostError,
    MidstreamError,
    StoreBusyError,
)
from midstream.extras import extra
from midstream.retries import APPEND_BACKOFF
from midstream.session.records import Sync
from midstream.store.contract import Batch
from midstream.store.postgres.postgres_connections import Postgres, ServerLink
from midstream.store.postgres.postgres_errors import AGAIN, FAILURES, is_lost, refusal_of

with extra("postgres"):
    import asyncpg

GROUP_MAX = 1000
"""Appends in one group: a limit on the wait of the first one for the last one."""
GROUP_BYTES_MAX = 8 * 2**20
"""Bytes of records and blobs in one group; a larger append is a group of its own."""
AGAIN_MAX = 10
"""Times that a group is sent again after the server undid it because of another statement."""
CLOSE_S = 10.0
"""Seconds that closing a store waits for an unreachable server."""

# Append a group: move the ends of the sessions with matching epoch and end, and insert their records. `set_config`
# makes this commit asynchronous.
APPEND = """
with asked as (
    select * from unnest(
        $2::integer[], $3::text[], $4::bigint[], $5::bigint[], $6::bigint[],
        $7::boolean[], $8::double precision[], $9::text[], $10::integer[], $11::text[], $12::bytea[]
    ) as asked (number, name, epoch, expected, reached, is_live, changed_at, title, turns, status, seal)
), moved as (
    update session set
        last = asked.reached,
        is_live = coalesce(asked.is_live, session.is_live),
        changed_at = coalesce(asked.changed_at, session.changed_at),
        title = coalesce(asked.title, session.title),
        turns = coalesce(asked.turns, session.turns),
        status = coalesce(asked.status, session.status),
        seal = coalesce(asked.seal, session.seal)
    from asked
    where session.name = asked.name and session.epoch = asked.epoch and session.last = asked.expected
    returning session.id, asked.number
), added as (
    insert into record (session_id, position, epoch, body, link)
    select moved.id, new.position, new.epoch, new.body, new.link
    from unnest($13::integer[], $14::bigint[], $15::bigint[], $16::bytea[], $17::bytea[])
        as new (number, position, epoch, body, link)
    join moved on moved.number = new.number
), kept as (
    insert into blob (session_id, digest, body)
    select moved.id, large.digest, large.body
    from unnest($18::integer[], $19::text[], $20::bytea[]) as large (number, digest, body)
    join moved on moved.number = large.number
    on conflict do nothing
)
select number, case when $1::boolean then set_config('synchronous_commit', 'off', true) end from moved
"""
# The reason why an append was refused.
FIND_REASONS = "select name, epoch, last from session where name = any($1::text[])"
# Wait for the statement of a lost connection.
LOCK_SESSIONS = "select from session where name = any($1::text[]) order by id for update"
# The appends of a lost connection that have happened: their last records exist, as they were sent.
FIND_OUTCOMES = """
select asked.number from unnest($1::integer[], $2::text[], $3::bigint[], $4::bigint[], $5::bytea[])
    as asked (number, name, epoch, reached, body)
join session on session.name = asked.name
join record on record.session_id = session.id and record.position = asked.reached
where record.epoch = asked.epoch and record.body = asked.body
"""

_log = logging.getLogger(__name__)


class QueuedAppend(Struct, eq=False):
    """An append that waits for its group."""

    session: str
    batch: Batch
    answer: asyncio.Future[int]

    @property
    def size(self) -> int:
        """Bytes of its records and blobs."""
        return sum(map(len, self.batch.bodies)) + sum(len(blob.body) for blob in self.batch.blobs)


class GroupedAppends:
    """Commits the appends of one process, one group at a time.

    Args:
        on_moved: Called with the new ends after each group.
    """

    def __init__(
        self, postgres: Postgres, world: World, on_moved: Callable[[Mapping[str, int]], None]
    ) -> None:
        self._postgres = postgres
        self._link = ServerLink(postgres, "writer", enable_seqscan="off")
        self._world = world
        self._on_moved = on_moved
        self._waiting: list[QueuedAppend] = []
        self._working: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """Number of appends that wait for a group."""
        return len(self._waiting)

    def submit(self, session: str, batch: Batch) -> asyncio.Future[int]:
        """Append in the next matching group; the future has the new end. Cancelling it does not cancel the append."""
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append(QueuedAppend(session, batch, answer))
        if self._working is None:
            self._working = self._world.spawn(self._work(), name="appends")
        return answer

    async def connect(self) -> None:
        """Open the connection, and prepare the statement (30 ms), before the first append of a takeover.

        Raises:
            MidstreamError: The server cannot be reached.
        """
        connection = await self._link.connection()
        async with self._postgres.errors():
            await connection.fetch(APPEND, *arguments_of([]))

    async def close(self) -> None:
        """Finish the requested appends, if the server can be reached, and close the connection."""
        if self._working is not None:
            await asyncio.wait({self._working}, timeout=CLOSE_S)
        if self._working is not None:
            self._working.cancel()
            await asyncio.wait({self._working})
        await self._link.close()

    async def _work(self) -> None:
        group: list[QueuedAppend] = []
        try:
            while self._waiting:
                group = self._take_group()
                await self._commit(group)
        except BaseException as error:
            lost = LeaseLostError("the store was closed before the outcome of an append was known")
            for queued in (*group, *self._waiting):
                _refuse(queued, lost if isinstance(error, asyncio.CancelledError) else error)
            self._waiting.clear()
            raise
        finally:
            self._working = None

    def _take_group(self) -> list[QueuedAppend]:
        """Return the appends of the next commit; the oldest one decides its sync."""
        group: list[QueuedAppend] = []
        left: list[QueuedAppend] = []
        sync = self._waiting[0].batch.sync
        sessions: set[str] = set()
        size = 0
        for queued in self._waiting:
            is_fitting = (
                queued.batch.sync is sync and queued.session not in sessions and len(group) < GROUP_MAX
            )
            if is_fitting and (not group or size + queued.size <= GROUP_BYTES_MAX):
                group.append(queued)
                size += queued.size
            else:
                left.append(queued)
            sessions.add(queued.session)  # later appends of the same session wait for the next group
        self._waiting = left
        return group

    async def _commit(self, group: Sequence[QueuedAppend]) -> None:
        try:
            connection = await self._link.connection()
        except MidstreamError as refusal:  # nothing was sent
            for queued in group:
                _refuse(queued, refusal)
            return
        for tries in range(AGAIN_MAX):
            try:
                rows = await connection.fetch(APPEND, *arguments_of(group))
            except AGAIN:
                await self._world.sleep(APPEND_BACKOFF.wait_s(tries, chance=self._world.chance()))
            except FAILURES as error:
                if is_lost(error, connection):
                    await self._find_outcomes(group, error)
                else:
                    await self._refuse(group, error)
                return
            else:
                await self._settle(connection, group, {row[0] for row in rows})
                return
        await self._refuse(group, StoreBusyError(f"{self._postgres.where} is busy", retry_after_s=1.0))

    async def _settle(
        self, connection: asyncpg.Connection, group: Sequence[QueuedAppend], fitting: set[int]
    ) -> None:
        """Answer a committed group."""
        self._finish(queued for number, queued in enumerate(group) if number in fitting)
        others = [queued for number, queued in enumerate(group) if number not in fitting]
        if not others:
            return
        try:
            rows = await connection.fetch(FIND_REASONS, [queued.session for queued in others])
        except FAILURES:
            rows = []
        found = {name: (epoch, last) for name, epoch, last in rows}
        for queued in others:
            _refuse(queued, _reason(queued, found.get(queued.session)))

    def _finish(self, done: Any) -> None:  # noqa: ANN401 - any iterable of queued appends
        ends: dict[str, int] = {}
        for queued in done:
            ends[queued.session] = queued.batch.end
            if not queued.answer.done():
                queued.answer.set_result(queued.batch.end)
        if ends:
            self._on_moved(ends)

    async def _refuse(self, group: Sequence[QueuedAppend], error: BaseException) -> None:
        """Refuse one append; if there are several, find the faulty one."""
        if len(group) > 1 and isinstance(error, asyncpg.PostgresError | asyncpg.InterfaceError):
            for queued in group:
                await self._commit([queued])
            return
        if isinstance(error, asyncpg.ReadOnlySQLTransactionError):  # the server has become a replica
            self._link.drop()
        for queued in group:
            _refuse(queued, refusal_of(error, self._postgres.where))

    async def _find_outcomes(self, group: Sequence[QueuedAppend], error: BaseException) -> None:
        """Find the appends that have happened; retry while the server cannot be reached. The others are sent again."""
        _log.warning("the outcome of %d appends is unknown: %s", len(group), type(error).__name__)
        self._link.drop()
        for failures in itertools.count(1):
            try:
                connection = await self._link.connection()
                async with connection.transaction():
                    await connection.execute(LOCK_SESSIONS, [queued.session for queued in group])
                    rows = await connection.fetch(FIND_OUTCOMES, *outcomes_of(group))
                break
            except (MidstreamError, *FAILURES) as again:
                _log.debug("still unknown: %s", again)
                self._link.drop()
                await self._world.sleep(APPEND_BACKOFF.wait_s(failures, chance=self._world.chance()))
        happened = {row[0] for row in rows}
        self._finish(queued for number, queued in enumerate(group) if number in happened)
        left = [queued for number, queued in enumerate(group) if number not in happened]
        self._waiting = [*left, *self._waiting]


def arguments_of(group: Sequence[QueuedAppend]) -> list[Any]:
    """Return the arguments of `APPEND`."""
    marks = [queued.batch.mark for queued in group]
    records = [
        (number, queued.batch.expected + place, queued.batch.epoch, body, link)
        for number, queued in enumerate(group)
        for place, (body, link) in enumerate(
            zip(queued.batch.bodies, links_of(queued.batch), strict=True), start=1
        )
    ]
    blobs = [
        (number, blob.digest, blob.body) for number, queued in enumerate(group) for blob in queued.batch.blobs
    ]
    return [
        any(queued.batch.sync is Sync.NORMAL for queued in group),
        [*range(len(group))],
        [queued.session for queued in group],
        [queued.batch.epoch for queued in group],
        [queued.batch.expected for queued in group],
        [queued.batch.end for queued in group],
        [mark and mark.is_live for mark in marks],
        [mark and mark.at for mark in marks],
        [_text(mark.title) if mark is not None and mark.title else None for mark in marks],
        [mark and mark.turns for mark in marks],
        [mark and _text(mark.status) for mark in marks],
        [queued.batch.seal or None for queued in group],
        *([row[column] for row in records] for column in range(5)),
        *([row[column] for row in blobs] for column in range(3)),
    ]


def links_of(batch: Batch) -> Iterable[bytes]:
    """Return the links of a batch, one for each record."""
    return batch.links or itertools.repeat(b"", len(batch.bodies))


def outcomes_of(group: Sequence[QueuedAppend]) -> list[list[Any]]:
    """Return the arguments of `FIND_OUTCOMES`. An append without records is not found, and is harmless twice."""
    numbered_appends = [(number, queued) for number, queued in enumerate(group) if queued.batch.bodies]
    return [
        [number for number, _ in numbered_appends],
        [queued.session for _, queued in numbered_appends],
        [queued.batch.epoch for _, queued in numbered_appends],
        [queued.batch.end for _, queued in numbered_appends],
        [queued.batch.bodies[-1] for _, queued in numbered_appends],
    ]


def _text(words: str) -> str:
    """Return text that PostgreSQL can store."""
    return words.encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")


def _reason(queued: QueuedAppend, found: tuple[int, int] | None) -> MidstreamError:
    name, batch = repr(queued.session), queued.batch
    if found is None or found[0] != batch.epoch:
        return LeaseLostError(f"session {name} has another epoch than {batch.epoch}")
    return JournalMovedError(f"session {name} ends at {found[1]}, not at {batch.expected}")


def _refuse(queued: QueuedAppend, error: BaseException) -> None:
    if not queued.answer.done():
        queued.answer.set_exception(error.again() if isinstance(error, MidstreamError) else error)
