"""Liveness: a dead node is noticed at once; a node that only lost a connection rejoins and keeps its sessions."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import cast

import pytest

from midstream.environment import World
from midstream.errors import LeaseHeldError, LeaseLostError
from midstream.session.records import Sync
from midstream.store.contract import Batch, SessionListing
from midstream.store.postgres import PostgresStore, node_locks
from midstream.store.postgres.node_locks import AdvisoryLock
from midstream.store.postgres.node_signals import Kind
from midstream.store.postgres.postgres_connections import Postgres
from midstream.testing.store_fakes import open_store
from tests.store.postgres.postgres_places import PostgresPlace
from tests.store.postgres.postgres_relay import PostgresRelay
from tests.store.stores import append, bodies

WORLD = World()


async def _terminate(store: PostgresStore, *, purpose: str, of: PostgresStore) -> None:
    """Terminate the backend of one connection of a store, as an operator does."""
    assert store._opened is not None
    assert of._opened is not None
    if purpose == "node":
        await of._opened.lock.number()  # It has rejoined.
        assert of._opened.lock._connection is not None
        pid = of._opened.lock._connection.get_server_pid()
    else:
        link = {
            "writer": of._opened.appends._link,
            "notifier": of._opened.notifier._link,
            "listener": of._opened._listener._link,
            "sentry": of._opened._neighbours._link,
        }[purpose]
        async with asyncio.timeout(60):
            while (
                link._connection is None or link._connection.is_closed()
            ):  # It is opened again, or with the first use.
                store._opened.report(Kind.NODES)
                of._opened.report(Kind.NODES)
                await WORLD.sleep(0.005)
        pid = link._connection.get_server_pid()
    assert await store._opened.pool.run(
        lambda db, _: db.fetchval("select pg_terminate_backend($1, 5000)", pid)
    )


async def _until_peers(store: PostgresStore, count: int) -> None:
    async with asyncio.timeout(60):
        assert store._opened is not None
        while len(store._opened._neighbours.living) != count:
            await WORLD.sleep(0.005)


@pytest.mark.parametrize("purpose", ["node", "writer", "notifier", "listener", "sentry"])
async def test_a_terminated_backend_costs_no_lease(place: PostgresPlace, purpose: str) -> None:
    async with open_store(place) as one, open_store(place) as other:
        assert isinstance(one, PostgresStore)
        assert isinstance(other, PostgresStore)
        epoch = await one.claim("s", at=1.0)
        await _until_peers(one, 1)
        for number in range(3):
            await append(one, b"x", expected=number, epoch=epoch, sync=Sync.NORMAL)
            await _terminate(other, purpose=purpose, of=one)
        assert one._opened is not None
        await one._opened.lock.number()
        assert await append(one, b"x", expected=3, epoch=epoch) == 4
        with pytest.raises(LeaseHeldError):
            await other.claim("s", at=2.0)
        assert len(await bodies(other)) == 4
        await _until_peers(other, 1)


async def test_a_store_reports_when_it_became_a_node_again(place: PostgresPlace) -> None:
    async with open_store(place) as one, open_store(place) as other:
        assert isinstance(one, PostgresStore)
        assert isinstance(other, PostgresStore)
        joined_at, lost_at = one.joined_at, WORLD.monotonic()
        assert joined_at < lost_at
        await _terminate(other, purpose="node", of=one)
        async with asyncio.timeout(60):
            while one.joined_at in (joined_at, math.inf):
                await WORLD.sleep(0.005)
        assert one.joined_at > lost_at
    assert one.joined_at == math.inf


async def test_the_end_of_a_node_is_noticed_at_once_and_its_row_removed(place: PostgresPlace) -> None:
    async with open_store(place) as one, open_store(place) as other:
        assert isinstance(one, PostgresStore)
        dead = place.store()
        await dead.open()
        await _until_peers(one, 2)
        epoch = await dead.claim("s", at=1.0)
        live = SessionListing(is_live=True, at=1.0)
        await dead.append("s", _batch(epoch, live))
        watching = WORLD.spawn(_orphans(other), name="watch")
        place.kill(dead)
        assert await watching == ("s",)
        await _until_peers(one, 1)
        assert await other.claim("s", at=2.0) == epoch + 1


async def test_the_end_of_a_node_is_noticed_also_where_its_observer_is_frozen(
    place: PostgresPlace,
) -> None:
    quick = PostgresPlace(place.engine, lease_s=10.0)
    async with open_store(quick) as one, open_store(quick) as other:
        assert isinstance(one, PostgresStore)
        assert isinstance(other, PostgresStore)
        dead = quick.store()
        await dead.open()
        await dead.claim("s", at=1.0)
        await _until_peers(one, 2)
        assert one._opened is not None
        assert other._opened is not None
        number = dead._opened.lock.last_number if dead._opened is not None else 0
        await other._opened._neighbours.close()  # It waits for the end of no other node.
        await other._opened.watcher.close()  # And checks none.
        quick.kill(dead)
        neighbours = one._opened._neighbours
        async with asyncio.timeout(60):
            while number in neighbours.living:
                await WORLD.sleep(0.02)
        assert (
            number not in neighbours.frozen
        )  # It is known to be dead, a lease before it would count as frozen.
        assert await one.claim("s", at=2.0) == 2


async def test_a_node_keeps_its_sessions_after_an_outage_of_its_server(place: PostgresPlace) -> None:
    async with PostgresRelay(place.engine, place.schema).serving() as relay:
        store = PostgresStore(relay.url)
        await store.open()
        epoch = await store.claim("s", at=1.0)
        relay.is_up = False
        relay.cut()
        await WORLD.sleep(0.05)
        relay.is_up = True
        assert store._opened is not None
        number = await store._opened.lock.number()
        assert number > 1
        assert await append(store, b"a", expected=0, epoch=epoch) == 1
        await store.close()


async def test_sessions_claimed_by_others_in_the_meantime_are_lost(place: PostgresPlace) -> None:
    async with PostgresRelay(place.engine, place.schema).serving() as relay, open_store(place) as other:
        store = PostgresStore(relay.url)
        await store.open()
        epochs = [await store.claim(name, at=1.0) for name in ("s", "t")]
        relay.is_up = False
        relay.cut()
        async with asyncio.timeout(60):
            while True:
                try:
                    new = await other.claim("s", at=2.0)
                    break
                except LeaseHeldError:
                    await WORLD.sleep(0.01)
        relay.is_up = True
        assert store._opened is not None
        await store._opened.lock.number()
        with pytest.raises(LeaseLostError):
            await append(store, b"a", expected=0, epoch=epochs[0])
        assert await append(other, b"a", expected=0, epoch=new) == 1
        assert await append(store, b"b", expected=0, epoch=epochs[1], session="t") == 1
        await store.close()


async def test_a_node_without_a_heartbeat_for_a_lease_counts_as_frozen(
    engine: object, place: PostgresPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = PostgresPlace(place.engine, lease_s=0.5)
    async with open_store(quick) as one, open_store(quick) as other:
        assert isinstance(one, PostgresStore)
        assert isinstance(other, PostgresStore)
        epoch = await one.claim("s", at=1.0)
        await _until_peers(other, 1)
        assert one._opened is not None
        one._opened.lock._tasks[0].cancel()  # It sends no more heartbeats, and holds its lock.
        await one._opened.lock._heartbeat_thread.close()
        assert other._opened is not None
        neighbours = other._opened._neighbours
        async with asyncio.timeout(60):
            while not neighbours.frozen:
                await neighbours.look()
                await WORLD.sleep(0.02)
        new = await other.claim("s", at=2.0)
        with pytest.raises(LeaseLostError):
            await append(one, b"late", expected=0, epoch=epoch)
        assert await append(other, b"a", expected=0, epoch=new) == 1


async def test_other_nodes_have_time_to_rejoin_after_all_lost_their_connections(
    place: PostgresPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_store(place) as one:
        assert isinstance(one, PostgresStore)
        dead = place.store()
        await dead.open()
        await dead.claim("s", at=1.0)
        await _until_peers(one, 1)
        assert one._opened is not None
        one._opened._neighbours.protect()
        place.kill(dead)
        with pytest.raises(LeaseHeldError):
            await one.claim("s", at=2.0)
        one._opened._neighbours.protect_for_a_while()
        with pytest.raises(LeaseHeldError):
            await one.claim("s", at=2.0)
        one._opened._neighbours._protected_until = 0.0
        assert await one.claim("s", at=2.0) == 2


def test_a_lease_has_several_heartbeats() -> None:
    assert node_locks.BEATS_PER_LEASE > 3


def _batch(epoch: int, mark: SessionListing) -> Batch:
    return Batch([b"x"], 0, epoch, Sync.FULL, mark)


async def _orphans(store: object) -> tuple[str, ...]:
    async with asyncio.timeout(60):
        while not (orphans := (await store.watch({})).orphans):  # type: ignore[attr-defined]
            pass
    return orphans  # type: ignore[no-any-return]


async def test_a_waiting_node_does_not_prevent_the_cleanup_of_old_rows(place: PostgresPlace) -> None:
    async with open_store(place) as one, open_store(place) as other:
        assert isinstance(one, PostgresStore)
        assert isinstance(other, PostgresStore)
        await _until_peers(one, 1)
        await _until_peers(other, 1)
        assert one._opened is not None
        pool = one._opened.pool

        async def until(question: str, *values: object) -> None:
            async with asyncio.timeout(60):
                while not await pool.run(lambda db, _: db.fetchval(question, *values)):
                    await WORLD.sleep(0.01)

        waiting = (
            "from pg_locks join pg_stat_activity using (pid) where locktype = 'advisory' and not granted"
        )
        ours = "and classid = $1::regnamespace::oid"
        await until(f"select count(*) = 2 {waiting} {ours}", place.schema)
        now = await pool.run(lambda db, _: db.fetchval("select pg_current_xact_id()::text::bigint"))
        await until(
            f"select count(*) = 2 {waiting} {ours} and backend_xmin::text::bigint > $2", place.schema, now
        )


class _FrozenServer:
    """A server whose new connection does not answer."""

    where = "store x"

    def __init__(self) -> None:
        self.address = SimpleNamespace(schema="s")
        self.has_asked = asyncio.Event()
        self.is_terminated = False

    async def connect_to_write(self, purpose: str) -> _FrozenServer:
        assert purpose == "node"
        return self

    async def fetchval(self, *_: object) -> None:
        self.has_asked.set()
        await asyncio.Event().wait()

    def terminate(self) -> None:
        self.is_terminated = True


async def test_a_cancelled_rejoin_leaves_no_connection() -> None:
    server = _FrozenServer()
    lock = AdvisoryLock(
        cast("Postgres", server), "us", WORLD, beat_s=1.0, on_lost=lambda: None, on_joined=lambda: None
    )
    joining = WORLD.spawn(lock._join_again(), name="join again")
    async with asyncio.timeout(60):
        await server.has_asked.wait()
    joining.cancel()
    await asyncio.wait([joining])
    assert (joining.cancelled(), server.is_terminated) == (True, True)
