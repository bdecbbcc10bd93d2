"""Tables are created once, by a role with the permission, and used by roles without it."""

from __future__ import annotations

import asyncio

import pytest

from midstream.errors import NotFoundError, UsageError
from midstream.session.records import Sync
from midstream.store.contract import Batch
from midstream.store.postgres import PostgresStore
from midstream.store.postgres.postgres_address import PostgresAddress
from midstream.store.postgres.postgres_connections import Postgres
from midstream.store.postgres.postgres_migrations import require_present
from midstream.store.store_registry import Prepared, prepare_store, read_store
from tests.store.postgres.postgres_places import PostgresPlace


async def _run(place: PostgresPlace, *statements: str) -> None:
    connection = await Postgres(PostgresAddress.parse(place.url.partition(":")[2])).connect("test")
    for statement in statements:
        await connection.execute(statement)
    await connection.close()


async def test_servers_that_start_together_create_the_tables_once(place: PostgresPlace) -> None:
    stores = [place.store() for _ in range(4)]
    await asyncio.gather(*(store.open() for store in stores))
    for store in stores:
        await store.close()
    assert await prepare_store(place.url) == Prepared(1, 1)


async def test_a_role_without_create_permission_runs_on_prepared_tables(place: PostgresPlace) -> None:
    role = f"runner_{place.schema}"
    await _run(place, f"create role {role} login")
    as_role = place.url.replace("postgres@", f"{role}@")
    with pytest.raises(UsageError, match="midstream store migrate URL --grant ROLE"):
        await PostgresStore(as_role).open()
    assert await prepare_store(place.url, grant=role) == Prepared(0, 1)
    store = PostgresStore(as_role)
    await store.open()
    epoch = await store.claim("s", at=1.0)
    assert await store.append("s", Batch([b"a"], 0, epoch, Sync.FULL)) == 1
    assert await store.kv_put("n", "k", b"1", expected=0, at=1.0) == 1
    assert await store.kv_delete("n", "k", expected=1)
    await store.delete("s")
    await store.close()


async def test_a_schema_of_another_program_is_refused(place: PostgresPlace) -> None:
    await _run(place, f"create schema {place.schema}", f"create table {place.schema}.session (id integer)")
    with pytest.raises(UsageError, match="belongs to another program"):
        await place.store().open()


async def test_a_newer_version_is_refused(place: PostgresPlace) -> None:
    await prepare_store(place.url)
    await _run(place, "update ledger set schema_version = 99")
    with pytest.raises(UsageError, match="has schema 99"):
        await place.store().open()


async def test_reading_creates_nothing(place: PostgresPlace) -> None:
    with pytest.raises(NotFoundError, match="nothing was stored"), read_store(place.url):
        pass
    postgres = Postgres(PostgresAddress.parse(place.url.partition(":")[2]))
    connection = await postgres.connect("test")
    with pytest.raises(NotFoundError):
        await require_present(postgres, connection)
    await connection.close()


async def test_an_invalid_role_name_is_refused(place: PostgresPlace) -> None:
    with pytest.raises(UsageError, match="not the name of a role"):
        await prepare_store(place.url, grant='x"; drop table y')
