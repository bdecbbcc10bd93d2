"""Copies between kinds of stores: complete, resumable, compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from midstream.errors import EventsLostError, StoreFullError, UsageError
from midstream.session.blobs import Blob, digest_of
from midstream.session.records import Sync
from midstream.store.contract import Batch, SessionInfo, SessionListing, Store, StoredRecord
from midstream.store.encryption.encrypted_store import encrypt_store
from midstream.store.guard.guarded_store import guard_store
from midstream.store.jetstream import JetStreamStore
from midstream.store.memory import Memory, MemoryStore
from midstream.store.postgres import PostgresStore
from midstream.store.sqlite import SQLiteStore
from midstream.store.store_copy import copy_store
from midstream.store.store_registry import copy_named, open_store, read_stored
from midstream.testing.store_fakes import FailingStore
from tests.nats_engine import NatsCluster
from tests.postgres_engine import Engine
from tests.store.keys import keys_in


async def _filled() -> MemoryStore:
    """Return a store with a session of three epochs, a pruned one, a released one and entries."""
    store = MemoryStore(Memory())
    await store.open()
    end = 0
    for epoch in (1, 2, 3):
        assert await store.claim("long", at=5.0) == epoch
        bodies = [b"%d-%d" % (epoch, number) for number in range(700)]
        end = await store.append("long", Batch(bodies, end, epoch, Sync.FULL, seal=b"seal%d" % epoch))
    mark = SessionListing(is_live=True, at=9.0, title="Long", turns=2, status="running")
    blobs = [Blob("d" * 64, b"large" * 1000), Blob("key-1", b"wrapped")]
    await store.append("long", Batch([], end, 3, Sync.FULL, mark, blobs))
    await store.claim("pruned", at=6.0)
    epoch = await store.claim("pruned", at=6.0)
    await store.append("pruned", Batch([b"x"] * 1200, 0, epoch, Sync.FULL))
    assert await store.prune("pruned", b"folded", position=1100, epoch=epoch)
    epoch = await store.claim("free", at=7.0)
    await store.append("free", Batch([b"y"], 0, epoch, Sync.FULL))
    await store.release("free", epoch=epoch)
    await store.kv_put("pool", "k", b"1", expected=0, at=1.5)
    await store.kv_put("other", "k", b"2", expected=0, at=2.5)
    return store


async def _content(
    store: Store,
) -> dict[str, tuple[SessionInfo | None, list[StoredRecord], dict[str, bytes | None]]]:
    return {
        line.session: (
            await store.find(line.session),
            await store.read(line.session, after=0, limit=10_000),
            {
                digest: await store.blob(line.session, digest)
                for digest in await store.blob_digests(line.session)
            },
        )
        async for line in store.list()
    }


@pytest.mark.parametrize("kind", ["memory", "sqlite", "postgresql", "nats"])
async def test_a_copy_has_all_content_of_its_source(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    source = await _filled()
    target: Store
    if kind == "postgresql":
        engine: Engine = request.getfixturevalue("engine")
        target = PostgresStore(f"{engine.url}&schema=copy_1")
    elif kind == "nats":
        cluster: NatsCluster = request.getfixturevalue("nats_server")
        target = JetStreamStore(cluster.url("copy_1", streams=3))
    else:
        target = MemoryStore(Memory()) if kind == "memory" else SQLiteStore(tmp_path / "copy.db")
    await target.open()
    done = await copy_store(source, target)
    assert (done.sessions, done.records, done.blobs, done.entries) == (3, 2100 + 101 + 1, 2, 2)
    assert await _content(target) == await _content(source)
    assert [(each.key, each.body, each.at) for each in await target.kv_list("pool")] == [("k", b"1", 1.5)]
    assert await copy_store(source, target) == done, "the second one finds nothing to do"
    line = await source.find("long")
    assert line is not None
    await source.append("long", Batch([b"new"], line.end, line.epoch, Sync.FULL))
    assert (await copy_store(source, target)).records == done.records + 1
    assert await _content(target) == await _content(source)
    await target.close()


async def test_a_store_in_jetstream_can_be_copied_from_too(tmp_path: Path, nats_server: NatsCluster) -> None:
    source, url = await _filled(), nats_server.url("copy_2", streams=3)
    store = open_store(url)
    await store.open()
    done = await copy_store(source, store)
    await store.close()
    target = MemoryStore(Memory())
    await target.open()
    async with read_stored(url) as stored:
        assert await copy_store(stored, target) == done
    assert await _content(target) == await _content(source)


async def test_a_guarded_store_can_be_copied_by_its_name_to_jetstream_and_back(
    tmp_path: Path, nats_server: NatsCluster
) -> None:
    first, second, url = tmp_path / "1.db", tmp_path / "2.db", nats_server.url("copy_3", streams=2)
    store = guard_store(open_store(first))
    await store.open()
    body = b"large" * 100_000
    epoch = await store.claim("s", at=1.0)
    await store.append("s", Batch([b"1", b"2"], 0, epoch, Sync.FULL, blobs=[Blob(digest_of(body), body)]))
    await store.close()
    done = await copy_named(first, url)
    assert (done.sessions, done.records, done.blobs) == (1, 2, 1)
    assert (await copy_named(url, second)).digest == (await copy_named(first, url)).digest == done.digest


@pytest.mark.parametrize("fails_at", range(1, 16))
async def test_an_interrupted_copy_continues(fails_at: int) -> None:
    source, memory = await _filled(), Memory()
    target = FailingStore(MemoryStore(memory), {fails_at: StoreFullError("full")})
    await target.open()
    with pytest.raises(StoreFullError):
        await copy_store(source, target)
    assert not any(line.mark.is_live for line in [line async for line in target.list()]), "none is taken up"
    await target.close()
    again = MemoryStore(memory)
    await again.open()
    await copy_store(source, again)
    assert await _content(again) == await _content(source)


async def test_a_target_with_other_sessions_of_these_names_is_refused() -> None:
    source, target = await _filled(), MemoryStore(Memory())
    await target.open()
    for _ in range(9):
        epoch = await target.claim("free", at=1.0)
    await target.append("free", Batch([b"another"], 0, epoch, Sync.FULL))
    with pytest.raises(UsageError, match="choose an empty target"):
        await copy_store(source, target)


async def test_differences_after_the_copy_are_reported() -> None:
    source, target = await _filled(), MemoryStore(Memory())
    await target.open()
    await target.claim("free", at=7.0)
    await target.append("free", Batch([b"n"], 0, 1, Sync.FULL))
    with pytest.raises(EventsLostError, match="differs from its source"):
        await copy_store(source, target)


async def test_encrypted_sessions_are_readable_in_the_copy_with_the_same_keys(tmp_path: Path) -> None:
    memory, copied, keys = Memory(), Memory(), keys_in(tmp_path)
    store = encrypt_store(MemoryStore(memory), keys)
    await store.open()
    epoch = await store.claim("s", at=1.0)
    mark = SessionListing(is_live=False, at=1.0, title="secret words")
    await store.append("s", Batch([b"one", b"two"], 0, epoch, Sync.FULL, mark))
    await store.close()
    source, target = MemoryStore(memory), MemoryStore(copied)
    await source.open()
    await target.open()
    await copy_store(source, target)
    await target.close()
    read = encrypt_store(MemoryStore(copied), keys)
    await read.open()
    assert [each.body for each in await read.read("s", after=0, limit=9)] == [b"one", b"two"]
    line = await read.find("s")
    assert line is not None
    assert line.mark.title == "secret words"
