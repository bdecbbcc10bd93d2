"""One connection, driven step by step: order, timeouts, fencing, and bounded memory."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import pytest

from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.engine.runner import StopMode
from midstream.environment import Fault
from midstream.errors import DrainingError, MidstreamError, OverloadedError, ProtocolError
from midstream.protocol.frames import HEARTBEAT_S
from midstream.protocol.server_stream import OPEN_WITHIN_S, ServerStream
from midstream.protocol.stream_settings import StreamSettings
from midstream.server.transports.connection import NAMES_MAX, Connection, Connections
from midstream.server.transports.frame_sending import SEND_S
from midstream.store.memory import Memory, MemoryStore
from midstream.testing.fake_worlds import FakeWorld
from midstream.testing.scripted_model import Gate, ScriptedModel, ScriptedStep, Stall, text
from tests.server.serving import WAIT_S, Json, abort, command, opening, records_of
from tests.spec import spec


class MemoryWire:
    """A transport in memory; `is_stuck` is a client that has stopped reading."""

    def __init__(self, *, ends_with_turn: bool = False) -> None:
        self.ends_with_turn = ends_with_turn
        self.is_full = False
        self.gap_s = 0.0
        self.sent: list[Json] = []
        self.writes = 0
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.error: OSError | None = None
        self._said: asyncio.Queue[bytes | None] = asyncio.Queue()

    def client_sends(self, *frames: Json) -> None:
        for frame in frames:
            self._said.put_nowait(json.dumps(frame).encode())

    def hang_up(self) -> None:
        self._said.put_nowait(None)

    async def receive(self) -> bytes | None:
        return await self._said.get()

    async def send(self, frames: Sequence[bytes]) -> None:
        self.writes += 1
        await self.is_open.wait()
        if self.error:
            raise self.error
        self.sent += [json.loads(frame) for frame in frames]

    def sent_frames(self, kind: str) -> list[Json]:
        return [frame for frame in self.sent if frame["type"] == kind]


class ConnectionBench:
    """A host, its connections and a clock."""

    def __init__(self, host: Host, store: MemoryStore, world: FakeWorld, among: Connections) -> None:
        self.host = host
        self.store = store
        self.world = world
        self.among = among
        self.running: list[asyncio.Task[MidstreamError | None]] = []

    def connect(
        self, wire: MemoryWire, *, heartbeat_s: float = HEARTBEAT_S
    ) -> asyncio.Task[MidstreamError | None]:
        stream = ServerStream(heartbeat_s=heartbeat_s, now=self.world.monotonic())
        connection = Connection(self.host, "s1", stream, wire, self.among)

        async def serve() -> MidstreamError | None:
            with connection:
                return await connection.run()

        task = asyncio.create_task(serve())
        self.running.append(task)
        return task


@asynccontextmanager
async def bench(
    *script: Sequence[ScriptedStep], world: FakeWorld | None = None, memory: Memory | None = None
) -> AsyncIterator[ConnectionBench]:
    world = world or FakeWorld()
    store = MemoryStore(memory)
    host = Host(Agent(ScriptedModel(script)), store, world=world)
    await host.start()
    made = ConnectionBench(host, store, world, Connections(limit=3))
    yield made
    for task in made.running:
        task.cancel()
    await asyncio.gather(*made.running, return_exceptions=True)
    await asyncio.wait_for(host.stop(grace_s=0.1), WAIT_S)


async def ended(task: asyncio.Task[MidstreamError | None]) -> str:
    failure = await asyncio.wait_for(task, WAIT_S)
    return failure.code if failure else ""


async def test_the_ack_follows_the_append_and_is_not_sent_if_the_process_dies_between() -> None:
    memory = Memory()
    world = FakeWorld()
    world.crash_at(Fault.BEFORE_ACK)
    async with bench([Stall()], world=world, memory=memory) as on:
        wire = MemoryWire()
        wire.client_sends(opening(), command())
        with pytest.raises(ExceptionGroup, match="unhandled"):
            await ended(on.connect(wire))
        assert wire.sent_frames("ack") == []
        memory.kill(on.store.node)

    async with bench([Stall()], memory=memory) as on:
        again = MemoryWire()
        again.client_sends(opening(), command())
        on.connect(again)
        await on.world.settle()
        assert again.sent_frames("welcome")[0]["acked"] == 1
        assert again.sent_frames("ack") == [{"type": "ack", "seqno": 0}]
        assert (await on.host.session("s1")).state.turns == 1


async def test_a_slow_reader_holds_one_write_and_its_position() -> None:
    gate = asyncio.Event()
    words = [step for number in range(3000) for step in text(f"{number} ")[:-1]]
    async with bench([Gate(gate), *words, Stall()]) as on:
        slow, quick = MemoryWire(), MemoryWire()
        slow.client_sends(opening(), command())
        on.connect(slow)
        quick.client_sends(opening(stream="", secret="", event_id="0-0"))
        await on.world.settle()
        on.connect(quick)
        await on.world.settle()
        slow.is_open.clear()
        writes = slow.writes
        gate.set()
        for _ in range(100):
            await on.world.settle()
        assert slow.writes == writes + 1, "one batch is in flight and nothing waits behind it"
        assert len(records_of(quick.sent)) > len(records_of(slow.sent))

        slow.is_open.set()
        for _ in range(20):
            await on.world.settle()
        ids = [event["id"] for event in records_of(slow.sent)]
        assert ids == [event["id"] for event in records_of(quick.sent)]
        assert slow.writes < writes + 40, "it caught up in batches, not word by word"


@spec("STREAM-114")
async def test_a_client_that_stops_reading_is_finally_dropped() -> None:
    async with bench([Stall()]) as on:
        wire = MemoryWire()
        wire.client_sends(opening())
        task = on.connect(wire)
        await on.world.settle()
        wire.is_open.clear()
        wire.client_sends(command())
        await on.world.settle()
        await on.world.advance(SEND_S - 1)
        assert not task.done()
        await on.world.advance(2 + HEARTBEAT_S)
        assert await ended(task) == ""
        runner = await on.host.session("s1")
        assert (runner.state.is_live, runner.readers, len(on.among)) == (True, 0, 0)


@pytest.mark.parametrize("is_stuck", [False, True])
async def test_available_events_are_sent_with_the_welcome(is_stuck: bool) -> None:  # noqa: FBT001 - a case
    """No turn of the loop passes in between; a client that does not read even this is dropped like any other."""
    async with bench([Stall()]) as on:
        first, wire = MemoryWire(), MemoryWire()
        first.client_sends(opening(), command())
        on.connect(first)
        await on.world.settle()
        if is_stuck:
            wire.is_open.clear()
        stream = ServerStream(now=on.world.monotonic())
        with Connection(on.host, "s1", stream, wire, on.among) as connection:
            await connection.admit(json.dumps(opening(stream="", secret="", event_id="0-0")).encode())
            running = asyncio.create_task(connection.run())
            on.running.append(running)
            await asyncio.sleep(0)
            assert wire.writes == 1
            if is_stuck:
                await on.world.advance(SEND_S)
                assert await ended(running) == ""
                assert connection.is_gone
                return
            assert wire.sent[0]["type"] == "welcome"
            assert records_of(wire.sent) == records_of(first.sent)
            await on.world.settle()
            assert wire.writes == 1


async def test_heartbeats_fill_the_silence() -> None:
    async with bench([Stall()]) as on:
        wire = MemoryWire()
        wire.client_sends(opening(), command())
        on.connect(wire)
        await on.world.settle()
        newest = records_of(wire.sent)[-1]["id"]
        await on.world.advance(2 * HEARTBEAT_S + 1)
        assert (
            wire.sent_frames("heartbeat")
            == [{"type": "heartbeat", "event_id": newest, "waiting_on": "model"}] * 2
        )
        await on.world.advance(HEARTBEAT_S)  # The silence of the model has an event of its own.
        assert records_of(wire.sent)[-1]["record"]["type"] == "stall_noticed"


async def test_the_first_heartbeat_is_not_later_than_the_others() -> None:
    async with bench() as on:
        wire = MemoryWire()
        wire.client_sends(opening())
        on.connect(wire, heartbeat_s=0.5)
        await on.world.settle()
        await on.world.advance(0.6)
        assert len(wire.sent_frames("heartbeat")) == 1
        await on.world.advance(1.0)
        assert len(wire.sent_frames("heartbeat")) == 3


async def test_a_connection_without_an_open_frame_in_time_is_closed() -> None:
    async with bench() as on:
        wire = MemoryWire()
        task = on.connect(wire)
        await on.world.advance(OPEN_WITHIN_S + 1)
        assert await ended(task) != ""
        assert [frame["type"] for frame in wire.sent] == ["error"]


async def test_a_disconnecting_client_cancels_nothing() -> None:
    async with bench([Stall()]) as on:
        wire = MemoryWire()
        wire.client_sends(opening(), command())
        task = on.connect(wire)
        await on.world.settle()
        wire.hang_up()
        assert await ended(task) == ""
        runner = await on.host.session("s1")
        assert (runner.state.is_live, runner.readers) == (True, 0)


async def test_a_connection_that_breaks_during_a_write_ends_without_an_error() -> None:
    async with bench([Stall()]) as on:
        wire = MemoryWire()
        wire.client_sends(opening())
        task = on.connect(wire)
        await on.world.settle()
        wire.error = ConnectionResetError("peer reset")
        wire.client_sends(command())
        assert await ended(task) == ""
        assert (await on.host.session("s1")).state.is_live


async def test_one_connection_sends_for_a_stream_and_others_continue_to_read() -> None:
    async with bench([Stall()]) as on:
        first, second, reader = MemoryWire(), MemoryWire(), MemoryWire()
        first.client_sends(opening())
        older = on.connect(first)
        await on.world.settle()
        reader.client_sends(opening(stream="k2"))
        on.connect(reader)
        second.client_sends(opening(), command())
        on.connect(second)
        assert await ended(older) == "stream_fenced"
        await on.world.settle()
        assert first.sent[-1]["code"] == "stream_fenced"
        assert second.sent_frames("ack")
        assert records_of(reader.sent)


@spec("STREAM-100")
async def test_a_client_ahead_of_the_journal_is_logged_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with bench([Stall()]) as on:
        client, ahead = MemoryWire(), MemoryWire()
        client.client_sends(opening(), command())
        on.connect(client)
        await on.world.settle()
        assert on.among.ahead == 0
        ahead.client_sends(opening(event_id="1-99", next_seqno=1, connection=2))
        on.connect(ahead)
        await on.world.settle()
        assert [frame["type"] for frame in ahead.sent[:2]] == ["welcome", "gone"]
        assert on.among.ahead == 1
        assert "a client has the event 1-99, and the journal ends with 1-" in caplog.text


@spec("STREAM-50")
async def test_a_late_older_connection_is_ended_and_the_newer_one_continues() -> None:
    async with bench([Stall()]) as on:
        newer, late = MemoryWire(), MemoryWire()
        newer.client_sends(opening(connection=2))
        client = on.connect(newer)
        await on.world.settle()
        late.client_sends(opening(connection=1))
        assert await ended(on.connect(late)) == "stream_fenced"
        newer.client_sends(command())
        await on.world.settle()
        assert newer.sent_frames("ack")
        assert not client.done()


@spec("STREAM-50")
@pytest.mark.parametrize("between", [2, 0], ids=["lost", "lost, and one without a number came"])
async def test_a_late_older_connection_is_ended_when_the_newer_one_is_lost(between: int) -> None:
    async with bench([Stall()]) as on:
        for number in (2, between):
            newer = MemoryWire()
            newer.client_sends(opening(connection=number))
            client = on.connect(newer)
            await on.world.settle()
            newer.hang_up()
            assert await ended(client) == ""
        late = MemoryWire()
        late.client_sends(opening(connection=1))
        assert await ended(on.connect(late)) == "stream_fenced"


async def test_a_fenced_connection_that_does_not_read_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midstream.server.transports.connection.LAST_FRAME_S", 0.01)
    async with bench([Stall()]) as on:
        stuck, newer = MemoryWire(), MemoryWire()
        stuck.client_sends(opening())
        older = on.connect(stuck)
        await on.world.settle()
        stuck.is_open.clear()
        stuck.client_sends(command())
        newer.client_sends(opening())
        await on.world.settle()
        on.connect(newer)
        assert await ended(older) == "stream_fenced"


async def test_a_transport_that_ends_with_the_turn_is_closed_after_it() -> None:
    async with bench(text("hi"), text("more")) as on:
        wire = MemoryWire(ends_with_turn=True)
        wire.client_sends(opening(), command())
        assert await ended(on.connect(wire)) == ""
        assert records_of(wire.sent)[-1]["record"]["type"] == "turn_ended"

        late = MemoryWire(ends_with_turn=True)
        late.client_sends(opening(event_id=records_of(wire.sent)[-1]["id"]))
        assert await ended(on.connect(late)) == ""
        assert [frame["type"] for frame in late.sent] == ["welcome"]


async def test_every_reader_receives_an_abort_and_the_end_of_its_turn() -> None:
    async with bench([Stall()]) as on:
        speaker, reader = MemoryWire(), MemoryWire()
        speaker.client_sends(opening(), command())
        on.connect(speaker)
        await on.world.settle()
        reader.client_sends(opening(stream="", secret=""))
        on.connect(reader)
        await on.world.settle()
        speaker.client_sends(abort(1))
        await on.world.settle()
        assert [records_of(each.sent)[-1]["record"]["status"] for each in (speaker, reader)] == [
            "cancelled"
        ] * 2


async def test_draining_sends_an_error_to_all_connections() -> None:
    async with bench([Stall()]) as on:
        silent, idle = MemoryWire(), MemoryWire()
        idle.client_sends(opening())
        tasks = [on.connect(silent), on.connect(idle)]
        await on.world.settle()
        on.among.drain(DrainingError("bye", retry_after_s=1.0))
        assert [await ended(task) for task in tasks] == ["draining"] * 2
        for wire in (silent, idle):
            assert wire.sent[-1] == {
                "type": "error",
                "code": "draining",
                "message": "bye",
                "retry": "later",
                "retry_after_s": 1.0,
            }
        late = on.connect(MemoryWire())
        with pytest.raises(DrainingError):
            await late


async def test_a_host_that_drains_by_itself_ends_its_readers() -> None:
    async with bench([Stall()]) as on:
        wire = MemoryWire()
        wire.client_sends(opening(), command())
        task = on.connect(wire)
        await on.world.settle()
        on.host.drain()
        assert await ended(task) == "draining"


async def test_connections_are_counted_and_bounded() -> None:
    async with bench() as on:
        wires = [MemoryWire() for _ in range(3)]
        tasks = [on.connect(wire) for wire in wires]
        await on.world.settle()
        surplus = on.connect(MemoryWire())
        with pytest.raises(OverloadedError):
            await surplus
        wires[0].hang_up()
        await ended(tasks[0])
        one_more = on.connect(MemoryWire())
        await on.world.settle()
        assert (one_more.done(), len(on.among)) == (False, 3)


@spec("STREAM-56")
def test_commands_in_separate_requests_are_counted_by_their_numbers_while_they_last() -> None:
    among = Connections()
    place, other = ("s1", "k1"), ("s1", "k2")
    counted = partial(among.under_way, most=2)
    with counted(place, 0), counted(place, 1), counted(place, 0):
        with pytest.raises(ProtocolError), counted(place, 2):
            pytest.fail("it was let in")
        with counted(other, 2):
            pass
    with counted(place, 2), counted(place, 3):
        pass


@spec("STREAM-56")
def test_changed_settings_apply_to_later_connections() -> None:
    before, after = StreamSettings(in_flight_max=3), StreamSettings(in_flight_max=1)
    among = Connections(settings=before)
    assert among.choose_settings("s1", "old") == among.choose_settings("s1", "") == before
    among.settings = after
    assert among.choose_settings("s1", "new") == after
    found = [among.settings_of("s1", name) for name in ("old", "new", "", "of another server")]
    assert found == [before, after, after, after]
    assert among.settings_of("s2", "old") == after
    for number in range(NAMES_MAX):
        among.choose_settings("s1", str(number))
    assert among.settings_of("s1", "old") == after, "the report was too long ago"


@pytest.fixture
def uncollected() -> Iterator[None]:
    """A server may live for hours between two full collections."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize(
    "ending", ["hung up", "broke the protocol", "fenced", "fell silent", "session ended"]
)
async def test_an_ended_connection_leaves_nothing_in_memory(ending: str) -> None:
    async with bench(text("ok")) as on:
        wire = MemoryWire()
        wire.client_sends(opening(connection=1), command())
        serving = on.connect(wire)
        await on.world.settle()
        assert records_of(wire.sent_frames("events"))[-1]["record"]["type"] == "turn_ended"
        (kept,) = [weakref.ref(each) for each in on.among._open]
        match ending:
            case "hung up":
                wire.hang_up()
            case "broke the protocol":
                wire.client_sends({"type": "nonsense"})
            case "fenced":
                newer = MemoryWire()
                newer.client_sends(opening(connection=2))
                on.connect(newer)
            case "fell silent":
                wire.is_open.clear()
                await on.world.advance(HEARTBEAT_S)
                await on.world.advance(SEND_S)
            case _:
                await (await on.host.session("s1")).stop(StopMode.CLOSE, DrainingError("it ends"))
        await ended(serving)
        on.running.clear()
        del serving
        await on.world.settle()
        assert kept() is None
