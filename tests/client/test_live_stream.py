"""One stream over a wire in memory: what it stores, sends, reads and releases, and in which order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Self

import pytest

from midstream.client.checkpoint_file import CheckpointFile, StreamBegun
from midstream.client.live_stream import EVENTS_UNREAD_MAX, Attachment
from midstream.client.secret_store import SecretStore
from midstream.client.session_secrets import SecretsToShow
from midstream.environment import Fault
from midstream.errors import (
    AccessError,
    ConnectionLostError,
    MidstreamError,
    StoreFullError,
    UnavailableError,
    WrongSecretError,
)
from midstream.history.messages import Text
from midstream.protocol import frames
from midstream.protocol.client_stream import ClientStream
from midstream.protocol.event_inbox import Applied
from midstream.protocol.frames import (
    Ack,
    Error,
    EventId,
    Events,
    HeartbeatFrame,
    Open,
    SendPayload,
    ServerFrame,
    Welcome,
)
from midstream.protocol.server_stream import events_frames
from midstream.session import records
from midstream.session.records import Delta
from midstream.testing.fake_worlds import FakeWorld
from tests.spec import spec

WAIT_S = 60.0
HI = SendPayload((Text("hi"),))


class FakeWire:
    """A connection whose other end is the test."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.is_closed = False
        self.reads = 0
        self.received_bytes = 0
        self._incoming: asyncio.Queue[bytes | ConnectionLostError] = asyncio.Queue()

    def deliver(self, *sent: ServerFrame | bytes) -> None:
        for frame in sent:
            self._incoming.put_nowait(frame if isinstance(frame, bytes) else frames.encode(frame))

    def fail(self) -> None:
        self._incoming.put_nowait(ConnectionLostError("reset"))

    async def receive(self) -> bytes:
        self.reads += 1
        body = await self._incoming.get()
        if isinstance(body, ConnectionLostError):
            raise body
        return body

    async def send(self, given: Sequence[bytes]) -> None:
        self.sent += given

    async def close(self) -> None:
        self.is_closed = True


class LiveStreamBench:
    """An attachment with all its parts."""

    def __init__(self, *, world: FakeWorld | None = None, stream: ClientStream | None = None) -> None:
        self.world = world or FakeWorld()
        self.wires: list[FakeWire] = []
        self.refusals: list[MidstreamError] = []
        self.reconnecting: list[bool] = []
        self.stalled: list[str] = []
        self.reads = 0
        self.kept: deque[SecretsToShow | MidstreamError] = deque([SecretsToShow("secret")])
        """The secrets that each read returns; the last one from then on."""
        self.is_read: asyncio.Future[None] | None = None
        secrets = SecretStore(None, world=self.world)
        self.file = CheckpointFile(None, server="http://s", secrets=secrets, world=self.world)
        self.stream = stream or ClientStream("a", "secret", now=self.world.monotonic())
        self.attachment = Attachment(
            self.stream,
            self.connect,
            read_secrets=self.read_secrets,
            file=self.file,
            begun=StreamBegun("s1", "secret") if self.stream.stream else None,
            tools=None,
            world=self.world,
            on_reconnecting=self.reconnecting.append,
            on_stalled=self.stalled.append,
        )

    async def read_secrets(self) -> SecretsToShow:
        self.reads += 1
        if self.is_read is not None:
            await self.is_read
        kept = self.kept.popleft() if len(self.kept) > 1 else self.kept[0]
        if isinstance(kept, MidstreamError):
            raise kept
        return kept

    async def connect(self) -> FakeWire:
        if self.refusals:
            raise self.refusals.pop(0)
        self.wires.append(FakeWire())
        return self.wires[-1]

    async def __aenter__(self) -> Self:
        await self.file.open()
        if self.stream.stream:
            self.stream.submit(HI)
        self.attachment.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.attachment.close()
        await self.file.close()

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not is_so():  # noqa: ASYNC110 - the awaited state has no event
                await asyncio.sleep(0)

    async def await_connection(self, number: int = 1) -> FakeWire:
        await self.until(lambda: len(self.wires) >= number and len(self.wires[number - 1].sent) > 0)
        return self.wires[number - 1]


@spec("STREAM-11")
async def test_a_command_is_stored_before_it_is_sent() -> None:
    async with LiveStreamBench() as bench:
        wire = await bench.await_connection()
        assert wire.sent[0] == frames.encode(Open("a", "secret", None, 1, 1))
        (kept,) = await bench.file.streams()
        assert kept.checkpoint.unacked == ((0, frames.encode(HI)),)


async def test_a_command_that_cannot_be_stored_is_not_sent() -> None:
    bench = LiveStreamBench()
    async with bench:
        wire = await bench.await_connection()
        wire.deliver(Welcome("a", "0-0", "0-0"))
        await bench.file._call(lambda: bench.file._execute("PRAGMA max_page_count = 1"))
        sent = len(wire.sent)
        bench.stream.submit(SendPayload((Text("x" * 50_000),)))
        with pytest.raises(StoreFullError):
            await asyncio.wait_for(bench.attachment.next(), WAIT_S)
        assert (len(wire.sent), wire.is_closed) == (sent, True)


async def test_a_lost_connection_is_replaced_and_the_user_is_notified() -> None:
    async with LiveStreamBench() as bench:
        (await bench.await_connection()).fail()
        again = await bench.await_connection(2)
        assert again.sent == [frames.encode(Open("a", "secret", None, 1, 2)), bench.wires[0].sent[1]]
        assert bench.reconnecting == [True]
        again.deliver(Welcome("a", "0-0", "0-0"), Ack(0))
        await asyncio.wait_for(bench.attachment.wait_for_acks(), WAIT_S)
        assert bench.reconnecting == [True, False]


async def test_a_failed_attempt_is_followed_by_a_pause() -> None:
    bench = LiveStreamBench()
    bench.refusals = [ConnectionLostError("refused"), ConnectionLostError("refused", retry_after_s=7.0)]
    async with bench:
        await bench.until(lambda: bench.refusals == [])
        await bench.until(lambda: bench.world.next_wake_at is not None)
        await bench.world.advance(6.9)
        assert bench.wires == []
        await bench.world.advance(0.2)
        await bench.await_connection()


async def test_an_attempt_that_can_never_succeed_ends_the_stream() -> None:
    bench = LiveStreamBench()
    bench.refusals = [AccessError("403")]
    async with bench:
        with pytest.raises(AccessError):
            await asyncio.wait_for(bench.attachment.next(), WAIT_S)
        assert len(await bench.file.streams()) == 1


@spec("STREAM-32")
async def test_a_silent_server_is_disconnected_for_a_new_connection() -> None:
    async with LiveStreamBench() as bench:
        wire = await bench.await_connection()
        wire.deliver(Welcome("a", "0-0", "0-0", heartbeat_s=2.0))
        await bench.until(lambda: wire.reads > 1)
        await bench.world.advance(5.9)
        assert len(bench.wires) == 1
        await bench.world.advance(0.2)
        await bench.await_connection(2)
        assert wire.is_closed


@spec("STREAM-46")
async def test_a_long_frame_on_a_slow_connection_is_not_silence() -> None:
    async with LiveStreamBench() as bench:
        wire = await bench.await_connection()
        wire.deliver(Welcome("a", "0-0", "0-0", heartbeat_s=2.0))
        await bench.until(lambda: wire.reads > 1)
        for _ in range(3):
            await bench.world.advance(2.0)
            wire.received_bytes += 1
            await bench.world.advance(4.0)
        assert (len(bench.wires), wire.is_closed) == (1, False)
        await bench.world.advance(6.1)
        await bench.await_connection(2)
        assert wire.is_closed, "bytes that stopped coming are silence"


@spec("STREAM-47")
async def test_a_stalled_turn_is_reported_once() -> None:
    async with LiveStreamBench() as bench:
        wire = await bench.await_connection()
        wire.deliver(Welcome("a", "0-0", "0-0"), Ack(0))
        await bench.until(lambda: wire.reads == 3)
        for count in range(4, 13):
            wire.deliver(HeartbeatFrame("0-0", "tool"))
            await bench.until(lambda: wire.reads == count)  # noqa: B023 - it is asked now
            await bench.world.advance(10.0)
        assert (bench.stalled, len(bench.wires)) == (["tool"], 1)


async def test_nothing_is_read_while_the_application_has_too_many_unread_events() -> None:
    stream = ClientStream(after=EventId(1, 0), now=1_000_000.0)
    async with LiveStreamBench(stream=stream) as bench:
        wire = await bench.await_connection()
        wire.deliver(Welcome("", "1-9999", "1-0"), *events_frames(_deltas(range(1, 3000))))
        await bench.until(lambda: len(bench.attachment._unread) >= EVENTS_UNREAD_MAX)
        await bench.world.settle()
        reads = wire.reads
        assert reads < 5, "the welcome and two full frames"
        await bench.world.advance(1000.0)
        assert (wire.reads, len(bench.wires)) == (reads, 1), "whoever does not read cannot blame the server"
        got = [await asyncio.wait_for(bench.attachment.next(), WAIT_S) for _ in range(1, 3000)]
        assert got == [Applied(event_id, records.decode(body)) for event_id, body in _deltas(range(1, 3000))]


@spec("STREAM-24")
async def test_the_cursor_follows_the_application() -> None:
    async with LiveStreamBench() as bench:
        wire = await bench.await_connection()
        opened = records.encode(records.StreamOpened("a", "d"))
        lines = [(EventId(1, 1), opened), *_deltas(range(2, 4))]
        wire.deliver(Welcome("a", "1-3", "0-0"), *events_frames(lines))
        for expected in (None, EventId(1, 1), EventId(1, 2)):
            await asyncio.wait_for(bench.attachment.next(), WAIT_S)
            await bench.world.settle()
            (kept,) = await bench.file.streams()
            assert kept.checkpoint.event_id == expected


@spec("STREAM-25")
async def test_closing_detaches_and_releases_everything() -> None:
    async with LiveStreamBench() as bench:
        wire = await bench.await_connection()
        wire.deliver(Welcome("a", "0-0", "0-0"))
        await bench.until(lambda: wire.reads > 1)
        await bench.attachment.close()
        await bench.attachment.close()
        assert wire.sent[-1] == frames.encode(frames.Close())
        assert wire.is_closed
        assert len(await bench.file.streams()) == 1
        assert await bench.attachment.next() is None


async def test_a_death_at_a_fault_point_is_raised_in_the_application() -> None:
    world = FakeWorld()
    world.crash_at(Fault.AFTER_CHECKPOINT)
    bench = LiveStreamBench(world=world)
    async with bench:
        with pytest.raises(Exception, match="after_checkpoint"):
            await asyncio.wait_for(bench.attachment.next(), WAIT_S)
        assert bench.wires == []


def _deltas(positions: range) -> list[tuple[EventId, bytes]]:
    return [
        (EventId(1, position), records.encode(Delta(1, 1, 1, 0, "text", f"{position} ")))
        for position in positions
    ]


def test_a_frame_of_events_is_smaller_than_the_unread_limit() -> None:
    first = next(iter(events_frames(_deltas(range(1, 3000)))))
    frame = frames.decode_server(first)
    assert isinstance(frame, Events)
    assert len(frame.events) < EVENTS_UNREAD_MAX


def _opening(wire: FakeWire) -> Open:
    opening = frames.decode_client(wire.sent[0])
    assert isinstance(opening, Open)
    return opening


@spec("STREAM-96")
async def test_each_connection_sends_the_secret_that_is_stored_when_it_is_made() -> None:
    async with LiveStreamBench() as bench:
        wire = await bench.await_connection()
        assert (_opening(wire).secret, bench.reads) == ("secret", 0)
        wire.deliver(Welcome("a", "0-0", "0-0", is_encrypted=True), HeartbeatFrame("0-0"))
        bench.kept = deque([SecretsToShow("newer", "secret"), UnavailableError("the keyring is locked")])
        wire.fail()
        again = await bench.await_connection(2)
        assert (_opening(again).secret, _opening(again).old_secret) == ("newer", "secret")
        again.deliver(Welcome("a", "0-0", "0-0", is_encrypted=True), HeartbeatFrame("0-0"))
        again.fail()
        last = await bench.await_connection(3)
        assert (_opening(last).secret, bench.reads) == ("newer", 2), "what was shown before may still do"


@spec("STREAM-96")
async def test_no_secret_is_read_for_a_session_without_one() -> None:
    async with LiveStreamBench() as bench:
        for number in range(1, 4):
            wire = await bench.await_connection(number)
            wire.deliver(Welcome("a", "0-0", "0-0"), HeartbeatFrame("0-0"))
            wire.fail()
        await bench.await_connection(4)
        assert bench.reads == 0


@spec("STREAM-96")
@pytest.mark.parametrize("is_reported", [True, False], ids=["by a frame", "by the connection"])
@pytest.mark.parametrize("is_changed", [True, False])
async def test_a_refused_secret_is_read_again_once(*, is_reported: bool, is_changed: bool) -> None:
    refused = WrongSecretError("no")
    async with LiveStreamBench() as bench:
        if is_changed:
            bench.kept = deque([SecretsToShow("newer")])
        if is_reported:
            (await bench.await_connection()).deliver(Error(refused.code, refused.message))
        else:
            bench.refusals.append(refused)
        made = 1 + int(is_reported)
        if is_changed:
            wire = await bench.await_connection(made)
            assert _opening(wire).secret == "newer"
            wire.deliver(Error(refused.code, refused.message))
        with pytest.raises(WrongSecretError):
            await bench.attachment.next()
        assert len(bench.wires) == made - int(not is_changed)
        assert 1 <= bench.reads <= 2


@spec("STREAM-96")
async def test_a_stream_closed_while_its_secret_is_read_does_not_wait() -> None:
    async with LiveStreamBench() as bench:
        never = asyncio.get_running_loop().create_future()
        bench.is_read = never
        wire = await bench.await_connection()
        wire.fail()
        await bench.until(lambda: bench.reads == 1)
        async with asyncio.timeout(WAIT_S):
            await bench.attachment.close()
        assert never.cancelled()
