"""The connection: permissions, and limits of the servers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from midstream.errors import (
    LeaseHeldError,
    StoreBusyError,
    UsageError,
)
from midstream.session.records import Sync
from midstream.store.contract import Batch, SessionListing
from midstream.store.jetstream import JetStreamStore
from midstream.store.jetstream.jetstream_errors import SubjectMovedError
from midstream.store.jetstream.jetstream_link import SubjectWrite
from tests.nats_engine import running_cluster
from tests.store.jetstream.jetstream_places import JetStreamPlace
from tests.store.stores import bodies

GUIDE = (Path(__file__).parents[3] / "docs" / "guides" / "jetstream.md").read_text(encoding="utf-8")


async def test_unreachable_servers_are_reported_without_the_password() -> None:
    with pytest.raises(StoreBusyError, match="cannot be reached") as refused:
        await JetStreamStore("nats://u:secret@127.0.0.1:1").open()
    assert "secret" not in refused.value.message


async def test_a_user_with_the_permissions_of_the_guide_is_sufficient_and_a_wrong_password_refused() -> None:
    allowed = ["app.>", "app-signal.>", "$JS.API.>", "_INBOX.>"]
    assert all(f"`{each.replace('app', 'NAME')}`" in GUIDE for each in allowed)
    user = {"user": "u", "password": "p", "permissions": {"publish": allowed, "subscribe": allowed}}
    with running_cluster(more={"authorization": {"users": [user]}}) as cluster:
        url = cluster.url("app", streams=2).replace("nats://", "nats://u:p@")
        with pytest.raises((UsageError, StoreBusyError)) as refused:
            await JetStreamStore(url.replace("u:p@", "u:wrong@")).open()
        assert "wrong" not in refused.value.message
        one, other = JetStreamStore(url), JetStreamStore(url)
        await one.open()
        await other.open()
        epoch = await one.claim("s", at=1.0)
        await one.append("s", Batch([b"a"], 0, epoch, Sync.FULL, SessionListing(is_live=False, at=1.0)))
        with pytest.raises(LeaseHeldError):
            await other.claim("s", at=2.0)
        assert await bodies(other) == [b"a"]
        assert await one.delete("s")
        await one.close()
        await other.close()


async def test_batches_above_the_server_limit_are_all_executed(place: JetStreamPlace) -> None:
    stores = [place.store() for _ in range(10)]
    await asyncio.gather(*(store.open() for store in stores))
    mark = SessionListing(is_live=False, at=2.0)

    async def work(store: JetStreamStore, name: str) -> None:
        epoch = await store.claim(name, at=1.0)
        for end in range(3):
            await store.append(name, Batch([b"x"], end, epoch, Sync.FULL, mark))

    await asyncio.gather(*(work(store, f"{store.node}-{each}") for store in stores for each in range(20)))
    assert len([line async for line in stores[0].list()]) == 200
    await asyncio.gather(*(store.close() for store in stores))


async def test_a_batch_is_stored_completely_or_not_at_all(store: JetStreamStore) -> None:
    opened = store._opened
    assert opened is not None
    link, stream, start = opened.link, opened.presence._subjects.shards[0], "x"
    start = f"{opened.presence._subjects.name}.0.x"
    with pytest.raises(SubjectMovedError):
        await link.commit(stream, [SubjectWrite(f"{start}.1", b"1"), SubjectWrite(f"{start}.2", b"2", 7)])
    assert await link.subjects(stream, f"{start}.*") == []
    last = await link.commit(stream, [SubjectWrite(f"{start}.1", b"1"), SubjectWrite(f"{start}.2", b"2", 0)])
    assert [each.data for each in await link.scan(stream, f"{start}.*")] == [b"1", b"2"]
    newest = await link.last(stream, f"{start}.*")
    assert newest is not None
    assert (newest.seq, newest.data) == (last, b"2")
