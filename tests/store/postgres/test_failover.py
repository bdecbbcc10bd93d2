"""Promotion of a replica that lacks the last records: no epoch is reused, and no loss goes undetected."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from midstream.environment import World
from midstream.errors import StoreBusyError
from midstream.session.records import Sync
from midstream.store.contract import Batch
from midstream.store.postgres import PostgresStore
from tests.postgres_engine import Engine

pytestmark = pytest.mark.fault

WORLD = World()


async def test_epochs_that_a_promoted_replica_lacks_are_never_reused() -> None:
    with Engine() as primary:
        store = PostgresStore(primary.url)
        await store.open()
        first = await store.claim("s", at=1.0)
        await store.append("s", Batch([b"kept"], 0, first, Sync.FULL))
        with Engine(replica_of=primary) as replica:
            await _follow(primary, replica)
            with pytest.raises(StoreBusyError, match="is a replica, which takes no writes"):
                await PostgresStore(replica.url).open()
            replica.stop()
            lost = await store.claim("s", at=2.0)
            await store.append("s", Batch([b"lost"], 1, lost, Sync.FULL))
            await store.close()
            primary.stop()
            replica.start()
            operator = await asyncpg.connect(replica.url)
            assert await operator.fetchval("select pg_promote()")
            await operator.close()
            heir = PostgresStore(replica.url)
            await heir.open()
            assert [each.body for each in await heir.read("s", after=0, limit=9)] == [b"kept"]
            epoch = await heir.claim("s", at=3.0)
            assert epoch > lost, "an id of the lost record belongs to no other one"
            assert await heir.append("s", Batch([b"new"], 1, epoch, Sync.FULL)) == 2
            assert await heir.claim("s", at=4.0) == epoch + 1, "once for each promotion"
            await heir.close()


async def _follow(primary: Engine, replica: Engine) -> None:
    """Wait until the replica has what the primary has."""
    source, copy = await asyncpg.connect(primary.url), await asyncpg.connect(replica.url)
    end = await source.fetchval("select pg_current_wal_flush_lsn()")
    async with asyncio.timeout(60):
        while not await copy.fetchval("select pg_last_wal_replay_lsn() >= $1::pg_lsn", end):
            await WORLD.sleep(0.01)
    await source.close()
    await copy.close()
