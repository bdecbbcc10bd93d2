"""Tools in the transaction of their outcome, on a real server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from midstream.errors import JournalMovedError, LeaseLostError, TransactionError, UsageError
from midstream.session.records import Sync
from midstream.store.contract import Attempt, Batch, Transaction
from midstream.store.postgres import PostgresStore
from tests.store.postgres.postgres_places import PostgresPlace
from tests.store.stores import append, bodies

CREATE = "create table if not exists app_note (what text primary key)"
ADD = "insert into app_note values ($1)"


async def _within(
    store: PostgresStore,
    epoch: int,
    expected: int,
    effect: Callable[[Transaction], Any],
    *,
    within_s: float = 5.0,
) -> list[Any]:
    """Run one effect, and append its result or error."""
    seen: list[Any] = []

    def work(attempt: Attempt) -> Batch:
        try:
            seen.append(attempt(effect, within_s=within_s))
        except (TransactionError, UsageError) as error:
            seen.append(error)
        return Batch([b"outcome"], expected, epoch, Sync.NORMAL)

    await store.append_within("s", work, expected=expected, epoch=epoch)
    return seen


@pytest.fixture
async def epoch(store: PostgresStore) -> int:
    epoch = await store.claim("s", at=1.0)
    await append(store, b"0", expected=0, epoch=epoch)
    return epoch


def _run(statement: str, db: Transaction) -> None:
    db.execute(statement)


async def _noted(store: PostgresStore, place: PostgresPlace) -> list[str]:
    assert store._opened is not None
    rows = await store._opened.pool.run(
        lambda db, _: db.fetch("select what from public.app_note order by what")
    )
    await store._opened.pool.run(lambda db, _: db.execute("drop table public.app_note"))
    return [row[0] for row in rows]


async def test_an_effect_and_its_outcome_are_committed_together(
    store: PostgresStore, epoch: int, place: PostgresPlace
) -> None:
    def effect(db: Transaction) -> list[tuple[Any, ...]]:
        db.execute(CREATE)
        db.execute(ADD, ["one"])
        return db.execute("select what, length(what) from app_note")

    assert await _within(store, epoch, 1, effect) == [[("one", 3)]]
    assert await bodies(store) == [b"0", b"outcome"]
    assert await _noted(store, place) == ["one"]
    assert await append(store, b"next", expected=2, epoch=epoch) == 3


async def test_a_failed_statement_changes_nothing_and_the_tool_continues(
    store: PostgresStore, epoch: int, place: PostgresPlace
) -> None:
    def effect(db: Transaction) -> str:
        db.execute(CREATE)
        db.execute(ADD, ["one"])
        with pytest.raises(TransactionError, match=r"duplicate key .* It changed nothing"):
            db.execute(ADD, ["one"])
        db.execute(ADD, ["two"])
        return "done"

    assert await _within(store, epoch, 1, effect) == ["done"]
    assert await _noted(store, place) == ["one", "two"]


async def test_a_raising_effect_is_rolled_back_and_its_outcome_stored(
    store: PostgresStore, epoch: int
) -> None:
    def effect(db: Transaction) -> None:
        db.execute("create table app_gone (what text)")
        raise UsageError("no")

    [error] = await _within(store, epoch, 1, effect)
    assert str(error) == "no"
    assert await bodies(store) == [b"0", b"outcome"]
    [error] = await _within(store, epoch, 2, lambda db: db.execute("select * from app_gone"))
    assert isinstance(error, TransactionError)


@pytest.mark.parametrize(
    "statement",
    ["commit", " /* x */ ROLLBACK", "-- x\nbegin", "set search_path to x", "savepoint a", "listen x"],
)
async def test_a_statement_that_would_end_the_transaction_is_refused(
    store: PostgresStore, epoch: int, statement: str
) -> None:
    [error] = await _within(store, epoch, 1, lambda db: db.execute(statement))
    assert isinstance(error, TransactionError)
    assert "is not for a tool in a transaction" in error.message
    assert await bodies(store) == [b"0", b"outcome"]


async def test_the_tables_of_midstream_are_out_of_reach(
    store: PostgresStore, epoch: int, place: PostgresPlace
) -> None:
    for number, statement in enumerate(
        (
            f"update {place.schema}.session set last = 0",
            f"select * from {place.schema}.record",
            f"drop table {place.schema}.inbox",
        )
    ):
        [error] = await _within(store, epoch, 1 + number, partial(_run, statement))
        assert isinstance(error, UsageError), statement
    [error] = await _within(store, epoch, 4, lambda db: db.execute("select * from record"))
    assert isinstance(error, TransactionError)
    assert await bodies(store) == [b"0", *[b"outcome"] * 4]


async def test_a_statement_that_exceeds_the_time_limit_is_stopped(store: PostgresStore, epoch: int) -> None:
    [error] = await _within(store, epoch, 1, lambda db: db.execute("select pg_sleep(60)"), within_s=0.5)
    assert isinstance(error, TransactionError)
    assert "time limit of this call was reached" in error.message
    assert await bodies(store) == [b"0", b"outcome"]


async def test_named_parameters_are_refused(store: PostgresStore, epoch: int) -> None:
    [error] = await _within(store, epoch, 1, lambda db: db.execute("select :a", {"a": 1}))
    assert isinstance(error, UsageError)


async def test_an_effect_does_not_run_where_epoch_or_end_do_not_match(
    store: PostgresStore, epoch: int
) -> None:
    def work(attempt: Attempt) -> Batch:
        raise AssertionError("not called")

    with pytest.raises(JournalMovedError):
        await store.append_within("s", work, expected=0, epoch=epoch)
    with pytest.raises(LeaseLostError):
        await store.append_within("s", work, expected=1, epoch=epoch + 1)


async def test_a_commit_with_a_lost_connection_is_found_or_rolled_back(
    store: PostgresStore, epoch: int, place: PostgresPlace
) -> None:
    assert store._opened is not None
    pool = store._opened.pool

    def effect(db: Transaction) -> int:
        return int(db.execute("select pg_backend_pid()")[0][0])

    def work(attempt: Attempt) -> Batch:
        pid = attempt(effect, within_s=60.0)
        ended = asyncio.run_coroutine_threadsafe(
            pool.run(lambda db, _: db.execute("select pg_terminate_backend($1, 5000)", pid)), loop
        )
        ended.result()
        return Batch([b"outcome"], 1, epoch, Sync.FULL)

    loop = asyncio.get_running_loop()
    with pytest.raises(Exception, match="store"):
        await store.append_within("s", work, expected=1, epoch=epoch)
    assert await bodies(store) == [b"0"]
    assert await append(store, b"next", expected=1, epoch=epoch) == 2


async def test_a_cancelled_tool_is_cancelled_during_its_statement(store: PostgresStore, epoch: int) -> None:
    began = threading.Event()

    def wait_long(db: Transaction) -> None:
        began.set()
        db.execute("select pg_sleep(5)")

    loop = asyncio.get_running_loop()
    running = asyncio.create_task(_within(store, epoch, 1, wait_long))
    await loop.run_in_executor(None, began.wait, 60)
    await asyncio.sleep(0)  # the statement is sent
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(60):
            await running
    assert await bodies(store) == [b"0"]
