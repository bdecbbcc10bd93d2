"""PostgreSQL databases as stores: see `store_registry`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from typing_extensions import override

from midstream.environment import World
from midstream.extras import extra
from midstream.store.contract import StoreReader
from midstream.store.postgres import PostgresStore
from midstream.store.postgres.postgres_address import PostgresAddress
from midstream.store.postgres.postgres_connections import Postgres
from midstream.store.postgres.postgres_errors import FAILURES
from midstream.store.postgres.postgres_migrations import migrate, require_present
from midstream.store.postgres.session_reads import PostgresReader
from midstream.store.store_registry import Backend, Prepared

with extra("postgres"):
    import asyncpg


class PostgresBackend(Backend):
    """See `Backend`. An address is the part of a URL after `postgresql:`."""

    @override
    def open(self, address: str, *, world: World) -> PostgresStore:
        return PostgresStore(f"postgresql:{address}", world=world)

    @contextlib.asynccontextmanager
    @override
    async def read(self, address: str) -> AsyncIterator[StoreReader]:
        async with _connected(address, "reader") as (postgres, connection):
            async with postgres.errors():
                await require_present(postgres, connection)
            yield PostgresReader(postgres, connection)

    def file(self, _address: str) -> None:
        """See `Backend.file`."""

    @override
    async def prepare(self, address: str, *, grant: str = "") -> Prepared:
        async with _connected(address, "migration") as (postgres, connection), postgres.errors():
            return await migrate(postgres, connection, grant=grant)


@contextlib.asynccontextmanager
async def _connected(address: str, purpose: str) -> AsyncIterator[tuple[Postgres, asyncpg.Connection]]:
    postgres = Postgres(PostgresAddress.parse(address))
    connection = await postgres.connect(purpose)
    try:
        yield postgres, connection
    finally:
        with contextlib.suppress(*FAILURES):
            await connection.close(timeout=1.0)
