"""Plain streams as journals: writers on several nodes, unfinished forks, and lifetimes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from midstream.dialects.durable_stream_state import Appended, Created, Forked, StreamRecord
from midstream.dialects.durable_streams import PlainStreamSettings
from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.server.api.plain_streams import FORK_S, KnownStream, PlainStreams, StreamGoneError
from midstream.store.memory import MemoryStore
from midstream.testing.scripted_model import ScriptedModel

TEXT = PlainStreamSettings("text/plain")


async def _make(streams: PlainStreams, journal: str, *records: StreamRecord, created: Created) -> None:
    async def decide(known: KnownStream | None) -> Sequence[StreamRecord]:
        assert known is None
        return [created, *records]

    await streams.write(journal, decide)


async def _append(streams: PlainStreams, journal: str, record: StreamRecord) -> None:
    async def decide(known: KnownStream | None) -> Sequence[StreamRecord]:
        assert known is not None
        return [record]

    await streams.write(journal, decide)


async def _text_of(streams: PlainStreams, journal: str) -> bytes:
    known = await streams.find(journal)
    assert known is not None
    return b"".join((await streams.read(known, 0)).bodies)


def _host(store: MemoryStore | Path) -> Host:
    return Host(Agent(ScriptedModel(())), store)


async def test_writers_on_two_nodes_append_each_record_once(tmp_path: Path) -> None:
    async with _host(tmp_path / "s.db") as one, _host(tmp_path / "s.db") as two:
        nodes = [PlainStreams(one), PlainStreams(two)]
        await _make(nodes[0], "~s", created=Created(TEXT))
        work = [_append(nodes[n % 2], "~s", Appended(b"%d," % n, len(b"%d," % n))) for n in range(40)]
        async with asyncio.timeout(60):
            await asyncio.gather(*work)
        for node in nodes:
            found = (await _text_of(node, "~s")).split(b",")[:-1]
            assert sorted(map(int, found)) == list(range(40))


async def test_an_append_wakes_a_reader_on_another_node(tmp_path: Path) -> None:
    async with _host(tmp_path / "s.db") as one, _host(tmp_path / "s.db") as two:
        writer, reader = PlainStreams(one), PlainStreams(two)
        await _make(writer, "~s", created=Created(TEXT))
        known = await reader.find("~s")
        assert known is not None
        waiting = asyncio.create_task(reader.wait(known))
        await _append(writer, "~s", Appended(b"x", 1))
        await asyncio.wait_for(waiting, 60)
        assert await _text_of(reader, "~s") == b"x"


async def test_a_fork_reads_its_source_and_deletion_of_the_last_fork_deletes_the_source() -> None:
    async with _host(MemoryStore()) as host:
        streams = PlainStreams(host)
        now = host.world.now()
        await _make(streams, "~a", Appended(b"abc", 3), Appended(b"def", 3), created=Created(TEXT))
        await _append(streams, "~a", Forked("~b", now))
        await _make(streams, "~b", Appended(b"X", 1), created=Created(TEXT, "~a", 4))
        await _append(streams, "~b", Forked("~c", now))
        await _make(streams, "~c", Appended(b"Y", 1), created=Created(TEXT, "~b", 2))
        assert (await _text_of(streams, "~b"), await _text_of(streams, "~c")) == (b"abcdX", b"abY")
        assert await streams.delete("~a")
        assert await streams.delete("~b")
        with pytest.raises(StreamGoneError):
            await streams.find("~a")
        assert await _text_of(streams, "~c") == b"abY"
        assert await streams.delete("~c")
        assert [await host.store.find(name) for name in ("~a", "~b", "~c")] == [None, None, None]


async def test_an_unfinished_fork_keeps_its_source_only_for_a_while() -> None:
    async with _host(MemoryStore()) as host:
        streams, now = PlainStreams(host), host.world.now()
        for name, asked_at in (("~new", now), ("~old", now - FORK_S)):
            await _make(streams, name, Forked("~none", asked_at), created=Created(TEXT))
            assert await streams.delete(name)
        with pytest.raises(StreamGoneError):
            await streams.find("~new")
        assert await host.store.find("~old") is None


async def test_an_expired_stream_is_removed_and_a_read_extends_its_lifetime() -> None:
    async with _host(MemoryStore()) as host:
        streams, now = PlainStreams(host), host.world.now()
        for name in ("~read", "~unread"):
            settings = PlainStreamSettings("text/plain", ttl_s=60)
            await _make(streams, name, created=Created(settings, at=now - 59.9))
        known = await streams.find("~read")
        assert known is not None
        await streams.note_use(known)
        known.state.written_at = now - 61
        again = PlainStreams(host)
        assert await again.find("~read") is not None
        gone = PlainStreamSettings("text/plain", ttl_s=60)
        await _make(streams, "~gone", created=Created(gone, at=now - 61))
        assert await again.find("~gone") is None
        assert await host.store.find("~gone") is None
