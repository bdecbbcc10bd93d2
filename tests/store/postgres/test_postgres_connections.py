"""Connections: checked when they are opened, reopened after a loss."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Generator
from typing import Any

import pytest

from midstream.environment import World
from midstream.errors import StoreBusyError, UsageError
from midstream.store.postgres import PostgresStore
from midstream.store.postgres.postgres_address import PostgresAddress
from midstream.store.postgres.postgres_connections import ConnectionPool, Postgres, ServerLink
from tests.store.postgres.pooler import TransactionPooler
from tests.store.postgres.postgres_places import PostgresPlace
from tests.store.postgres.postgres_relay import PostgresRelay


def _postgres(place: PostgresPlace, url: str = "") -> Postgres:
    return Postgres(PostgresAddress.parse((url or place.url).partition(":")[2]))


async def test_a_pooler_in_transaction_mode_is_refused_with_the_reason(place: PostgresPlace) -> None:
    async with TransactionPooler(place.engine).serving() as pooler:
        store = PostgresStore(f"{pooler.url}&schema={place.schema}")
        with pytest.raises(UsageError, match=r"pooler in transaction mode .* another backend"):
            await store.open()
        with pytest.raises(UsageError, match="not open"):
            await store.claim("s", at=1.0)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("postgresql://u:secret@127.0.0.1:1/db", "cannot be reached"),
        ("postgresql://u:secret@127.0.0.1:1/db?sslmode=never", "sslmode"),
    ],
)
async def test_an_unreachable_database_is_named_without_its_password(url: str, problem: str) -> None:
    with pytest.raises((StoreBusyError, UsageError), match=problem) as refused:
        await PostgresStore(url).open()
    assert "secret" not in str(refused.value)
    assert "u@127.0.0.1:1/db" in str(refused.value)


async def test_an_unknown_database_and_an_unknown_user_are_refused(place: PostgresPlace) -> None:
    for url in (
        place.url.replace("/postgres?", "/nothing?"),
        place.url.replace("postgres@", "stranger@"),
    ):
        with pytest.raises(UsageError, match="does not exist"):
            await PostgresStore(url).open()


async def test_commits_are_synced_whatever_the_default_of_the_server(place: PostgresPlace) -> None:
    store = place.store()
    await store.open()
    assert store._opened is not None
    pool = store._opened.pool
    await pool.run(lambda db, _: db.execute("alter role postgres set synchronous_commit to off"))
    try:
        connection = await _postgres(place).connect_to_write("test")
        assert await connection.fetchval("show synchronous_commit") == "on"
        await connection.close()
    finally:
        await pool.run(lambda db, _: db.execute("alter role postgres reset synchronous_commit"))
    await store.close()


async def test_a_server_on_another_timeline_starts_an_era_of_new_epochs(place: PostgresPlace) -> None:
    store = place.store()
    await store.open()
    assert store._opened is not None
    assert await store.claim("s", at=1.0) == 1
    await store._opened.pool.run(lambda db, _: db.execute("update ledger set timeline = '00000000'"))
    await store.close()
    again = place.store()
    await again.open()
    assert await again.claim("s", at=2.0) == 1002
    assert await again.claim("s", at=2.0) == 1003
    await again.close()


async def test_a_lost_link_is_opened_again(store: PostgresStore, place: PostgresPlace) -> None:
    link = ServerLink(_postgres(place), "test")
    first = await link.connection()
    assert await link.connection() is first
    first.terminate()
    second = await link.connection()
    assert await second.fetchval("select 1") == 1
    await link.close()
    await link.close()


async def test_a_pool_repeats_its_work_once_after_a_lost_connection(
    store: PostgresStore, place: PostgresPlace
) -> None:
    async with PostgresRelay(place.engine, place.schema).serving() as relay:
        pool = await ConnectionPool.make(_postgres(place, relay.url))
        calls = []

        async def work(db: object, is_repeated: bool) -> int:  # noqa: FBT001 - see `Work`
            calls.append(is_repeated)
            if not is_repeated:
                relay.cut()
            return await db.fetchval("select 7")  # type: ignore[attr-defined, no-any-return]

        assert await pool.run(work) == 7
        assert calls == [False, True]
        await pool.close()


class CancelledAt:
    """Work whose task is cancelled during one of its waits; they are counted from 1."""

    def __init__(self, work: Coroutine[Any, Any, object], wait: int) -> None:
        self.is_cancelled = False
        self._work = work
        self._wait = wait

    def __await__(self) -> Generator[Any, Any, object]:
        for number in itertools.count(1):
            try:
                waits_for = self._work.send(None)
            except StopIteration as end:
                return end.value
            if number == self._wait:
                self.is_cancelled = True
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            try:
                yield waits_for
            except asyncio.CancelledError as error:
                return (yield from _rest(self._work, error))
        raise AssertionError("unreachable: the loop has no end")


def _rest(work: Coroutine[Any, Any, object], error: BaseException) -> Generator[Any, Any, object]:
    waits_for = work.throw(error)
    while True:
        yield waits_for
        try:
            waits_for = work.send(None)
        except StopIteration as end:
            return end.value


async def test_a_pool_that_is_cancelled_while_it_opens_leaves_no_connection(place: PostgresPlace) -> None:
    store = place.store()
    await store.open()
    await store.close()
    postgres = _postgres(place)
    for wait in itertools.count(1):
        opening = CancelledAt(ConnectionPool.make(postgres), wait)

        async def open_pool(work: CancelledAt = opening) -> object:
            return await work

        (opened,) = await asyncio.gather(open_pool(), return_exceptions=True)
        if isinstance(opened, ConnectionPool):
            await opened.close()
        if not opening.is_cancelled:
            break
    looking = await postgres.connect("looking")
    count = "select count(*) from pg_stat_activity where application_name = 'midstream pool'"
    async with asyncio.timeout(60):
        while await looking.fetchval(count):
            await World().sleep(0.02)
    await looking.close()
