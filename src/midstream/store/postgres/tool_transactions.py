"""Tools in the transaction of their own outcome: a savepoint for each, a time limit, and no access to midstream's
tables.

This is no protection from malicious tools, which run in the same process. It prevents accidents: a statement that would
change a journal, or commit half of an append.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from msgspec.structs import replace

from midstream.environment import World
from midstream.errors import (
    JournalMovedError,
    LeaseLostError,
    MidstreamError,
    StoreBusyError,
    TransactionError,
    UsageError,
)
from midstream.extras import extra
from midstream.session.records import Sync
from midstream.store.contract import Attempt, Batch
from midstream.store.postgres.grouped_appends import (
    APPEND,
    FIND_OUTCOMES,
    LOCK_SESSIONS,
    QueuedAppend,
    arguments_of,
    outcomes_of,
)
from midstream.store.postgres.postgres_connections import Postgres
from midstream.store.postgres.postgres_errors import FAILURES, first_line, is_lost, refusal_of

with extra("postgres"):
    import asyncpg

T = TypeVar("T")

SLOW_S = 1.0
"""Seconds after which an effect is logged as slow: its transaction delays PostgreSQL's cleanup."""
OUTCOME_TRIES_MAX = 20
"""Attempts, 0.5 s apart, to find the outcome of a commit whose connection was lost."""
OUTCOME_PAUSE_S = 0.5

# Lock the line of a session, and return its epoch and end.
LOCK_LINE = "select epoch, last from session where name = $1 for update"
# The store's tables and indexes.
FIND_TABLES = "select oid from pg_class where relnamespace = to_regnamespace($1)"
# This transaction's locks on them, including on dropped tables.
FIND_LOCKS = """
select relation, mode from pg_locks
where locktype = 'relation' and pid = pg_backend_pid() and relation = any($1::oid[])
"""
# Give a tool the search path of its role, without the store's schema.
OPEN_PATH = "set local search_path to default"

_FORBIDDEN = re.compile(
    r"(?:\s|--[^\n]*\n|/\*.*?\*/)*(abort|begin|commit|discard|end|listen|notify|prepare|release|reset|rollback|savepoint|"
    r"set|start|unlisten)\b",
    re.IGNORECASE | re.DOTALL,
)
"""Statements that would end or leave the transaction, or change the connection."""

_log = logging.getLogger(__name__)


class ToolTransactions:
    """Runs tools in transactions of appends, each on a connection of its own."""

    def __init__(self, postgres: Postgres, world: World) -> None:
        self._postgres = postgres
        self._world = world

    async def append_within(
        self, session: str, work: Callable[[Attempt], Batch], *, expected: int, epoch: int
    ) -> Batch:
        """See `Transactional.append_within`."""
        connection = await self._postgres.connect_to_write("tool")
        batch: Batch | None = None
        try:
            # Without a rollback, which would fail during a statement of a cancelled tool: the connection ends below.
            transaction = connection.transaction()
            await transaction.start()
            await self._require_end(connection, session, expected, epoch)
            batch = await self._run(connection, work)
            queued = _queued(session, batch)
            await connection.fetch(APPEND, *arguments_of([queued]))
            await transaction.commit()
        except FAILURES as error:
            if batch is not None and is_lost(error, connection) and await self._has_happened(session, batch):
                return batch
            raise refusal_of(error, self._postgres.where) from error
        finally:
            connection.terminate()
        return batch

    async def _require_end(
        self, connection: asyncpg.Connection, session: str, expected: int, epoch: int
    ) -> None:
        found = await connection.fetchrow(LOCK_LINE, session)
        if found is None or found[0] != epoch:
            raise LeaseLostError(f"session {session!r} has another epoch than {epoch}")
        if found[1] != expected:
            raise JournalMovedError(f"session {session!r} ends at {found[1]}, not at {expected}")

    async def _run(self, connection: asyncpg.Connection, work: Callable[[Attempt], Batch]) -> Batch:
        """Call `work` in a thread, which sends its statements to this event loop."""
        effects = ToolEffects(connection, self._postgres, self._world)
        loop = asyncio.get_running_loop()
        thread = ThreadPoolExecutor(1, thread_name_prefix="midstream-tool")
        try:
            # Run to the end even if the caller is cancelled, because the tool's thread cannot be cancelled.
            running = loop.run_in_executor(thread, partial(work, effects.attempt))
            await asyncio.wait({running})
            return running.result()
        finally:
            effects.close()
            thread.shutdown(wait=False)

    async def _has_happened(self, session: str, batch: Batch) -> bool:
        """Whether a commit whose connection was lost has happened."""
        queued = _queued(session, batch)
        for _ in range(OUTCOME_TRIES_MAX):
            try:
                connection = await self._postgres.connect_to_write("tool")
                try:
                    async with connection.transaction():
                        await connection.execute(LOCK_SESSIONS, [session])
                        return bool(await connection.fetch(FIND_OUTCOMES, *outcomes_of([queued])))
                finally:
                    connection.terminate()
            except (MidstreamError, *FAILURES):
                await self._world.sleep(OUTCOME_PAUSE_S)
        raise LeaseLostError(f"whether the outcome of a tool of session {session!r} was stored is unknown")


class ToolEffects:
    """The effects of tools in one transaction, called in a thread beside the connection's event loop."""

    def __init__(self, connection: asyncpg.Connection, postgres: Postgres, world: World) -> None:
        self._connection = connection
        self._postgres = postgres
        self._clock = world.monotonic
        self._loop = asyncio.get_running_loop()
        self._tables: list[int] = []
        self._is_closed = False

    def close(self) -> None:
        """Refuse all later calls."""
        self._is_closed = True

    def attempt(self, effect: Callable[[PostgresTransaction], T], *, within_s: float) -> T:
        """See `contract.Attempt`.

        Raises:
            UsageError: A tool's statement used tables of midstream, or ended the transaction. Its changes were undone.
        """
        began_at = self._clock()
        savepoint = self._connection.transaction()
        self._wait(savepoint.start())
        locks = self._wait(self._find_locks())
        self._wait(self._connection.execute(OPEN_PATH))
        opened = PostgresTransaction(self._execute, lambda: began_at + within_s - self._clock())
        try:
            value = effect(opened)
            self._require_apart(locks)
        except BaseException:
            self._wait(savepoint.rollback())
            raise
        finally:
            opened.is_over = True
            if (took_s := self._clock() - began_at) > SLOW_S:
                _log.warning("a tool in a transaction took %.3f s; such a tool must be short", took_s)
        self._wait(self._connection.execute(self._postgres.set_path))
        self._wait(savepoint.commit())
        return value

    def _require_apart(self, locks: set[tuple[int, str]]) -> None:
        """Refuse an effect that used the store's tables: it has new locks on them."""
        if self._wait(self._find_locks()) - locks:
            raise UsageError("a tool used a table of midstream; what it wrote was undone")

    def _execute(self, statement: str, bindings: Sequence[Any], within_s: float) -> list[tuple[Any, ...]]:
        """Run a statement in a savepoint, so that a failed one changes nothing."""

        async def run() -> list[tuple[Any, ...]]:
            async with self._connection.transaction():
                rows = await self._connection.fetch(statement, *bindings, timeout=within_s)
                return [tuple(row) for row in rows]

        return self._wait(run())

    async def _find_locks(self) -> set[tuple[int, str]]:
        if not self._tables:
            tables = await self._connection.fetch(FIND_TABLES, self._postgres.address.schema)
            self._tables = [row[0] for row in tables]
        rows = await self._connection.fetch(FIND_LOCKS, self._tables)
        return {tuple(row) for row in rows}

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        if self._is_closed:
            work.close()
            raise UsageError("this transaction ended when its tool returned")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


class PostgresTransaction:
    """See `contract.Transaction`. Bindings are numbered: `$1`, `$2`."""

    def __init__(
        self,
        execute: Callable[[str, Sequence[Any], float], list[tuple[Any, ...]]],
        left_s: Callable[[], float],
    ) -> None:
        self.is_over = False
        """Whether the tool has returned."""
        self._execute = execute
        self._left_s = left_s

    def execute(
        self, statement: str, bindings: Sequence[Any] | Mapping[str, Any] = ()
    ) -> list[tuple[Any, ...]]:
        """See `contract.Transaction.execute`.

        Raises:
            TransactionError: The statement failed or took too long. It changed nothing.
            UsageError: The statement would end the transaction, bindings have names, or the tool has returned.
        """
        if self.is_over:
            raise UsageError("this transaction ended when its tool returned")
        if isinstance(bindings, Mapping):
            raise UsageError("PostgreSQL has numbered bindings: write $1, $2 and pass a list")
        if found := _FORBIDDEN.match(statement):
            raise TransactionError(
                f"{found[1].upper()} is not for a tool in a transaction. It changed nothing."
            )
        if (left_s := self._left_s()) <= 0:
            raise TransactionError("the time limit of this call was reached; the statement was not run")
        try:
            return self._execute(statement, bindings, left_s)
        except TimeoutError as error:
            raise TransactionError(
                "the time limit of this call was reached. The statement changed nothing."
            ) from error
        except OSError as error:
            raise StoreBusyError(str(error), retry_after_s=1.0) from error
        except (asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            raise TransactionError(f"{first_line(error)}. It changed nothing.") from error


def _queued(session: str, batch: Batch) -> QueuedAppend:
    """Return a batch as a synced append."""
    return QueuedAppend(session, replace(batch, sync=Sync.FULL), asyncio.get_running_loop().create_future())
