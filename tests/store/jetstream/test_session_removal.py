"""Deletions: their leftovers, and unfinished ones."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from midstream.environment import World
from midstream.session.blobs import Blob
from midstream.session.records import Sync
from midstream.store.contract import PRINCIPAL_OF, Batch
from midstream.store.jetstream import JetStreamStore
from midstream.store.jetstream.entry_writes import spend
from midstream.store.jetstream.jetstream_link import SubjectWrite
from midstream.store.jetstream.journal_messages import encode
from midstream.store.jetstream.journal_writes import line_of
from tests.store.jetstream.jetstream_places import JetStreamPlace
from tests.store.stores import append, bodies

WORLD = World()
LARGE = [bytes([number]) * 400_000 for number in range(8)]


@pytest.mark.parametrize("is_finished_by", ["a claim", "a deletion"])
async def test_an_unfinished_deletion_counts_as_a_deletion(
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
        SubjectWrite(where.journal, encode(gone), newest.seq),
    ]
    await opened.link.commit(where.stream, writes)  # The process died here, before it removed anything.

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


async def test_a_session_with_more_parts_than_a_batch_is_deleted_completely(store: JetStreamStore) -> None:
    names = ["s", *(f"s::1.{number}.0" for number in range(160))]
    for name in (*names, "other"):
        await store.claim(name, at=1.0)
    assert await store.delete("s")
    assert [line.session async for line in store.list()] == ["other"]
    assert not await store.delete("s")
