"""Connections to one PostgreSQL database: opened with the same settings, checked, opened anew when they were lost."""

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
"""Seconds in which a server answers a new connection."""
STATEMENT_S = 60.0
"""Seconds after which a statement counts as lost with its connection: the network was cut without a sign."""
POOL_MAX = 4
"""Connections of a process for reads, claims and whatever is no append. PostgreSQL allows a hundred by default."""
VERSION_MIN = 14
PROBES = 5
"""Transactions of another connection during which a backend is compared with what it was before."""

SETTINGS: Final = {
    # Limits of the server for programs that misbehave: a node waits on purpose.
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_session_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    # A machine that lost its power keeps its locks until the server notices: after 20 s instead of two hours.
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "20000",
}
"""Set by statements: a pool in session mode takes few of them with the start of a connection."""
POOLED: Final = (
    "a connection pooler in transaction mode is in front of it, which gives each transaction another backend: "
    "notifications and the locks by which servers notice each other's end need a backend that stays. "
    "Name PostgreSQL itself, or a pool in session mode"
)
"""Why a pooler is refused."""

# The backend of this connection.
BACKEND = "select pg_backend_pid()"
# Whether the server is a replica, which takes no writes, and how its commits are synced.
STATE = "select pg_is_in_recovery(), current_setting('synchronous_commit')"
# Sync each commit: an operator's default of `off` is not for what is durable here.
SYNC = "set synchronous_commit to on"
# The timeline of the server: another one after the promotion of a replica or a restore.
TIMELINE = "select substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8)"
# Whether the ledger has another timeline.
HAS_CHANGED = "select true from ledger where timeline <> $1"
# Begin a new era with a new timeline: epochs that were given and lost are never given again.
BEGIN_ERA = """
update ledger set timeline = $1, era = era + (timeline <> '')::integer where timeline <> $1
"""


class Postgres:
    """Opens connections to one database."""

    def __init__(self, address: PostgresAddress) -> None:
        self.address = address
        self.where = f"store {address.shown}"
        """The store in messages, without a password."""
        self.set_path = f"set search_path to {address.schema}, pg_temp"
        """The statement that lets a connection see our tables."""

    async def connect(self, purpose: str, **settings: str) -> asyncpg.Connection:
        """Open a connection.

        Args:
            purpose: For the operator, who lists connections.
            settings: Further parameters of the server.

        Raises:
            StoreBusyError: The server is not reached, or has no connection left.
            UsageError: It does not accept this user, or is too old.
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
        """End a connection where its preparation fails or is cancelled."""
        try:
            async with self.errors():
                yield
        except BaseException:
            connection.terminate()
            raise

    async def connect_to_write(self, purpose: str, **settings: str) -> asyncpg.Connection:
        """Open a connection to a server that takes writes; see `connect`.

        Raises:
            StoreBusyError: It is a replica.
        """
        connection = await self.connect(purpose, **settings)
        async with self._terminating(connection):
            await self.prepare_to_write(connection)
        return connection

    async def prepare_to_write(self, connection: asyncpg.Connection) -> None:
        """Check a new connection, and note a server that was promoted."""
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
                return  # a database as a service that has no files of its own
            if await connection.fetchval(HAS_CHANGED, timeline):
                await connection.execute(BEGIN_ERA, timeline)

    async def require_lasting_backend(self, connection: asyncpg.Connection) -> None:
        """Refuse a connection whose backend changes between transactions.

        Raises:
            UsageError: A pooler in transaction mode is between.
        """
        backend = await connection.fetchval(BACKEND)
        if backend == connection.get_server_pid():
            return
        other = await self.connect("probe")
        try:
            for _ in range(PROBES):
                async with other.transaction():  # holds what the pooler would give to the next transaction
                    if (
                        await other.fetchval(BACKEND) == backend
                        or await connection.fetchval(BACKEND) != backend
                    ):
                        raise UsageError(f"{self.where}: {POOLED}")
        finally:
            other.terminate()

    @contextlib.asynccontextmanager
    async def errors(self) -> AsyncIterator[None]:
        """Raise ours for PostgreSQL's."""
        try:
            yield
        except FAILURES as error:
            raise refusal_of(error, self.where) from error


class ServerLink:
    """One connection for one purpose, which is opened anew when it was lost. One task at a time uses it."""

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
        """End the connection at once."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()

    async def close(self) -> None:
        """End the connection as the protocol has it."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(*FAILURES):
                await connection.close(timeout=1.0)


Work = Callable[[asyncpg.Connection, bool], Awaitable[T]]
"""Uses a connection. The flag: it was done before on a connection that was lost, so that perhaps it has happened."""


class ConnectionPool:
    """A few connections for whatever is no append. Close it after use."""

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
                reset=_leave_as_it_is,
            )
            async with pool.acquire(timeout=CONNECT_S):
                pass
        return cls(postgres, pool)

    async def run(self, work: Work[T]) -> T:
        """Return what `work` returns; it is done once more where its connection is lost.

        Raises:
            MidstreamError: The server refuses, or is not reached.
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
                with contextlib.suppress(asyncpg.InterfaceError):  # its pool has taken it back already
                    connection.terminate()
                raise _LostError(error) from error

    async def close(self) -> None:
        """Wait for what is being done, and end all connections."""
        with contextlib.suppress(*FAILURES, MidstreamError):
            await self._pool.close()


class _LostError(Exception):
    """A connection was lost in the middle of something."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(cause)
        self.cause = cause


async def _leave_as_it_is(_connection: asyncpg.Connection) -> None:
    """Keep the settings of a connection: nothing here changes them."""
