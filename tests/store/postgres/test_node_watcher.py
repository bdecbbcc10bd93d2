"""Changes by other nodes are found by their notification, and without one."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from midstream.environment import World
from midstream.session.records import Sync
from midstream.store.contract import News, Store
from midstream.store.postgres import PostgresStore, node_watcher
from midstream.store.postgres.command_inbox import PutCommand
from midstream.store.postgres.node_signals import Kind, Listener, Signal
from midstream.store.postgres.node_watcher import FIND_ORPHANS
from midstream.testing.store_fakes import open_store
from tests.store.postgres.postgres_places import PostgresPlace
from tests.store.stores import append

WORLD = World()
# Sessions with open turns at a node.
ADD_LIVE = """
insert into session (name, epoch, era, node, created_at, changed_at, is_live)
select 's' || number, 1, 0, $1, 1, number, true from generate_series(1, $2) as number
"""


async def _moved(store: PostgresStore, followed: dict[str, int]) -> News:
    async with asyncio.timeout(60):
        while not (news := await store.watch(followed)).moved:
            pass
    return news


@pytest.mark.parametrize("are_lost", [False, True])
async def test_the_end_of_a_followed_journal_is_found(place: PostgresPlace, are_lost: bool) -> None:  # noqa: FBT001
    async with open_store(place) as one, open_store(place) as other:
        assert isinstance(one, PostgresStore)
        assert isinstance(other, PostgresStore)
        assert one._opened is not None
        epoch = await one.claim("s", at=1.0)
        await other.watch({})  # It has found its peer.
        if are_lost:
            one._opened.notifier._followed.select = lambda _: {}  # type: ignore[assignment]
        following = WORLD.spawn(_moved(other, {"s": 0}), name="watch")
        await WORLD.sleep(0.02)
        await append(one, b"a", expected=0, epoch=epoch, sync=Sync.NORMAL)
        assert (await following).moved == {"s"}


@asynccontextmanager
async def _two_nodes(place: PostgresPlace) -> AsyncIterator[tuple[PostgresStore, PostgresStore, int]]:
    """Open a node that has the session `s`, and another one; yield both, and the epoch."""
    async with open_store(place) as one, open_store(place) as other, asyncio.timeout(60):
        assert isinstance(one, PostgresStore)
        assert isinstance(other, PostgresStore)
        epoch = await one.claim("s", at=1.0)
        await other.watch({})  # It has found its peer.
        yield one, other, epoch


def _listener(store: PostgresStore) -> Listener:
    assert store._opened is not None
    return store._opened._listener


def _record(monkeypatch: pytest.MonkeyPatch, listener: Listener) -> list[Signal]:
    """Return a list to which all later signals are added."""
    received: list[Signal] = []
    take = listener._on_signal

    def record(signal: Signal) -> None:
        received.append(signal)
        take(signal)

    monkeypatch.setattr(listener, "_on_signal", record)
    return received


async def _follows(received: list[Signal]) -> None:
    """Wait until an announcement was received."""
    while not any(signal.follows for signal in received):
        await WORLD.sleep(0.001)


async def test_only_followed_journals_are_reported_and_at_once(
    place: PostgresPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _two_nodes(place) as (one, other, epoch):
        assert one._opened is not None
        received = _record(monkeypatch, _listener(other))
        monkeypatch.setattr(node_watcher, "BACKSTOP_S", 1000.0)
        for number in range(20):
            await append(one, b"a", expected=number, epoch=epoch, sync=Sync.NORMAL)
        one._opened.notifier.report(Kind.FREE)  # Sent together with earlier ones.
        while not any(signal.by == one._opened.notifier._node and signal.kinds for signal in received):
            await WORLD.sleep(0.001)
        assert not any(signal.moved for signal in received), "nobody followed it"
        for number in range(20, 25):
            following = WORLD.spawn(_moved(other, {"s": number}), name="watch")
            await append(one, b"a", expected=number, epoch=epoch, sync=Sync.NORMAL)
            assert (await following).moved == {"s"}
        assert any(signal.moved for signal in received)


async def test_an_end_from_before_an_announcement_is_reported_with_it(
    place: PostgresPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _two_nodes(place) as (one, other, epoch):
        monkeypatch.setattr(node_watcher, "BACKSTOP_S", 1000.0)
        # The announcement is under way when the journal is appended to.
        held: list[Signal] = []
        take = _listener(one)._on_signal
        monkeypatch.setattr(_listener(one), "_on_signal", held.append)
        following = WORLD.spawn(_moved(other, {"s": 0}), name="watch")
        await _follows(held)
        await append(one, b"a", expected=0, epoch=epoch, sync=Sync.NORMAL)
        assert not following.done()
        for signal in held:
            take(signal)
        assert (await following).moved == {"s"}


async def test_a_node_that_missed_announcements_receives_them_again(
    place: PostgresPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _two_nodes(place) as (one, other, epoch):
        monkeypatch.setattr(node_watcher, "BACKSTOP_S", 1000.0)
        missed: list[Signal] = []
        listener = _listener(one)
        with monkeypatch.context() as patch:
            patch.setattr(listener, "_on_signal", missed.append)
            following = WORLD.spawn(_moved(other, {"s": 0}), name="watch")
            await _follows(missed)
        received = _record(monkeypatch, listener)
        (await listener._link.connection()).terminate()  # So the announcement was lost.
        await _follows(received)
        await append(one, b"a", expected=0, epoch=epoch, sync=Sync.NORMAL)
        assert (await following).moved == {"s"}


async def _forwarded(store: PostgresStore) -> int:
    while not (commands := (await store.watch({})).forwarded_commands):
        pass
    return commands[0].number


async def test_an_answer_that_arrives_during_a_read_of_answers_is_found(
    place: PostgresPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_store(place) as one, open_store(place) as other, asyncio.timeout(60):
        assert isinstance(one, PostgresStore)
        assert isinstance(other, PostgresStore)
        assert one._opened is not None
        await other.claim("s", at=1.0)
        watcher = one._opened.watcher
        settle = watcher._settle_answers
        is_answered = False

        async def settle_and_be_answered() -> None:
            nonlocal is_answered
            await settle()
            if not is_answered:
                is_answered = True
                await other.answer(await _forwarded(other), b"done")
                watcher.note(Kind.ANSWERS)  # The signal of that answer, which comes once.
                monkeypatch.setattr(watcher, "note", lambda *_: None)

        monkeypatch.setattr(watcher, "_settle_answers", settle_and_be_answered)
        monkeypatch.setattr(node_watcher, "BACKSTOP_S", 1000.0)
        await one.watch({})  # It has found its peer.
        watching = WORLD.spawn(one.watch({}), name="watch")
        forwarding = WORLD.spawn(one.forward("s", b"do it"), name="forward")
        while not watcher._awaited:
            await WORLD.sleep(0)
        watcher.note(Kind.ANSWERS)  # Of another command.
        assert await forwarding == b"done"
        watching.cancel()
        await asyncio.wait({watching})


async def test_an_answer_that_arrives_before_its_command_is_awaited_is_found(
    place: PostgresPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_store(place) as one, open_store(place) as other, asyncio.timeout(20):
        assert isinstance(one, PostgresStore)
        assert isinstance(other, PostgresStore)
        assert one._opened is not None
        inbox, watcher = one._opened.inbox, one._opened.watcher
        await other.claim("s", at=1.0)
        await one.watch({})  # It has found its peer.
        monkeypatch.setattr(node_watcher, "BACKSTOP_S", 1000.0)
        put = inbox.put

        async def put_and_be_answered(session: str, body: bytes) -> PutCommand:
            command = await put(session, body)
            reported = watcher.answers_reported
            await other.answer(command.number, b"done")
            while watcher.answers_reported == reported:
                await WORLD.sleep(0.001)
            return command

        monkeypatch.setattr(inbox, "put", put_and_be_answered)
        assert await one.forward("s", b"do it") == b"done"


async def test_only_the_node_of_a_session_reads_its_commands_and_only_the_sender_the_answers(
    place: PostgresPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_store(place) as node, open_store(place) as sender, open_store(place) as third:
        looked: dict[str, set[Kind]] = {}
        for store in (node, sender, third):
            while (await store.watch({})).peers < 2:
                pass
        async with asyncio.timeout(20):
            await _until_quiet(node, sender, third)
            monkeypatch.setattr(node_watcher, "BACKSTOP_S", 1000.0)
            for name, store in (("node", node), ("sender", sender), ("third", third)):
                looked[name] = _record_looks(monkeypatch, store)
            await node.claim("s", at=1.0)
            forwarding = WORLD.spawn(sender.forward("s", b"do it"), name="forward")
            assert isinstance(node, PostgresStore)
            await node.answer(await _forwarded(node), b"done")
            assert await forwarding == b"done"
        assert looked == {"node": {Kind.INBOX}, "sender": {Kind.ANSWERS}, "third": set()}


async def _until_quiet(*stores: Store) -> None:
    """Wait until no signal of a start is under way."""
    for store in stores:
        assert isinstance(store, PostgresStore)
        assert store._opened is not None
        notifier = store._opened.notifier
        while notifier._sending is not None and not notifier._sending.done():
            await WORLD.sleep(0.001)
    await WORLD.sleep(0.1)


def _record_looks(monkeypatch: pytest.MonkeyPatch, store: Store) -> set[Kind]:
    """Record the later notifications of a node."""
    assert isinstance(store, PostgresStore)
    assert store._opened is not None
    watcher, kinds = store._opened.watcher, set[Kind]()
    note = watcher.note

    def record(*noted: Kind) -> None:
        kinds.update(noted)
        note(*noted)

    monkeypatch.setattr(watcher, "note", record)
    return kinds


async def test_a_signal_without_a_change_wakes_no_watcher(store: PostgresStore) -> None:
    assert store._opened is not None
    watcher = store._opened.watcher
    await store.watch({})
    watching = WORLD.spawn(store.watch({"s": 0, "t": 0}), name="watch")
    await WORLD.sleep(0.05)
    for _ in range(3):
        watcher.note_all()
        await WORLD.sleep(0.02)
    assert not watching.done()
    epoch = await store.claim("s", at=1.0)
    await append(store, b"a", expected=0, epoch=epoch)
    watcher.note_all()
    async with asyncio.timeout(60):
        assert (await watching).moved == {"s"}


async def test_the_search_for_orphans_does_not_read_the_turns_of_living_nodes(store: PostgresStore) -> None:
    assert store._opened is not None
    pool, node = store._opened.pool, store._opened.lock.last_number
    await pool.run(lambda db, _: db.execute(ADD_LIVE, node, 20_000))
    await pool.run(lambda db, _: db.execute("vacuum analyze session"))
    rows = await pool.run(lambda db, _: db.fetch(f"explain (analyze, buffers) {FIND_ORPHANS}", []))
    plan = "\n".join(row[0] for row in rows).partition("Planning:")[0]
    pages = max(
        int(hit) + int(read or 0) for hit, read in re.findall(r"shared hit=(\d+)(?: read=(\d+))?", plan)
    )
    assert pages < 50  # The table has some 300.
    async with asyncio.timeout(60):
        await pool.run(lambda db, _: db.execute("update session set node = null where name = 's7'"))
        watching = WORLD.spawn(store.watch({}), name="watch")
        store._opened.report(Kind.FREE)
        while not (news := await watching).orphans:
            watching = WORLD.spawn(store.watch({}), name="watch")
        assert news.orphans == ("s7",)


async def test_closing_a_store_cancels_its_waiters(place: PostgresPlace) -> None:
    store = place.store()
    await store.open()
    forwarding = WORLD.spawn(store.forward("s", b"x"), name="forward")
    async with asyncio.timeout(60):
        while not (await store.watch({})).forwarded_commands:
            pass
    waits = [WORLD.spawn(store.watch({}), name="watch"), forwarding]
    await WORLD.sleep(0)
    await store.close()
    results = await asyncio.gather(*waits, return_exceptions=True)
    assert [type(each) for each in results] == [asyncio.CancelledError] * 2
    async with open_store(place) as again:
        assert isinstance(again, PostgresStore)
        assert again._opened is not None
        assert await again._opened.pool.run(lambda db, _: db.fetchval("select count(*) from inbox")) == 0
