"""`midstream.store.contract` as a test suite for stores.

Subclass `StoreContract` in a test file and give it a fixture `place`:

    class TestMyStore(StoreContract):
        @pytest.fixture
        def place(self, tmp_path: Path) -> Place:
            return MyPlace(tmp_path)

The tests of an ability run if the store declares it. The suite needs pytest and pytest-asyncio. A store's own tests
must check the rest: that `Sync.FULL` reaches the disk, and the behaviour with a full disk.
"""
# ruff: noqa: D102, PLR2004 - tests: names state what they check, and numbers need no names

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial

import pytest
from msgspec.structs import replace

from midstream.environment import World
from midstream.errors import (
    JournalMovedError,
    LeaseHeldError,
    LeaseLostError,
    UsageError,
)
from midstream.session.blobs import Blob
from midstream.session.records import Sync
from midstream.store.contract import (
    Batch,
    ForwardedCommand,
    News,
    SessionInfo,
    SessionListing,
    Store,
    StoredRecord,
)
from midstream.testing.immediate_store_contract import ImmediateContract
from midstream.testing.key_value_contract import KeyValueContract
from midstream.testing.link_contract import LinkContract
from midstream.testing.listing_contract import ListingContract
from midstream.testing.store_fakes import ODD_BODIES, ODD_NAMES, Storage, open_store

WORLD = World()
NEWS_S = 30.0
"""Seconds after which expected changes count as missing."""


class StoreContract(KeyValueContract, ImmediateContract, LinkContract, ListingContract):
    """Tests of your store. Define a fixture `place`, which returns a new place for one store."""

    pytestmark = pytest.mark.asyncio

    # --- journals

    async def test_records_are_numbered_from_one_without_gap(self, place: Storage) -> None:
        async with open_store(place) as store:
            epoch = await store.claim("s", at=1.0)
            assert await _append(store, "s", b"a", b"b", expected=0, epoch=epoch) == 2
            assert await _append(store, "s", b"c", expected=2, epoch=epoch) == 3
            assert await _journal(store) == [
                StoredRecord(1, epoch, b"a"),
                StoredRecord(2, epoch, b"b"),
                StoredRecord(3, epoch, b"c"),
            ]

    async def test_a_body_comes_back_byte_for_byte(self, place: Storage) -> None:
        async with open_store(place) as store:
            epoch = await store.claim("s", at=1.0)
            await _append(store, "s", *ODD_BODIES, expected=0, epoch=epoch)
            assert [record.body for record in await _journal(store)] == [*ODD_BODIES]

    async def test_a_session_may_have_any_name(self, place: Storage) -> None:
        async with open_store(place) as store:
            for name in ODD_NAMES:
                epoch = await store.claim(name, at=1.0)
                await _append(store, name, name.encode(), expected=0, epoch=epoch)
            for name in ODD_NAMES:
                assert [record.body for record in await _journal(store, name)] == [name.encode()]
            assert {line.session async for line in store.list()} == {*ODD_NAMES}

    @pytest.mark.parametrize("expected", [0, 1, 3, 2**40])
    async def test_an_append_elsewhere_than_at_the_end_writes_nothing(
        self, place: Storage, expected: int
    ) -> None:
        async with open_store(place) as store:
            epoch = await store.claim("s", at=1.0)
            await _append(store, "s", b"a", b"b", expected=0, epoch=epoch)
            before = await store.find("s")
            with pytest.raises(JournalMovedError):
                await _append(store, "s", b"c", expected=expected, epoch=epoch, mark=_mark(at=9.0))
            assert await store.find("s") == before
            assert [record.body for record in await _journal(store)] == [b"a", b"b"]

    async def test_of_two_appends_at_one_position_one_wins(self, place: Storage) -> None:
        async with open_store(place) as store:
            epoch = await store.claim("s", at=1.0)
            results = await asyncio.gather(
                *(_append(store, "s", body, expected=0, epoch=epoch) for body in (b"a", b"b")),
                return_exceptions=True,
            )
            won = results.index(1)
            assert isinstance(results[1 - won], JournalMovedError)
            assert [record.body for record in await _journal(store)] == [(b"a", b"b")[won]]

    async def test_appends_take_effect_in_the_order_of_their_calls(self, place: Storage) -> None:
        async with open_store(place) as store:
            epoch = await store.claim("s", at=1.0)
            ends = await asyncio.gather(
                *(_append(store, "s", b"%d" % number, expected=number, epoch=epoch) for number in range(50))
            )
            assert ends == [*range(1, 51)]
            assert [record.body for record in await _journal(store)] == [
                b"%d" % number for number in range(50)
            ]

    async def test_sessions_are_independent(self, place: Storage) -> None:
        async with open_store(place) as store:

            async def work(name: str) -> None:
                epoch = await store.claim(name, at=1.0)
                for number in range(10):
                    body = f"{name} {number}".encode()
                    await _append(store, name, body, expected=number, epoch=epoch)

            names = [f"s{number}" for number in range(20)]
            await asyncio.gather(*map(work, names))
            for name in names:
                assert [record.body.decode() for record in await _journal(store, name)] == [
                    f"{name} {number}" for number in range(10)
                ]

    async def test_a_refused_append_does_not_affect_concurrent_appends(self, place: Storage) -> None:
        async with open_store(place) as store:
            first, second = await store.claim("s", at=1.0), await store.claim("t", at=1.0)
            results = await asyncio.gather(
                _append(store, "s", b"a", expected=0, epoch=first),
                _append(store, "s", b"x", expected=7, epoch=first),
                _append(store, "t", b"x", expected=0, epoch=second + 1),
                _append(store, "t", b"b", expected=0, epoch=second),
                return_exceptions=True,
            )
            assert [type(result) for result in results] == [
                int,
                JournalMovedError,
                LeaseLostError,
                int,
            ]
            assert await _journal(store, "s") == [StoredRecord(1, first, b"a")]
            assert await _journal(store, "t") == [StoredRecord(1, second, b"b")]

    async def test_an_empty_append_returns_the_end(self, place: Storage) -> None:
        async with open_store(place) as store:
            epoch = await store.claim("s", at=1.0)
            await _append(store, "s", b"a", expected=0, epoch=epoch)
            assert await _append(store, "s", expected=1, epoch=epoch) == 1
            with pytest.raises(JournalMovedError):
                await _append(store, "s", expected=0, epoch=epoch)

    async def test_a_cancelled_append_happened_whole_or_not_at_all(self, place: Storage) -> None:
        async with open_store(place) as store:
            epoch = await store.claim("s", at=1.0)
            append = WORLD.spawn(_append(store, "s", b"a", b"b", expected=0, epoch=epoch), name="append")
            await WORLD.sleep(0)
            append.cancel()
            await asyncio.gather(append, return_exceptions=True)
            end = len(await _journal(store))
            try:
                assert await _append(store, "s", b"c", expected=end, epoch=epoch) == end + 1
            except (
                JournalMovedError
            ):  # it was under way when the journal was read; the matching append decides
                end = len(await _journal(store))
                assert await _append(store, "s", b"c", expected=end, epoch=epoch) == end + 1
            left = [b"a", b"b"] if end else []
            assert [each.body for each in await _journal(store)] == [*left, b"c"]

    # --- reading

    async def test_pruned_records_are_replaced_and_later_records_stay(self, place: Storage) -> None:
        async with open_store(place) as store:
            first = await store.claim("s", at=1.0)
            await _append(store, "s", b"a", b"b", expected=0, epoch=first)
            second = await store.claim("s", at=1.0)
            await _append(store, "s", b"c", b"d", expected=2, epoch=second)
            assert await store.prune("s", b"abc", position=3, epoch=second)
            left = [StoredRecord(3, second, b"abc"), StoredRecord(4, second, b"d")]
            assert await _journal(store) == left
            assert await store.read("s", after=2, limit=1) == left[:1]
            assert await store.read("s", after=3, limit=9) == left[1:]
            line = await store.find("s")
            assert line is not None
            assert (line.oldest, line.end, line.epoch) == (3, 4, second)
            assert await _append(store, "s", b"e", expected=4, epoch=second) == 5
            assert await store.prune("s", b"abcde", position=5, epoch=second)
            assert await _journal(store) == [StoredRecord(5, second, b"abcde")]
            assert await _append(store, "s", b"f", expected=5, epoch=second) == 6

    @pytest.mark.parametrize(("position", "epoch"), [(2, 9), (9, 0), (1, 0), (0, 0), (-1, 0)])
    async def test_a_prune_up_to_a_missing_record_is_refused(
        self, place: Storage, position: int, epoch: int
    ) -> None:
        async with open_store(place) as store:
            first = await store.claim("s", at=1.0)
            await _append(store, "s", b"a", b"b", b"c", expected=0, epoch=first)
            assert await store.prune("s", b"ab", position=2, epoch=first)
            before = await _journal(store)
            assert not await store.prune("s", b"x", position=position, epoch=first + epoch)
            assert not await store.prune("nobody", b"x", position=1, epoch=first)
            assert await _journal(store) == before

    async def test_pruning_does_not_disturb_the_node(self, place: Storage) -> None:
        async with open_store(place) as node, open_store(place) as other:
            epoch = await node.claim("s", at=1.0)
            await _append(node, "s", b"a", b"b", expected=0, epoch=epoch)
            blob = Blob("d", b"large")
            await node.append("s", Batch([b"c"], expected=2, epoch=epoch, sync=Sync.NORMAL, blobs=[blob]))
            assert await other.prune("s", b"abc", position=3, epoch=epoch)
            assert await _append(node, "s", b"d", expected=3, epoch=epoch) == 4
            assert await node.blob("s", "d") == b"large"
            assert await node.delete("s")
            assert not await other.prune("s", b"x", position=4, epoch=epoch)
            again = await node.claim("s", at=2.0)
            await _append(node, "s", b"e", expected=0, epoch=again)
            assert await _journal(other) == [StoredRecord(1, again, b"e")]

    async def test_an_unclaimed_session_reads_as_empty(self, place: Storage) -> None:
        async with open_store(place) as store:
            assert await store.read("s", after=0, limit=10) == []
            assert await store.find("s") is None

    async def test_reading_goes_on_after_any_position_and_stops_at_the_limit(self, place: Storage) -> None:
        async with open_store(place) as store:
            epoch = await store.claim("s", at=1.0)
            bodies = [b"%d" % number for number in range(1, 8)]
            await _append(store, "s", *bodies, expected=0, epoch=epoch)
            read = {
                (after, limit): [
                    record.position for record in await store.read("s", after=after, limit=limit)
                ]
                for after in range(9)
                for limit in (1, 3, 100)
            }
            assert read == {(after, limit): [*range(1, 8)][after : after + limit] for after, limit in read}

    async def test_appended_records_are_visible_at_once_in_every_store(self, place: Storage) -> None:
        async with open_store(place) as writer, open_store(place) as reader:
            epoch = await writer.claim("s", at=1.0)
            for number in range(5):
                await _append(writer, "s", b"x", expected=number, epoch=epoch, sync=Sync.NORMAL)
                assert len(await _journal(writer)) == number + 1
                assert await _journal(reader) == await _journal(writer)

    # --- nodes

    async def test_each_claim_raises_the_epoch_by_one(self, place: Storage) -> None:
        async with open_store(place) as store:
            epochs = [await store.claim("s", at=1.0) for _ in range(3)]
            assert epochs == [1, 2, 3]
            assert await store.claim("t", at=1.0) == 1

    async def test_appends_under_another_than_the_newest_epoch_write_nothing(self, place: Storage) -> None:
        async with open_store(place) as store:
            old = await store.claim("s", at=1.0)
            await _append(store, "s", b"a", expected=0, epoch=old)
            new = await store.claim("s", at=2.0)
            for epoch in (old, new + 1, 0):
                with pytest.raises(LeaseLostError):
                    await _append(store, "s", b"b", expected=1, epoch=epoch)
            assert await _append(store, "s", b"c", expected=1, epoch=new) == 2
            assert await _journal(store) == [StoredRecord(1, old, b"a"), StoredRecord(2, new, b"c")]

    async def test_an_append_to_an_unclaimed_session_is_refused(self, place: Storage) -> None:
        async with open_store(place) as store:
            with pytest.raises(LeaseLostError):
                await _append(store, "s", b"a", expected=0, epoch=1)
            assert await store.find("s") is None

    async def test_a_living_nodes_session_cannot_be_claimed(self, place: Storage) -> None:
        async with open_store(place) as one, open_store(place) as other:
            epoch = await one.claim("s", at=1.0)
            before = await one.find("s")
            with pytest.raises(LeaseHeldError):
                await other.claim("s", at=2.0)
            assert await other.find("s") == before
            assert await _append(one, "s", b"a", expected=0, epoch=epoch) == 1

    async def test_a_released_session_may_be_claimed_by_any_node(self, place: Storage) -> None:
        async with open_store(place) as one, open_store(place) as other:
            old = await one.claim("s", at=1.0)
            await _append(one, "s", b"a", expected=0, epoch=old)
            await one.release("s", epoch=old)
            new = await other.claim("s", at=2.0)
            assert new == old + 1
            with pytest.raises(LeaseLostError):
                await _append(one, "s", b"b", expected=1, epoch=old)
            assert await _append(other, "s", b"c", expected=1, epoch=new) == 2

    async def test_a_session_is_claimed_only_while_it_is_as_it_was_found(self, place: Storage) -> None:
        async with open_store(place) as one, open_store(place) as other:
            for is_free in (False, True):
                with pytest.raises(JournalMovedError):
                    await other.claim("s", at=1.0, is_free=is_free)
            assert await other.find("s") is None
            epoch = await one.claim("s", at=1.0)
            with pytest.raises(JournalMovedError):
                await other.claim("s", at=2.0, is_free=True)
            with pytest.raises(LeaseHeldError):
                await other.claim("s", at=2.0, is_free=False)
            epoch = await one.claim("s", at=2.0, is_free=False)
            await one.release("s", epoch=epoch)
            with pytest.raises(JournalMovedError):
                await other.claim("s", at=3.0, is_free=False)
            assert await other.claim("s", at=3.0, is_free=True) == epoch + 1

    async def test_a_release_under_an_older_epoch_has_no_effect(self, place: Storage) -> None:
        async with open_store(place) as one, open_store(place) as other:
            old = await one.claim("s", at=1.0)
            await one.claim("s", at=2.0)
            await one.release("s", epoch=old)
            with pytest.raises(LeaseHeldError):
                await other.claim("s", at=3.0)
            await one.release("no such session", epoch=1)

    async def test_closing_gives_up_every_session(self, place: Storage) -> None:
        async with open_store(place) as other:
            async with open_store(place) as one:
                epochs = [await one.claim(name, at=1.0) for name in ("s", "t")]
            assert [await other.claim(name, at=2.0) for name in ("s", "t")] == [epoch + 1 for epoch in epochs]

    async def test_a_dead_nodes_sessions_are_taken_over_with_all_they_hold(self, place: Storage) -> None:
        dead = place.store()
        await dead.open()
        old = await dead.claim("s", at=1.0)
        await _append(dead, "s", b"a", expected=0, epoch=old)
        await _append(dead, "s", b"b", expected=1, epoch=old, sync=Sync.NORMAL)
        await dead.claim("t", at=1.0)
        place.kill(dead)
        async with open_store(place) as heir:
            new = await heir.claim("s", at=2.0)
            assert new == old + 1
            assert await _journal(heir) == [StoredRecord(1, old, b"a"), StoredRecord(2, old, b"b")]
            assert await _append(heir, "s", b"c", expected=2, epoch=new) == 3
            await heir.claim("t", at=2.0)

    async def test_of_two_concurrent_claims_one_wins(self, place: Storage) -> None:
        async with open_store(place) as one, open_store(place) as other:
            results = await asyncio.gather(
                one.claim("s", at=1.0), other.claim("s", at=1.0), return_exceptions=True
            )
            assert sorted(type(result).__name__ for result in results) == ["LeaseHeldError", "int"]

    async def test_competing_stores_write_one_gapless_journal(self, place: Storage) -> None:
        async with open_store(place) as one, open_store(place) as other:

            async def fight(store: Store) -> None:
                for turn in range(5):
                    while True:
                        try:
                            epoch = await store.claim("s", at=float(turn))
                            break
                        except LeaseHeldError:
                            await WORLD.sleep(0)
                    end = len(await _journal(store))
                    await _append(store, "s", b"x", expected=end, epoch=epoch)
                    await store.release("s", epoch=epoch)

            await asyncio.wait_for(asyncio.gather(fight(one), fight(other)), timeout=20)
            journal = await _journal(one)
            assert [record.position for record in journal] == [*range(1, 11)]
            assert [record.epoch for record in journal] == [*range(1, 11)]

    # --- neighbours

    async def test_a_listing_shows_which_sessions_were_given_up(self, place: Storage) -> None:
        async with open_store(place) as store:
            epoch = await store.claim("s", at=1.0)
            line = SessionInfo("s", 0, epoch, 1.0, SessionListing(is_live=False, at=1.0))
            await store.release("s", epoch=epoch)
            assert await store.find("s") == replace(line, is_free=True)
            assert await _list(store) == [replace(line, is_free=True)]
            await store.claim("s", at=1.0)
            assert await store.find("s") == replace(line, epoch=epoch + 1)

    async def test_a_node_receives_the_number_of_other_nodes(self, place: Storage) -> None:
        async with open_store(place) as store:
            assert (await _watch(store)).peers == 0
            watching = WORLD.spawn(_watch(store), name="watch")
            async with open_store(place) as other:
                assert (await watching).peers == 1
                assert (await _watch(other)).peers == 1
            assert (await _watch(store)).peers == 0

    async def test_a_command_reaches_the_node_and_its_answer_the_sender(self, place: Storage) -> None:
        async with open_store(place) as node, open_store(place) as sender, open_store(place) as third:
            await node.claim("s", at=1.0)
            for body, answer in ((b"one", b"ok"), (b"\x00\xff", b"")):
                handed = WORLD.spawn(sender.forward("s", body), name="hand over")
                (forwarded,) = await _forwarded_commands(node, 1)
                assert (forwarded.session, forwarded.body) == ("s", body)
                await third.answer(forwarded.number, b"not his to answer")
                await node.answer(forwarded.number, answer)
                await node.answer(forwarded.number, b"again")
                async with asyncio.timeout(NEWS_S):
                    assert await handed == answer
            await node.answer(10**6, b"no such letter")

    async def test_a_session_is_held_elsewhere_only_while_another_living_node_has_it(
        self, place: Storage
    ) -> None:
        async with open_store(place) as node:
            async with open_store(place) as other:
                assert not await node.is_held_elsewhere("s"), "there is none"
                epoch = await other.claim("s", at=1.0)
                assert not await other.is_held_elsewhere("s")
                if await node.is_held_elsewhere("s"):  # stores may always return False
                    with pytest.raises(LeaseHeldError):
                        await node.claim("s", at=1.0)
                await other.release("s", epoch=epoch)
                assert not await node.is_held_elsewhere("s")
                await other.claim("s", at=1.0)
            async with asyncio.timeout(NEWS_S):
                while await node.is_held_elsewhere("s"):
                    await _watch(node)
            await node.claim("s", at=1.0)
            assert not await node.is_held_elsewhere("s")

    async def test_forwarded_commands_arrive_in_order_and_once(self, place: Storage) -> None:
        async with open_store(place) as node, open_store(place) as sender:
            await node.claim("s", at=1.0)
            handed = []
            for number in range(5):
                handed.append(WORLD.spawn(sender.forward("s", b"%d" % number), name="hand over"))
                await WORLD.sleep(0)
            forwarded_commands = await _forwarded_commands(node, 5)
            assert [forwarded.body for forwarded in forwarded_commands] == [
                b"%d" % number for number in range(5)
            ]
            for forwarded in forwarded_commands:
                await node.answer(forwarded.number, forwarded.body)
            async with asyncio.timeout(NEWS_S):
                assert await asyncio.gather(*handed) == [forwarded.body for forwarded in forwarded_commands]

    async def test_a_command_that_a_dead_node_left_goes_to_the_next_node(self, place: Storage) -> None:
        async with open_store(place) as sender, open_store(place) as heir:
            dead = place.store()
            await dead.open()
            await dead.claim("s", at=1.0)
            handed = WORLD.spawn(sender.forward("s", b"x"), name="hand over")
            (forwarded,) = await _forwarded_commands(dead, 1)
            place.kill(dead)
            assert await _forwarded_commands(heir, 1) == [forwarded]
            await heir.claim("s", at=2.0)
            assert await _forwarded_commands(heir, 1) == [forwarded], "again, under its own epoch"
            await heir.answer(forwarded.number, b"ok")
            async with asyncio.timeout(NEWS_S):
                assert await handed == b"ok"

    async def test_forwarded_commands_of_a_dead_sender_are_not_delivered(self, place: Storage) -> None:
        async with open_store(place) as node, open_store(place) as sender:
            await node.claim("s", at=1.0)
            dead = place.store()
            await dead.open()
            left = WORLD.spawn(dead.forward("s", b"x"), name="hand over")
            assert [forwarded.body for forwarded in await _forwarded_commands(node, 1)] == [b"x"]
            place.kill(dead)
            assert await node.claim("s", at=2.0) == 2
            handed = WORLD.spawn(sender.forward("s", b"y"), name="hand over")
            assert [forwarded.body for forwarded in await _forwarded_commands(node, 1)] == [b"y"]
            for each in (left, handed):
                each.cancel()
            await asyncio.gather(left, handed, return_exceptions=True)

    async def test_a_command_for_an_unclaimed_session_reaches_every_node(self, place: Storage) -> None:
        async with open_store(place) as one, open_store(place) as other:
            handed = WORLD.spawn(one.forward("new", b"x"), name="hand over")
            forwarded_commands = [(await _forwarded_commands(store, 1))[0] for store in (one, other)]
            assert forwarded_commands[0] == forwarded_commands[1]
            await one.answer(forwarded_commands[0].number, b"ok")
            async with asyncio.timeout(NEWS_S):
                assert await handed == b"ok"

    async def test_forwarded_commands_are_deleted_with_their_session(self, place: Storage) -> None:
        async with open_store(place) as one, open_store(place) as other:
            await one.claim("s", at=1.0)
            handed = WORLD.spawn(other.forward("s", b"x"), name="hand over")
            await _forwarded_commands(one, 1)
            await one.delete("s")
            handed.cancel()
            await asyncio.gather(handed, return_exceptions=True)
            sent = WORLD.spawn(other.forward("t", b"y"), name="hand over")
            assert [forwarded.body for forwarded in await _forwarded_commands(other, 1)] == [b"y"]
            sent.cancel()
            await asyncio.gather(sent, return_exceptions=True)

    async def test_a_watch_reports_a_followed_session_that_moved_or_was_deleted(self, place: Storage) -> None:
        async with open_store(place) as node, open_store(place) as follower:
            epoch = await node.claim("s", at=1.0)
            await _append(node, "s", b"a", expected=0, epoch=epoch)
            assert (await _wait_for_moved(follower, {"s": 0, "never": 0})) == {"s"}
            watching = WORLD.spawn(_wait_for_moved(follower, {"s": 1}), name="watch")
            await WORLD.sleep(0)
            await _append(node, "s", b"b", expected=1, epoch=epoch, sync=Sync.NORMAL)
            assert await watching == {"s"}
            assert (await _wait_for_moved(follower, {"s": 1})) == {"s"}, (
                "as long as the follower stays behind"
            )
            await node.delete("s")
            assert (await _wait_for_moved(follower, {"s": 2})) == {"s"}

    async def test_open_turns_of_a_dead_node_are_reported_to_living_nodes(self, place: Storage) -> None:
        async with open_store(place) as one, open_store(place) as other:
            dead = place.store()
            await dead.open()
            for name in ("open", "closed"):
                epoch = await dead.claim(name, at=1.0)
                mark = SessionListing(is_live=name == "open", at=1.0)
                await _append(dead, name, b"x", expected=0, epoch=epoch, mark=mark)
            watching = WORLD.spawn(_orphans(one), name="watch")
            await WORLD.sleep(0)
            place.kill(dead)
            assert await watching == ("open",)
            assert await _orphans(other) == ("open",)

    async def test_a_given_up_open_turn_is_reported_once_for_each_epoch(self, place: Storage) -> None:
        async with open_store(place) as one, open_store(place) as other:
            live = SessionListing(is_live=True, at=1.0)
            for number in range(3):
                epoch = await one.claim("s", at=1.0)
                await _append(one, "s", b"x", expected=number, epoch=epoch, mark=live)
                await one.release("s", epoch=epoch)
                assert await _orphans(other) == ("s",)
            watching = WORLD.spawn(_orphans(other), name="watch")
            epoch = await one.claim("t", at=1.0)
            await _append(one, "t", b"x", expected=0, epoch=epoch, mark=live)
            await one.release("t", epoch=epoch)
            assert await watching == ("t",)

    async def test_a_cancelled_watch_consumes_no_change(self, place: Storage) -> None:
        async with open_store(place) as one, open_store(place) as other:
            await one.claim("s", at=1.0)
            handed = WORLD.spawn(other.forward("s", b"x"), name="hand over")
            for _ in range(20):
                watching = WORLD.spawn(one.watch({}), name="watch")
                await WORLD.sleep(0)
                await other.find("s")
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
                if not watching.cancelled():
                    break
            else:
                assert [forwarded.body for forwarded in await _forwarded_commands(one, 1)] == [b"x"]
            handed.cancel()
            await asyncio.gather(handed, return_exceptions=True)

    # --- listings

    async def test_a_new_session_is_listed_with_an_empty_mark(self, place: Storage) -> None:
        async with open_store(place) as store:
            epoch = await store.claim("s", at=7.5)
            line = SessionInfo("s", 0, epoch, 7.5, SessionListing(is_live=False, at=7.5))
            assert await store.find("s") == line
            assert await _list(store) == [line]

    async def test_a_mark_is_written_with_its_append(self, place: Storage) -> None:
        async with open_store(place) as store:
            epoch = await store.claim("s", at=1.0)
            mark = SessionListing(is_live=True, at=2.0, title="Hello", turns=1, status="running")
            await _append(store, "s", b"a", expected=0, epoch=epoch, mark=mark)
            assert await store.find("s") == SessionInfo("s", 1, epoch, 1.0, mark, oldest=1)

            await _append(store, "s", b"b", expected=1, epoch=epoch)
            assert await store.find("s") == SessionInfo("s", 2, epoch, 1.0, mark, oldest=1)

            ended = SessionListing(is_live=False, at=3.0, turns=1, status="completed")
            await _append(store, "s", b"c", expected=2, epoch=epoch, mark=ended)
            kept = SessionListing(is_live=False, at=3.0, title="Hello", turns=1, status="completed")
            assert await store.find("s") == SessionInfo("s", 3, epoch, 1.0, kept, oldest=1)

    # --- deleting

    async def test_a_deleted_session_leaves_nothing(self, place: Storage) -> None:
        async with open_store(place) as store:
            for name in ("s", "t"):
                epoch = await store.claim(name, at=1.0)
                await _append(store, name, name.encode(), expected=0, epoch=epoch)
            assert await store.delete("s")
            assert await store.find("s") is None
            assert await _journal(store) == []
            assert [line.session for line in await _list(store)] == ["t"]
            assert [record.body for record in await _journal(store, "t")] == [b"t"]
            assert not await store.delete("s")

    async def test_a_living_nodes_session_cannot_be_deleted(self, place: Storage) -> None:
        async with open_store(place) as one, open_store(place) as other:
            epoch = await one.claim("s", at=1.0)
            await _append(one, "s", b"a", expected=0, epoch=epoch)
            with pytest.raises(LeaseHeldError):
                await other.delete("s")
            assert len(await _journal(one)) == 1
            await one.release("s", epoch=epoch)
            assert await other.delete("s")

    async def test_the_parts_of_a_session_are_deleted_with_it_all_or_none(self, place: Storage) -> None:
        async with open_store(place) as one, open_store(place) as other:
            names = ("s", "s::1.1.0", "s::1.1.0::2.1.0", "s:", "s:x", "s:;", "s;", "st", "r::1")
            for name in names:
                epoch = await one.claim(name, at=1.0)
                await _append(one, name, b"a", expected=0, epoch=epoch)
                await one.release(name, epoch=epoch)
            held = await other.claim("s::1.1.0::2.1.0", at=2.0)
            with pytest.raises(LeaseHeldError) as refused:
                await one.delete("s")
            assert refused.value.session == "s::1.1.0::2.1.0"
            assert len(await _list(one)) == len(names)
            await other.release("s::1.1.0::2.1.0", epoch=held)
            assert await one.delete("s")
            assert {line.session for line in await _list(one)} == {*names[3:]}
            assert await _journal(one, "s::1.1.0") == []
            assert await other.claim("s::1.1.0::2.1.0", at=3.0) > held

    async def test_older_epochs_cannot_append_to_a_recreated_session(self, place: Storage) -> None:
        async with open_store(place) as one, open_store(place) as other:
            old = await one.claim("s", at=1.0)
            await one.release("s", epoch=old)
            await other.delete("s")
            new = await other.claim("s", at=2.0)
            assert new > old
            with pytest.raises(LeaseLostError):
                await _append(one, "s", b"a", expected=0, epoch=old)
            assert await _append(other, "s", b"b", expected=0, epoch=new) == 1

    # --- opening and closing

    # --- blobs

    async def test_a_blob_comes_back_byte_for_byte_and_belongs_to_its_session(self, place: Storage) -> None:
        async with open_store(place) as store:
            for name in ("s", "t"):
                await store.claim(name, at=1.0)
            blob = Blob("d" * 64, b"\x00\xff" * 50_000)
            await store.append("s", Batch([b"a"], expected=0, epoch=1, sync=Sync.FULL, blobs=[blob]))
            assert await store.blob("s", blob.digest) == blob.body
            assert await store.blob("t", blob.digest) is None
            assert await store.blob("s", "e" * 64) is None
            assert [await store.blob_digests(name) for name in ("s", "t", "nobody")] == [
                [blob.digest],
                [],
                [],
            ]
            assert await store.blob("nobody", blob.digest) is None

    async def test_a_blob_is_appended_with_its_record_or_not_at_all(self, place: Storage) -> None:
        async with open_store(place) as store:
            await store.claim("s", at=1.0)
            blob = Blob("d" * 64, b"whole")
            with pytest.raises(JournalMovedError):
                await store.append("s", Batch([b"a"], expected=7, epoch=1, sync=Sync.FULL, blobs=[blob]))
            with pytest.raises(LeaseLostError):
                await store.append("s", Batch([b"a"], expected=0, epoch=2, sync=Sync.FULL, blobs=[blob]))
            assert await store.blob("s", blob.digest) is None

    async def test_an_existing_blob_is_left_unchanged(self, place: Storage) -> None:
        async with open_store(place) as store:
            await store.claim("s", at=1.0)
            blob = Blob("d" * 64, b"whole")
            for number in range(2):
                await store.append(
                    "s", Batch([b"a"], expected=number, epoch=1, sync=Sync.NORMAL, blobs=[blob, blob])
                )
            assert await store.blob("s", blob.digest) == b"whole"
            assert len(await _journal(store)) == 2

    async def test_blobs_are_deleted_with_their_session_only(self, place: Storage) -> None:
        async with open_store(place) as store:
            blob = Blob("d" * 64, b"whole")
            for name in ("s", "t"):
                await store.claim(name, at=1.0)
                await store.append(name, Batch([b"a"], expected=0, epoch=1, sync=Sync.FULL, blobs=[blob]))
            assert await store.delete("s")
            await store.claim("s", at=2.0)
            assert await store.blob("s", blob.digest) is None
            assert await store.blob("t", blob.digest) == b"whole"

    async def test_a_seal_is_kept_with_its_append_unless_the_store_has_its_own(self, place: Storage) -> None:
        async with open_store(place) as store:
            epoch = await store.claim("s", at=1.0)
            append = partial(_append, store, "s", b"a", epoch=epoch)
            try:
                await append(expected=0, seal=b"one")
            except UsageError:
                assert await store.find("s") == SessionInfo(
                    "s", 0, epoch, 1.0, SessionListing(is_live=False, at=1.0)
                )
                return
            await append(expected=1)
            line = SessionInfo("s", 2, epoch, 1.0, SessionListing(is_live=False, at=1.0), oldest=1)
            assert await store.find("s") == replace(line, seal=b"one")
            assert await _list(store) == [line]
            await append(expected=2, seal=b"two")
            assert await store.find("s") == replace(line, end=3, seal=b"two")

    async def test_opening_and_closing_twice_is_harmless(self, place: Storage) -> None:
        store = place.store()
        await store.close()
        await store.open()
        epoch = await store.claim("s", at=1.0)
        await store.open()
        await _append(store, "s", b"a", expected=0, epoch=epoch)
        await store.close()
        await store.close()

    async def test_a_closed_store_refuses_and_may_be_opened_again(self, place: Storage) -> None:
        store = place.store()
        with pytest.raises(UsageError):
            await store.claim("s", at=1.0)
        await store.open()
        epoch = await store.claim("s", at=1.0)
        await _append(store, "s", b"a", expected=0, epoch=epoch)
        await store.close()
        with pytest.raises(UsageError):
            await store.read("s", after=0, limit=1)
        await store.open()
        assert await _journal(store) == [StoredRecord(1, epoch, b"a")]
        assert await store.claim("s", at=2.0) == epoch + 1
        await store.close()

    async def test_closing_finishes_pending_operations(self, place: Storage) -> None:
        store = place.store()
        await store.open()
        epoch = await store.claim("s", at=1.0)
        appends = []
        for number in range(20):  # some are being committed, others wait
            append = _append(store, "s", b"x", expected=number, epoch=epoch)
            appends.append(WORLD.spawn(append, name="append"))
            await WORLD.sleep(0)
        await store.close()
        assert await asyncio.gather(*appends) == [*range(1, 21)]
        async with open_store(place) as again:
            assert len(await _journal(again)) == 20


async def _append(
    store: Store,
    session: str,
    *bodies: bytes,
    expected: int,
    epoch: int,
    sync: Sync = Sync.FULL,
    mark: SessionListing | None = None,
    seal: bytes = b"",
) -> int:
    return await store.append(session, Batch(bodies, expected, epoch, sync, mark, seal=seal))


async def _journal(store: Store, session: str = "s") -> list[StoredRecord]:
    return await store.read(session, after=0, limit=1000)


async def _list(store: Store, *, live: bool | None = None) -> list[SessionInfo]:
    return [line async for line in store.list(live=live)]


async def _watch(store: Store, followed: Mapping[str, int] | None = None) -> News:
    async with asyncio.timeout(NEWS_S):
        return await store.watch(followed or {})


async def _forwarded_commands(store: Store, count: int) -> list[ForwardedCommand]:
    """Watch until so many forwarded commands have come."""
    forwarded_commands: list[ForwardedCommand] = []
    while len(forwarded_commands) < count:
        forwarded_commands += (await _watch(store)).forwarded_commands
    return forwarded_commands


async def _orphans(store: Store) -> tuple[str, ...]:
    """Watch until orphans are reported."""
    while True:
        if orphans := (await _watch(store)).orphans:
            return orphans


async def _wait_for_moved(store: Store, followed: Mapping[str, int]) -> frozenset[str]:
    """Watch until a followed session has moved."""
    while True:
        if moved := (await _watch(store, followed)).moved:
            return moved


def _mark(*, at: float) -> SessionListing:
    return SessionListing(is_live=False, at=at)
