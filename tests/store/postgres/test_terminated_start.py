"""Termination of a backend while its node joins costs an attempt, and not the start."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from midstream.environment import World
from tests.store.postgres.postgres_places import PostgresPlace

WAITING = """
select pid from pg_stat_activity where application_name like 'midstream %' and wait_event_type = 'Lock' limit 1
"""


@pytest.mark.parametrize("table", ["ledger", "node"])
async def test_a_start_survives_the_termination_of_its_backend(place: PostgresPlace, table: str) -> None:
    first = place.store()
    await first.open()
    await first.close()
    operator, other = await asyncpg.connect(place.engine.url), await asyncpg.connect(place.engine.url)
    store = place.store()
    try:
        async with asyncio.timeout(60):
            lock = operator.transaction()
            await lock.start()
            await operator.execute(f"lock table {place.schema}.{table} in access exclusive mode")
            opening = asyncio.create_task(store.open())
            while (pid := await other.fetchval(WAITING)) is None:
                assert not opening.done(), "the start does not use the table"
                await World().sleep(0.01)
            assert await other.fetchval("select pg_terminate_backend($1, 10000)", pid)
            await lock.rollback()
            await opening
            assert await store.claim("s", at=1.0) == 1
    finally:
        await store.close()
        await operator.close()
        await other.close()
