"""Appends in groups: shared syncs, refusals, and commits with unknown outcome."""

from __future__ import annotations

import asyncio

import pytest

from midstream.environment import World
from midstream.errors import JournalMovedError, StoreBusyError
from midstream.session.records import Sync
from midstream.store.contract import Batch, SessionListing
from midstream.store.postgres import PostgresStore
from midstream.store.postgres.grouped_appends import GroupedAppends
from tests.store.postgres.postgres_places import PostgresPlace
from tests.store.postgres.postgres_relay import PostgresRelay
from tests.store.stores import append, bodies

WORLD = World()


def _appends(store: PostgresStore) -> GroupedAppends:
    assert store._opened is not None
    return store._opened.appends


async def _groups(store: PostgresStore, *asked: tuple[str, Sync]) -> list[list[str]]:
    """Return the groups in which these appends would be committed."""
    appends = _appends(store)
    appends._working = WORLD.spawn(WORLD.sleep(0), name="not the worker")
    for session, sync in asked:
        appends.submit(session, Batch([], 0, 1, sync)).cancel()
    await appends._working
    appends._working = None
    groups = []
    while appends._waiting:
        groups.append([queued.session for queued in appends._take_group()])
    return groups


async def test_a_group_has_one_kind_of_sync_and_one_append_of_each_session(store: PostgresStore) -> None:
    full, normal = Sync.FULL, Sync.NORMAL
    asked = [("a", full), ("b", normal), ("a", full), ("c", full), ("b", full), ("d", full)]
    assert await _groups(store, *asked) == [["a", "c", "d"], ["b"], ["a", "b"]]


async def test_the_fault_of_one_append_does_not_fail_the_others(store: PostgresStore) -> None:
    epochs = [await store.claim(name, at=1.0) for name in ("s", "t")]
    wrong = SessionListing(is_live=False, at=1.0, turns=2**40)
    results = await asyncio.gather(
        store.append("s", Batch([b"a"], 0, epochs[0], Sync.FULL, wrong)),
        store.append("t", Batch([b"b"], 0, epochs[1], Sync.FULL)),
        return_exceptions=True,
    )
    assert isinstance(results[0], Exception)
    assert results[1] == 1
    assert await bodies(store) == []
    assert await bodies(store, "t") == [b"b"]


async def test_a_title_may_have_any_character(store: PostgresStore) -> None:
    epoch = await store.claim("s", at=1.0)
    mark = SessionListing(is_live=False, at=1.0, title="a\0b\ud800")
    await store.append("s", Batch([b"a"], 0, epoch, Sync.FULL, mark))
    line = await store.find("s")
    assert line is not None
    assert line.mark.title == "a\N{REPLACEMENT CHARACTER}b?"


@pytest.mark.parametrize("sync", Sync)
async def test_an_append_with_a_lost_acknowledgement_is_not_repeated(
    place: PostgresPlace, sync: Sync
) -> None:
    async with PostgresRelay(place.engine, place.schema).serving() as relay:
        store = PostgresStore(relay.url)
        await store.open()
        epoch = await store.claim("s", at=1.0)
        for number in range(3):
            relay.swallow_after = b"body %d" % number
            end = await append(store, b"body %d" % number, expected=number, epoch=epoch, sync=sync)
            assert end == number + 1
        assert relay.swallowed == 3
        assert await bodies(store) == [b"body 0", b"body 1", b"body 2"]
        await store.close()


async def test_an_append_whose_backend_ended_before_the_commit_is_sent_again(
    store: PostgresStore, place: PostgresPlace
) -> None:
    epoch = await store.claim("s", at=1.0)
    assert store._opened is not None
    pool = store._opened.pool
    connection = await _appends(store)._link.connection()
    async with pool._pool.acquire() as other, other.transaction():
        await other.execute("select from session where name = 's' for update")
        appending = WORLD.spawn(append(store, b"a", expected=0, epoch=epoch), name="append")
        pid = connection.get_server_pid()
        while not await other.fetchval("select cardinality(pg_blocking_pids($1)) > 0", pid):
            await WORLD.sleep(0)
        assert await other.fetchval("select pg_terminate_backend($1, 5000)", pid)
    assert await appending == 1
    assert await bodies(store) == [b"a"]


async def test_an_append_that_lost_its_acknowledgement_and_its_position_is_refused(
    place: PostgresPlace,
) -> None:
    async with PostgresRelay(place.engine, place.schema).serving() as relay:
        store = PostgresStore(relay.url)
        await store.open()
        epoch = await store.claim("s", at=1.0)
        relay.swallow_after = b"mine"
        results = await asyncio.gather(
            append(store, b"mine", expected=0, epoch=epoch),
            append(store, b"other", expected=0, epoch=epoch),
            return_exceptions=True,
        )
        assert results[0] == 1
        assert isinstance(results[1], JournalMovedError)
        assert await bodies(store) == [b"mine"]
        await store.close()


async def test_unsent_appends_are_refused_while_the_server_is_down(place: PostgresPlace) -> None:
    async with PostgresRelay(place.engine, place.schema).serving() as relay:
        store = PostgresStore(relay.url)
        await store.open()
        epoch = await store.claim("s", at=1.0)
        relay.is_up = False
        relay.cut()
        await WORLD.sleep(0.05)  # Until the connection has noticed.
        with pytest.raises(StoreBusyError):
            await append(store, b"a", expected=0, epoch=epoch)
        relay.is_up = True
        assert await append(store, b"a", expected=0, epoch=epoch) == 1
        await store.close()


async def test_closing_waits_for_an_outcome_only_for_a_bounded_time(
    place: PostgresPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midstream.store.postgres.grouped_appends.CLOSE_S", 0.05)
    async with PostgresRelay(place.engine, place.schema).serving() as relay:
        store = PostgresStore(relay.url)
        await store.open()
        epoch = await store.claim("s", at=1.0)
        relay.swallow_after = b"body"
        relay.is_up = False
        appending = WORLD.spawn(append(store, b"body", expected=0, epoch=epoch), name="append")
        while not relay.swallowed:
            await WORLD.sleep(0)
        await store.close()
        with pytest.raises(Exception, match="closed before the outcome"):
            await appending
