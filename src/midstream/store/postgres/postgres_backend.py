"""PostgreSQL databases as a kind of store: see `store_registry`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from typing_extensions import override

from midstream.environment import World
from midstream.errors import MidstreamError
from midstream.extras import extra
from midstream.store.blocking_reads import LoopThread
from midstream.store.contract import StoreReader
from midstream.store.postgres import PostgresStore
from midstream.store.postgres.postgres_address import PostgresAddress
from midstream.store.postgres.postgres_connections import Postgres
from midstream.store.postgres.postgres_errors import FAILURES
from midstream.store.postgres.postgres_migrations import migrate, require_present
from midstream.store.postgres.session_reads import PostgresReader, Question
from midstream.store.store_registry import Backend, Prepared

with extra("postgres"):
    import asyncpg


class PostgresBackend(Backend):
    """See `Backend`. An address is what follows `postgresql:`."""

    @override
    def open(self, address: str, *, world: World) -> PostgresStore:
        return PostgresStore(f"postgresql:{address}", world=world)

    @contextlib.contextmanager
    @override
    def read(self, address: str) -> Iterator[StoreReader]:
        postgres = Postgres(PostgresAddress.parse(address))
        with contextlib.closing(LoopThread()) as loop:
            connection = loop.run(_open_to_read(postgres))
            try:
                yield PostgresReader(lambda question: loop.run(_ask(postgres, connection, question)))
            finally:
                loop.run(_close(connection))

    def file(self, _address: str) -> None:
        """See `Backend.file`."""

    @override
    async def prepare(self, address: str, *, grant: str = "") -> Prepared:
        postgres = Postgres(PostgresAddress.parse(address))
        connection = await postgres.connect("migration")
        try:
            async with postgres.errors():
                return await migrate(postgres, connection, grant=grant)
        finally:
            await _close(connection)


async def _open_to_read(postgres: Postgres) -> asyncpg.Connection:
    connection = await postgres.connect("reader")
    try:
        async with postgres.errors():
            await require_present(postgres, connection)
    except MidstreamError:
        await _close(connection)
        raise
    return connection


async def _ask(postgres: Postgres, connection: asyncpg.Connection, question: Question[Any]) -> Any:  # noqa: ANN401 - see `Question`
    async with postgres.errors():
        return await question(connection)


async def _close(connection: asyncpg.Connection) -> None:
    with contextlib.suppress(*FAILURES):
        await connection.close(timeout=1.0)
