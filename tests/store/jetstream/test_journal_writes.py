"""Writes whose answer was lost, large ones, and deletions that a process did not finish."""

from __future__ import annotations

import asyncio
import gc

import pytest
from msgspec.structs import replace

from midstream.environment import World
from midstream.errors import JournalMovedError, LeaseLostError, StoreBusyError, UsageError
from midstream.session.blobs import Blob
from midstream.session.records import Sync
from midstream.store.contract import PRINCIPAL_OF, Batch, SessionListing
from midstream.store.jetstream import JetStreamStore
from midstream.store.jetstream.entry_writes import spend
from midstream.store.jetstream.jetstream_link import Write
from midstream.store.jetstream.journal_messages import encode
from midstream.store.jetstream.journal_writes import line_of
from tests.store.jetstream.places import JetStreamPlace
from tests.store.jetstream.relay import LEFT_TO_THE_COLLECTOR, NatsRelay
from tests.store.stores import append, bodies

WORLD = World()
LARGE = [bytes([number]) * 400_000 for number in range(8)]


@pytest.mark.parametrize("has_mark", [False, True])
async def test_an_append_whose_answer_was_lost_is_not_repeated(
    place: JetStreamPlace, *, has_mark: bool
) -> None:
    async with NatsRelay(place).serving() as relay:
        store = JetStreamStore(relay.url)
        await store.open()
        epoch = await store.claim("s", at=1.0)
        for number in range(3):
            relay.swallow_after = body = b"body %d" % number
            mark = SessionListing(is_live=False, at=1.0, turns=number) if has_mark else None
            assert await store.append("s", Batch([body], number, epoch, Sync.FULL, mark)) == number + 1
        assert relay.swallowed == 3
        assert await bodies(store) == [b"body 0", b"body 1", b"body 2"]
        await store.close()


async def test_claims_and_entries_whose_answers_were_lost_happen_once(place: JetStreamPlace) -> None:
    async with NatsRelay(place).serving() as relay:
        store = JetStreamStore(relay.url)
        await store.open()
        relay.swallow_after = b"the session"
        assert await store.claim("the session", at=1.0) == 1
        assert await store.claim("the session", at=1.0) == 2
        relay.swallow_after = b"the value"
        assert await store.kv_put("pool", "k", b"the value", expected=0, at=1.0) == 1
        assert await store.kv_put("pool", "k", b"another", expected=1, at=2.0) == 2
        assert relay.swallowed == 2
        await store.close()


async def test_an_append_whose_answer_was_lost_is_fenced_by_another_node(
    place: JetStreamPlace, store: JetStreamStore
) -> None:
    async with NatsRelay(place).serving() as relay:
        slow = JetStreamStore(relay.url)
        await slow.open()
        epoch = await slow.claim("s", at=1.0)
        await append(slow, b"a", expected=0, epoch=epoch)
        await slow.release("s", epoch=epoch)
        assert await store.claim("s", at=2.0) == epoch + 1
        await append(store, b"b", expected=1, epoch=epoch + 1)
        with pytest.raises(LeaseLostError):
            await append(slow, b"late", expected=1, epoch=epoch)
        assert await bodies(store) == [b"a", b"b"]
        await slow.close()


@LEFT_TO_THE_COLLECTOR
async def test_nothing_is_written_while_the_connection_is_lost(place: JetStreamPlace) -> None:
    async with NatsRelay(place).serving() as relay:
        store = JetStreamStore(relay.url)
        await store.open()
        epoch = await store.claim("s", at=1.0)
        relay.is_up = False
        relay.cut()
        async with asyncio.timeout(10):
            while store._opened is not None and store._opened.link.is_connected:
                await WORLD.sleep(0)
        with pytest.raises(StoreBusyError):
            await append(store, b"a", expected=0, epoch=epoch)
        relay.is_up = True
        async with asyncio.timeout(10):
            while True:
                try:
                    await append(store, b"b", expected=0, epoch=epoch)
                    break
                except StoreBusyError:
                    await WORLD.sleep(0)
        assert await bodies(store) == [b"b"]
        await store.close()
    gc.collect()


async def test_an_append_that_is_larger_than_a_message_is_whole(store: JetStreamStore) -> None:
    epoch = await store.claim("s", at=1.0)
    await append(store, b"first", expected=0, epoch=epoch)
    await append(store, *LARGE, expected=1, epoch=epoch)
    await append(store, b"last", expected=9, epoch=epoch)
    assert await bodies(store) == [b"first", *LARGE, b"last"]
    assert [each.position for each in await store.read("s", after=4, limit=3)] == [5, 6, 7]
    with pytest.raises(JournalMovedError):
        await append(store, *LARGE, expected=1, epoch=epoch)


async def test_a_large_fold_a_large_entry_and_a_large_blob_are_whole(store: JetStreamStore) -> None:
    epoch = await store.claim("s", at=1.0)
    large = b"".join(LARGE)
    await store.append("s", Batch([b"a", b"b"], 0, epoch, Sync.FULL, blobs=[Blob("d", large)]))
    assert await store.blob("s", "d") == large
    for body in (large, b"small"):
        assert await store.prune("s", body, position=2, epoch=epoch)
        assert await bodies(store) == [body]
    for version, body in enumerate((large, b"small", large)):
        assert await store.kv_put("pool", "k", body, expected=version, at=1.0) == version + 1
        assert [entry.body for entry in await store.kv_list("pool")] == [body]
    assert await store.kv_delete("pool", "k", expected=3)


async def test_a_long_journal_is_read_from_any_position(place: JetStreamPlace, store: JetStreamStore) -> None:
    epoch = await store.claim("s", at=1.0)
    for start in range(0, 3000, 3):
        await append(store, *(b"%d" % (start + each) for each in range(3)), expected=start, epoch=epoch)
    other = place.store()  # it has read nothing yet
    await other.open()
    for after in (0, 1, 1499, 2500, 2998, 2999):
        found = await other.read("s", after=after, limit=2)
        assert [each.body for each in found] == [b"%d" % each for each in range(after, min(after + 2, 3000))]
    assert await other.prune("s", b"folded", position=2000, epoch=epoch)
    assert (await other.read("s", after=0, limit=2))[1].body == b"2000"
    await other.close()


@pytest.mark.parametrize("is_finished_by", ["a claim", "a deletion"])
async def test_a_deletion_that_a_process_did_not_finish_is_one(
    place: JetStreamPlace, store: JetStreamStore, is_finished_by: str
) -> None:
    epoch = await store.claim("s", at=1.0)
    blob = Blob("d", b"secret")
    await store.append("s", Batch([b"secret"], 0, epoch, Sync.FULL, blobs=[blob]))
    await store.kv_put("pool", "k", b"1", expected=0, at=1.0)
    opened = store._opened
    assert opened is not None
    newest = await opened.reader.newest("s")
    assert newest is not None
    where = opened.presence._subjects.session("s")
    gone = replace(newest.head, node="", is_gone=True, op="of a dead process")
    writes = [
        *await spend(opened.reader, opened.presence._subjects, where.stream, epochs=epoch),
        line_of(where, gone),
        Write(where.journal, encode(gone), newest.seq),
    ]
    await opened.link.commit(where.stream, writes)  # and here it died, before it removed anything

    assert await store.find("s") is None
    assert await bodies(store) == []
    assert await store.blob("s", "d") is None
    assert [line.session async for line in store.list()] == []
    if is_finished_by == "a deletion":
        assert not await store.delete("s")
        assert await opened.link.subjects(where.stream, where.everything) == []
    other = place.store()
    await other.open()
    again = await other.claim("s", at=2.0)
    assert again > epoch
    assert await other.blob("s", "d") is None
    await append(other, b"new", expected=0, epoch=again)
    assert await bodies(store) == [b"new"]
    assert len(await opened.link.scan(where.stream, f"{where.subject}.b.>")) == 0, "what it had is removed"
    await other.close()


async def test_a_deleted_session_leaves_no_message(store: JetStreamStore) -> None:
    epoch = await store.claim("s", at=1.0)
    await store.kv_put(PRINCIPAL_OF, "s", b"x" * 400_000, expected=0, at=1.0)
    await store.append("s", Batch(LARGE, 0, epoch, Sync.FULL, blobs=[Blob("d", LARGE[0])]))
    await store.prune("s", LARGE[0], position=3, epoch=epoch)
    assert await store.delete("s")
    opened = store._opened
    assert opened is not None
    where = opened.presence._subjects.session("s")
    assert await opened.link.subjects(where.stream, where.everything) == []


async def test_a_body_that_is_no_bytes_is_refused(store: JetStreamStore) -> None:
    epoch = await store.claim("s", at=1.0)
    with pytest.raises(UsageError):
        await append(store, "text", expected=0, epoch=epoch)  # type: ignore[arg-type]
