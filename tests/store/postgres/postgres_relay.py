"""The relay in front of PostgreSQL."""

from __future__ import annotations

import asyncio

from tests.postgres_engine import Engine
from tests.store.relay import Relay


class PostgresRelay(Relay):
    """See `Relay`."""

    def __init__(self, engine: Engine, schema: str) -> None:
        super().__init__()
        self._engine = engine
        self._schema = schema

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_unix_connection(f"{self._engine.folder}/.s.PGSQL.5432")

    def _url_at(self, port: int) -> str:
        return f"postgresql://postgres@127.0.0.1:{port}/postgres?sslmode=disable&schema={self._schema}"
