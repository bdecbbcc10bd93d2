"""Connections to one PostgreSQL database: opened with the same settings, checked, and reopened after a loss."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, TypeVar

from midstream.errors import MidstreamError, StoreBusyError, UsageError
from midstream.extras import extra
from midstream.store.postgres.postgres_address import PostgresAddress
from midstream.store.postgres.postgres_errors import FAILURES, is_lost, refusal_of

with extra("postgres"):
    import asyncpg

T = TypeVar("T")

CONNECT_S = 10.0
"""Seconds for a server to answer a new connection."""
STATEMENT_S = 60.0
"""Seconds after which a statement and its connection count as lost."""
POOL_MAX = 4
"""Connections of a process for everything except appends. PostgreSQL allows a hundred by default."""
VERSION_MIN = 14
PROBES = 5
"""Transactions of another connection during which a backend is checked for changes."""

SETTINGS: Final = {
    # The server's limits for faulty programs do not apply: a node waits intentionally.
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_session_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    # The locks of a machine without power stay until the server notices: after 20 s instead of two hours.
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "20000",
}
"""Set by statements: a pooler in session mode accepts few of them at the start of a connection."""
POOLED: Final = (
    "a connection pooler in transaction mode is in front of it, which gives each transaction another backend: "
    "notifications and the locks by which servers notice each other's end need a backend that stays. "
    "Name PostgreSQL itself, or a pool in session mode"
)
"""Why a pooler is refused."""

# The backend of a connection.
BACKEND = "select pg_backend_pid()"
# Whether the server is a read-only replica, and how its commits are synced.
STATE = "select pg_is_in_recovery(), current_setting('synchronous_commit')"
# Sync each commit: an operator's default of `off` must not apply to durable appends.
SYNC = "set synchronous_commit to on"
# The timeline of the server: it changes with the promotion of a replica or a restore.
TIMELINE = "select substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8)"
# Whether the ledger has another timeline.
HAS_CHANGED = "select true from ledger where timeline <> $1"
# Begin a new era with a new timeline, so that lost epochs are never used again.
BEGIN_ERA = """
update ledger set timeline = $1, era = era + (timeline <> '')::integer where timeline <> $1
"""


class Postgres:
    """Opens connections to one database."""

    def __init__(self, address: PostgresAddress) -> None:
        self.address = address
        self.where = f"store {address.shown}"
        """The address for messages, without a password."""
        self.set_path = f"set search_path to {address.schema}, pg_temp"
        """The statement that gives a connection access to the store's tables."""

    async def connect(self, purpose: str, **settings: str) -> asyncpg.Connection:
        """Open a connection.

        Args:
            purpose: A name for the operator's list of connections.
            settings: Further parameters of the server.

        Raises:
            StoreBusyError: The server cannot be reached, or has no connection left.
            UsageError: The server refuses this user, or is too old.
        """
        try:
            connection = await asyncpg.connect(
                self.address.dsn,
                timeout=CONNECT_S,
                command_timeout=STATEMENT_S,
                server_settings={"application_name": f"midstream {purpose}"},
            )
        except FAILURES as error:
            raise refusal_of(error, self.where) from error
        except ValueError as error:  # parameters that the driver does not accept
            raise UsageError(f"{self.where}: {error}") from error
        async with self._terminating(connection):
            if (version := connection.get_server_version()).major < VERSION_MIN:
                raise UsageError(
                    f"{self.where} is PostgreSQL {version.major}; version {VERSION_MIN} or newer is needed"
                )
            given = {**SETTINGS, **settings}.items()
            await connection.execute(
                "; ".join([self.set_path, *(f"set {name} to '{to}'" for name, to in given)])
            )
        return connection

    @contextlib.asynccontextmanager
    async def _terminating(self, connection: asyncpg.Connection) -> AsyncIterator[None]:
        """Close a connection if its preparation fails or is cancelled."""
        try:
            async with self.errors():
                yield
        except BaseException:
            connection.terminate()
            raise

    async def connect_to_write(self, purpose: str, **settings: str) -> asyncpg.Connection:
        """Open a connection to a server that accepts writes; see `connect`.

        Raises:
            StoreBusyError: The server is a replica.
        """
        connection = await self.connect(purpose, **settings)
        async with self._terminating(connection):
            await self.prepare_to_write(connection)
        return connection

    async def prepare_to_write(self, connection: asyncpg.Connection) -> None:
        """Check a new connection, and record a promoted server."""
        async with self.errors():
            is_replica, synced = await connection.fetchrow(STATE)
            if is_replica:
                raise StoreBusyError(
                    f"{self.where} is a replica, which takes no writes: name all hosts of the database, "
                    "and `target_session_attrs=read-write`",
                    retry_after_s=1.0,
                )
            if synced == "off":
                await connection.execute(SYNC)
            try:
                timeline = await connection.fetchval(TIMELINE)
            except (asyncpg.PostgresError, asyncpg.InterfaceError):
                if connection.is_closed():
                    raise
                return  # a managed database without files of its own
            if await connection.fetchval(HAS_CHANGED, timeline):
                await connection.execute(BEGIN_ERA, timeline)

    async def require_lasting_backend(self, connection: asyncpg.Connection) -> None:
        """Refuse a connection whose backend changes between transactions.

        Raises:
            UsageError: There is a pooler in transaction mode.
        """
        backend = await connection.fetchval(BACKEND)
        if backend == connection.get_server_pid():
            return
        other = await self.connect("probe")
        try:
            for _ in range(PROBES):
                # occupies the backend that the pooler would use for the next transaction
                async with other.transaction():
                    if (
                        await other.fetchval(BACKEND) == backend
                        or await connection.fetchval(BACKEND) != backend
                    ):
                        raise UsageError(f"{self.where}: {POOLED}")
        finally:
            other.terminate()

    @contextlib.asynccontextmanager
    async def errors(self) -> AsyncIterator[None]:
        """Convert PostgreSQL's errors."""
        try:
            yield
        except FAILURES as error:
            raise refusal_of(error, self.where) from error


class ServerLink:
    """One connection for one purpose, reopened after a loss. Only one task at a time may use it."""

    def __init__(self, postgres: Postgres, purpose: str, **settings: str) -> None:
        self._postgres = postgres
        self._purpose = purpose
        self._settings = settings
        self._connection: asyncpg.Connection | None = None

    async def connection(self) -> asyncpg.Connection:
        """Return the connection, open.

        Raises:
            MidstreamError: See `Postgres.connect`.
        """
        if self._connection is None or self._connection.is_closed():
            self._connection = await self._postgres.connect_to_write(self._purpose, **self._settings)
        return self._connection

    def drop(self) -> None:
        """Terminate the connection at once."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()

    async def close(self) -> None:
        """Close the connection in an orderly way."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(*FAILURES):
                await connection.close(timeout=1.0)


Work = Callable[[asyncpg.Connection, bool], Awaitable[T]]
"""Uses a connection. The flag states that an earlier try lost its connection, so that it may have happened."""


class ConnectionPool:
    """A few connections for everything except appends. Close it after use."""

    def __init__(self, postgres: Postgres, pool: Any) -> None:  # noqa: ANN401 - the driver's
        self._postgres = postgres
        self._pool = pool

    @classmethod
    async def make(cls, postgres: Postgres) -> ConnectionPool:
        """Open a pool with its first connection.

        Raises:
            MidstreamError: See `Postgres.connect`.
        """
        async with postgres.errors():
            pool = await asyncpg.create_pool(
                min_size=0,
                max_size=POOL_MAX,
                connect=lambda *_, **__: postgres.connect("pool"),
                init=postgres.prepare_to_write,
                reset=_keep_settings,
            )
            try:
                async with pool.acquire(timeout=CONNECT_S):
                    pass
            except BaseException:  # also a cancellation
                pool.terminate()
                raise
        return cls(postgres, pool)

    async def run(self, work: Work[T]) -> T:
        """Run `work`, and return its result; repeat it if the connection was lost.

        Raises:
            MidstreamError: The server refuses, or cannot be reached.
        """
        async with self._postgres.errors():
            try:
                return await self._run(work, is_repeated=False)
            except _LostError:
                pass
            try:
                return await self._run(work, is_repeated=True)
            except _LostError as error:
                raise error.cause from error

    async def _run(self, work: Work[T], *, is_repeated: bool) -> T:
        async with self._pool.acquire(timeout=CONNECT_S) as connection:
            try:
                return await work(connection, is_repeated)
            except FAILURES as error:
                if not is_lost(error, connection):
                    raise
                with contextlib.suppress(asyncpg.InterfaceError):  # the pool has already taken it back
                    connection.terminate()
                raise _LostError(error) from error

    async def close(self) -> None:
        """Wait for running work, and close all connections."""
        with contextlib.suppress(*FAILURES, MidstreamError):
            await self._pool.close()


class _LostError(Exception):
    """A connection was lost during a statement."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(cause)
        self.cause = cause


async def _keep_settings(_connection: asyncpg.Connection) -> None:
    """Keep the settings of a connection, which no code here changes."""
