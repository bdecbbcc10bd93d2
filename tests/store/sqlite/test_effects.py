from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path

import pytest

from midstream.environment import World
from midstream.errors import JournalMovedError, LeaseLostError, StoreBusyError, TransactionError, UsageError
from midstream.session.blobs import Blob
from midstream.session.records import Sync
from midstream.store.contract import Attempt, Batch, SessionListing, StoredRecord, Transaction
from midstream.store.sqlite import SQLiteStore
from midstream.store.sqlite.effects import SAVEPOINT, own_names
from tests.spec import spec

Effect = Callable[[Transaction], object]


@pytest.fixture
async def store(folder: Path) -> AsyncIterator[SQLiteStore]:
    opened = SQLiteStore(folder / "x.db")
    await opened.open()
    await opened.claim("s", at=1.0)
    await _within(opened, lambda tx: tx.execute("create table app_done (what text, many integer)"))
    yield opened
    await opened.close()


async def _within(store: SQLiteStore, effect: Effect, *, within_s: float = 1.0) -> object:
    """Run an effect in the append of a record of its outcome; return the outcome or the error."""
    came: list[object] = []

    def work(attempt: Attempt) -> Batch:
        try:
            came.append(attempt(effect, within_s=within_s))
        except Exception as error:  # noqa: BLE001 - as a tool's caller does
            came.append(error)
        return Batch([repr(came[-1]).encode()], end, 1, Sync.FULL)

    end = len(await store.read("s", after=0, limit=1000))
    async with asyncio.timeout(60):
        await store.append_within("s", work, expected=end, epoch=1)
    return came[-1]


def _insert(what: str) -> Effect:
    return lambda tx: tx.execute("insert into app_done values (?, 1) returning what", (what,))


async def _done(store: SQLiteStore) -> object:
    return await _within(store, lambda tx: tx.execute("select what from app_done order by what"))


@spec("TURN-67")
async def test_an_effect_and_its_records_are_committed_together(store: SQLiteStore) -> None:
    blob = Blob("d" * 64, b"whole")

    def work(attempt: Attempt) -> Batch:
        rows = attempt(_insert("it"), within_s=60.0)
        return Batch([repr(rows).encode()], 1, 1, Sync.FULL, SessionListing(is_live=True, at=5.0), [blob])

    appended = await store.append_within("s", work, expected=1, epoch=1)
    assert appended.bodies == [b"[('it',)]"]
    assert await store.read("s", after=1, limit=9) == [StoredRecord(2, 1, b"[('it',)]")]
    assert await store.blob("s", blob.digest) == b"whole"
    found = await store.find("s")
    assert found is not None
    assert found.mark.is_live
    assert await _done(store) == [("it",)]
    assert await store.append("s", Batch([b"on"], expected=3, epoch=1, sync=Sync.FULL)) == 4


@spec("TURN-68")
async def test_a_failed_effect_is_rolled_back_and_its_records_stay(
    store: SQLiteStore,
) -> None:
    def fails(tx: Transaction) -> None:
        tx.execute("insert into app_done values ('half', 1)")
        tx.execute("create table app_other (x)")
        raise ValueError("no")

    error = await _within(store, fails)
    assert isinstance(error, ValueError)
    assert await _done(store) == []
    assert isinstance(
        await _within(store, lambda tx: tx.execute("select * from app_other")), TransactionError
    )
    bodies = [each.body for each in await store.read("s", after=0, limit=9)]
    assert bodies[1] == b"ValueError('no')"


@pytest.mark.parametrize(
    ("expected", "epoch", "refusal"), [(7, 1, JournalMovedError), (1, 2, LeaseLostError)]
)
async def test_an_effect_does_not_start_where_its_records_could_not_be_appended(
    store: SQLiteStore, expected: int, epoch: int, refusal: type[Exception]
) -> None:
    def work(attempt: Attempt) -> Batch:
        raise AssertionError(attempt)

    with pytest.raises(refusal):
        await store.append_within("s", work, expected=expected, epoch=epoch)
    assert await _done(store) == []


async def test_work_that_raises_our_error_leaves_nothing_of_its_effect(store: SQLiteStore) -> None:
    def work(attempt: Attempt) -> Batch:
        attempt(_insert("it"), within_s=60.0)
        raise StoreBusyError("not now")

    with pytest.raises(StoreBusyError):
        await store.append_within("s", work, expected=1, epoch=1)
    assert await _done(store) == []


async def test_work_with_a_bug_leaves_nothing_and_the_store_continues(store: SQLiteStore) -> None:
    def work(attempt: Attempt) -> Batch:
        attempt(_insert("it"), within_s=60.0)
        raise KeyError("bug")

    with pytest.raises(KeyError):
        await store.append_within("s", work, expected=1, epoch=1)
    assert await _done(store) == []


OUT_OF_REACH = [
    "delete from record",
    "insert into record values (1, 99, 1, x'00', x'')",
    "update session set epoch = 99",
    "update SESSION set epoch = 99",
    "select * from session",
    "select count(*) from record",
    "select * from journal",
    "insert into app_done select body, 1 from record",
    "drop table record",
    "drop view journal",
    "alter table record rename to app_record",
    "alter table record add column x",
    "create index app_index on record (body)",
    "create trigger app_trigger after insert on record begin delete from app_done; end",
    "create table blob (x)",
    "delete from blob",
    "update ledger set epochs_spent = 0",
    "commit",
    "rollback",
    "begin",
    f"release {SAVEPOINT}",
    f"rollback to {SAVEPOINT.upper()}",
    "attach ':memory:' as other",
    "detach main",
    "pragma user_version = 9",
    "pragma writable_schema = on",
    "pragma journal_mode = delete",
    "vacuum",
    "create temp table app_done (x)",
    "create temp view app_done as select 1",
    "analyze",
    "update sqlite_sequence set seq = 0",
    "delete from sqlite_sequence",
]


@spec("TURN-69")
@pytest.mark.parametrize("statement", OUT_OF_REACH)
async def test_a_tool_cannot_reach_tables_of_the_store(store: SQLiteStore, statement: str) -> None:
    await _within(store, _insert("kept"))
    before = await store.read("s", after=0, limit=1000)
    error = await _within(store, lambda tx: tx.execute(statement))
    assert isinstance(error, TransactionError)
    assert await _done(store) == [("kept",)]
    assert (await store.read("s", after=0, limit=1000))[: len(before)] == before


@spec("TURN-69")
async def test_a_trigger_of_the_tool_reaches_no_further_than_the_tool(store: SQLiteStore) -> None:
    trigger = "create trigger app_t after insert on app_done begin delete from record; end"
    await _within(store, lambda tx: tx.execute(trigger))
    assert isinstance(await _within(store, _insert("it")), TransactionError)
    assert len(await store.read("s", after=0, limit=1000)) == 3


WITHIN_REACH = [
    "create table app_more (session text primary key, record text, blob blob)",
    "create table app_numbered (id integer primary key autoincrement)",
    "create index app_index on app_done (what)",
    "alter table app_done add column session",
    "drop table app_done",
    "savepoint mine; insert into app_done values ('x', 1); rollback to mine; release mine",
    "pragma table_info(app_done)",
    "with recursive n(i) as (select 1 union all select i + 1 from n where i < 9) select sum(i) from n",
    "insert into app_done values ('x', 1) on conflict do nothing",
    "select json_extract('[1]', '$[0]'), max(many) from app_done",
]


@pytest.mark.parametrize("statement", WITHIN_REACH)
async def test_a_tool_can_use_its_own_tables(store: SQLiteStore, statement: str) -> None:
    assert isinstance(await _within(store, lambda tx: tx.execute(statement)), list)


def test_every_table_of_the_store_is_known(folder: Path) -> None:
    path = folder / "x.db"

    async def make() -> None:
        store = SQLiteStore(path)
        await store.open()
        await store.close()

    asyncio.run(make())
    with closing(sqlite3.connect(path)) as db:
        found = {
            name for (name,) in db.execute("select name from sqlite_schema where name not like 'sqlite_%'")
        }
    assert found | {"sqlite_sequence"} == own_names()


ENDLESS = "with recursive n(i) as (select 1 union all select i + 1 from n) {}"


@spec("TURN-69")
@pytest.mark.parametrize(
    "statement",
    [ENDLESS.format("select sum(i) from n"), f"insert into app_done {ENDLESS.format('select i, i from n')}"],
)
async def test_a_statement_that_exceeds_the_time_limit_is_interrupted_and_the_outcome_appended(
    store: SQLiteStore, statement: str
) -> None:
    def slow(tx: Transaction) -> None:
        tx.execute("insert into app_done values ('half', 1)")
        tx.execute(statement)

    error = await _within(store, slow, within_s=0.3)
    assert isinstance(error, TransactionError)
    assert await _done(store) == []
    bodies = [each.body for each in await store.read("s", after=0, limit=9)]
    assert b"time limit of this call was reached" in bodies[1]


async def test_a_tool_beyond_its_time_limit_runs_no_further_statement(folder: Path) -> None:
    class Later(World):
        at = 0.0

        def monotonic(self) -> float:
            return self.at

    world = Later()
    store = SQLiteStore(folder / "x.db", world=world)
    await store.open()
    await store.claim("s", at=1.0)

    def late(tx: Transaction) -> None:
        world.at += 1.1
        tx.execute("create table app_done (what)")

    assert isinstance(await _within(store, late), TransactionError)
    await store.close()


@spec("TURN-68")
@pytest.mark.parametrize("is_swallowed", [False, True])
async def test_a_statement_that_ends_the_transaction_ends_the_effect_and_not_the_outcome(
    store: SQLiteStore,
    is_swallowed: bool,  # noqa: FBT001 - pytest's parameter
) -> None:
    await _within(store, lambda tx: tx.execute("create unique index app_once on app_done (what)"))
    await _within(store, _insert("it"))

    def collides(tx: Transaction) -> None:
        tx.execute("insert into app_done values ('before', 1)")
        try:
            tx.execute("insert or rollback into app_done values ('it', 1)")
        except TransactionError:
            if not is_swallowed:
                raise
        tx.execute("insert into app_done values ('after', 1)")

    error = await _within(store, collides)
    assert isinstance(error, UsageError if is_swallowed else TransactionError)
    assert await _done(store) == [("it",)]
    assert len(await store.read("s", after=0, limit=9)) == 5


async def test_a_transaction_is_void_after_its_tool_has_returned(store: SQLiteStore) -> None:
    kept: list[Transaction] = []
    await _within(store, kept.append)
    with pytest.raises(UsageError, match="ended when its tool returned"):
        kept[0].execute("select 1")


async def test_effects_do_not_disturb_concurrent_appends(store: SQLiteStore) -> None:
    for number in range(10):
        await store.claim(f"t{number}", at=1.0)

    def work(attempt: Attempt) -> Batch:
        return Batch([repr(attempt(_insert("it"), within_s=60.0)).encode()], 1, 1, Sync.FULL)

    others = (store.append(f"t{n}", Batch([b"a"], expected=0, epoch=1, sync=Sync.NORMAL)) for n in range(10))
    within = store.append_within("s", work, expected=1, epoch=1)
    collides = store.append_within("s", work, expected=1, epoch=1)
    *ends, first, second = await asyncio.gather(*others, within, collides, return_exceptions=True)
    assert ends == [1] * 10
    assert isinstance(first, Batch)
    assert isinstance(second, JournalMovedError)
    assert await _done(store) == [("it",)]


async def test_a_tool_that_blocks_all_sessions_is_named_in_the_log(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Ticking(World):
        at = 0.0

        def monotonic(self) -> float:
            self.at += 0.2
            return self.at

    store = SQLiteStore(folder / "x.db", world=Ticking())
    await store.open()
    await store.claim("s", at=1.0)
    await _within(store, lambda _: None)
    await store.close()
    assert "blocked all sessions" in caplog.text


@spec("TURN-68")
async def test_a_failed_statement_reports_whether_it_and_the_transaction_remain(
    store: SQLiteStore,
) -> None:
    failed: list[TransactionError] = []

    def fails(tx: Transaction, statement: str) -> None:
        with pytest.raises(TransactionError) as caught:
            tx.execute(statement)
        failed.append(caught.value)

    def effect(tx: Transaction) -> object:
        tx.execute("create table app_one (a integer primary key)")
        tx.execute("insert into app_one values (1)")
        fails(tx, "insert into app_one values (0), (1)")
        fails(tx, "insert or fail into app_one values (2), (1)")
        return tx.execute("select a from app_one order by a")

    assert await _within(store, effect) == [(1,), (2,)]
    assert isinstance(
        await _within(store, lambda tx: fails(tx, "insert or rollback into app_one values (1)")), UsageError
    )
    assert [(each.message.rpartition(". ")[2], each.is_over) for each in failed] == [
        ("It changed nothing.", False),
        ("Some of its changes were made before it failed, and remain.", False),
        ("Everything that this call wrote was undone.", True),
    ]
