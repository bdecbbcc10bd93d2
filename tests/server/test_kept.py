"""Reads of pruned events, and of events that a client takes in batches."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from midstream import connect
from midstream.client import Event
from midstream.engine import journal as journal_module
from midstream.engine.host import Host
from midstream.engine.journal import Journal
from midstream.environment import World
from midstream.errors import DrainingError
from midstream.history.messages import Response, Step, Text, UserMessage
from midstream.models.responses import TextDelta
from midstream.protocol.frames import EventId, Gone, SnapshotFrame, SnapshotWhen
from midstream.protocol.server_stream import ServerStream
from midstream.server.api.session_snapshot import body_within, snapshot_of
from midstream.server.transports import encoded_pages as copies_module
from midstream.server.transports.connection import Connection, Connections
from midstream.session.records import encode
from midstream.session.retention import Retention
from midstream.session.session import Session, fold, is_prunable, prune_session
from midstream.store.memory import Memory, MemoryStore
from midstream.testing import run_turn, text
from midstream.testing.scripted_model import Gate, Script
from tests.server.serving import (
    WAIT_S,
    Json,
    Served,
    Socket,
    command,
    make_app,
    opening,
    records_of,
    served,
    words_of,
)
from tests.spec import spec

HELD_S = 0.0625
ANSWER = [text("one two three four", tokens=9)]


async def prune(host: Host, session: str = "s1", *, back: int = 0) -> EventId:
    """Prune a journal as far as possible; `back` positions less."""
    store = host.store
    state, places = Session(), list[Session]()
    for epoch, record in await Journal(store, session, host.world).load():
        state = fold([(epoch, record)], state)
        if is_prunable(state):
            places.append(state)
    state = places[-1 - back]
    body = encode(prune_session(state, at=1.0))
    assert await store.prune(session, body, position=state.position, epoch=state.epoch)
    return EventId(state.epoch, state.position)


async def _until(is_true: Callable[[], bool]) -> None:
    for _ in range(100_000):
        if is_true():
            return
        await asyncio.sleep(0)
    raise TimeoutError


@asynccontextmanager
async def serve_pruned(script: Script = ANSWER, *, turns: int = 2) -> AsyncIterator[tuple[Served, EventId]]:
    """Serve a session of some turns, all but the last of which were pruned; memory holds none of them."""
    memory = Memory()
    async with served(make_app(ANSWER, store=MemoryStore(memory))) as before:
        for number in range(turns - 1):
            await run_turn(before.app.host, "s1", f"question {number}")
        at = await prune(before.app.host)
        await run_turn(before.app.host, "s1", "the last one")
    async with served(make_app(script, store=MemoryStore(memory))) as server:
        yield server, at


async def _begin(server: Served, **fields: object) -> list[Json]:
    async with Socket(server.socket()) as peer:
        await peer.send({"type": "open", **fields})
        return await peer.receive_until("turn_ended")


@spec("STREAM-62", "STREAM-63", "STREAM-64")
async def test_a_reader_behind_the_pruned_events_gets_a_snapshot_and_every_event_after_it() -> None:
    async with serve_pruned(turns=3) as (server, at):
        received = await _begin(server, event_id="0-0", snapshots="gone")
        welcome, gone, snapshot, *rest = received
        assert (welcome["oldest"], welcome["resume_from"]) == (at.position + 1, str(at))
        assert welcome["retention"] == msgspec.to_builtins(Retention())
        assert gone == {
            "type": "gone",
            "resume_from": str(at),
            "reason": f"the events before position {at.position + 1} are no longer kept",
            "oldest": at.position + 1,
            "has_snapshot": True,
        }
        assert (snapshot["type"], snapshot["event_id"]) == ("snapshot", str(at))
        content = [entry for entry in snapshot["session"]["history"] if entry["type"] == "user"]
        assert [each["parts"][0]["text"] for each in content] == ["question 0", "question 1"]
        events = records_of(rest)
        newest = EventId.parse(welcome["event_id"])
        positions = [EventId.parse(event["id"]).position for event in events]
        assert positions == [*range(at.position + 1, newest.position + 1)]
        assert words_of(events) == "one two three four"


@spec("STREAM-63")
async def test_a_reader_at_the_last_pruned_event_misses_nothing_and_gets_no_snapshot() -> None:
    async with serve_pruned() as (server, at):
        received = await _begin(server, event_id=str(at), snapshots="gone")
        assert [frame["type"] for frame in received[:2]] == ["welcome", "events"]
        assert words_of(records_of(received)) == "one two three four"


@spec("STREAM-64")
async def test_a_client_that_accepts_no_snapshot_continues_at_the_oldest_event() -> None:
    async with serve_pruned() as (server, at):
        received = await _begin(server, event_id="1-1", snapshots="never")
        assert [frame["type"] for frame in received[:3]] == ["welcome", "gone", "events"]
        assert received[1]["resume_from"] == str(at)


@spec("STREAM-65")
async def test_a_late_reader_gets_the_running_turn_so_far_and_then_the_rest() -> None:
    go = asyncio.Event()
    script = [[TextDelta("so far, "), Gate(go), *text("so good")]]
    async with (
        served(make_app(script)) as server,
        Socket(server.socket()) as speaker,
        Socket(server.socket()) as late,
    ):
        await speaker.send(opening())
        await speaker.send(command())
        await speaker.receive_until("delta")
        await late.send({"type": "open", "snapshots": "begin"})
        welcome, snapshot = await late.receive(), await late.receive()
        running = snapshot["session"]["running"]
        assert running["output"]["parts"] == [{"type": "text", "text": "so far, "}]
        assert EventId.parse(snapshot["event_id"]) >= EventId.parse(welcome["event_id"])
        go.set()
        received = await late.receive_until("turn_ended")
        assert words_of(records_of(received)) == "so good"


@spec("STREAM-63")
async def test_server_sent_events_carry_the_same_snapshot() -> None:
    async with serve_pruned() as (server, at):
        url = "/v1/sessions/s1/events?after=1-1"
        async with server.http.stream("GET", url) as answer:
            kinds: list[str] = []
            async for line in answer.aiter_lines():
                if line.startswith("event: "):
                    kinds.append(line.removeprefix("event: "))
                if line == f"id: {at}" and "snapshot" in kinds:
                    break
                if "record" in kinds:
                    break
            assert kinds[:4] == ["welcome", "gone", "snapshot", "record"]
        bad = await server.http.get("/v1/sessions/s1/events?snapshots=perhaps")
        assert (bad.status_code, bad.json()["code"]) == (400, "usage")


@spec("STREAM-63")
async def test_a_poll_returns_the_gone_frame_and_the_snapshot_together() -> None:
    async with serve_pruned() as (server, at):
        first = await server.http.get("/v1/sessions/s1/poll?n=0&after=1-1")
        frames = first.json()["frames"]
        assert [frame["type"] for frame in frames] == ["welcome", "gone", "snapshot"]
        assert (frames[2]["event_id"], first.json()["more"]) == (str(at), True)
        then = await server.http.get(f"/v1/sessions/s1/poll?n=1&after={at}")
        assert words_of(records_of(then.json()["frames"])) == "one two three four"


@spec("STREAM-63")
async def test_pruned_records_are_gone_with_the_oldest_position() -> None:
    async with serve_pruned() as (server, at):
        gone = await server.http.get("/v1/sessions/s1/records?after=1")
        assert (gone.status_code, gone.json()["code"]) == (410, "event_gone")
        assert gone.json()["oldest"] == at.position + 1
        shown = (await server.http.get("/v1/sessions/s1/poll?n=0&after=1-1")).json()["frames"][2]
        assert (shown["type"], shown["event_id"]) == ("snapshot", str(at))
        assert gone.json()["snapshot"] == shown["session"]
        suffix = await server.http.get(f"/v1/sessions/s1/records?after={at.position}")
        assert json.loads(suffix.text.splitlines()[0])["id"].endswith(f"-{at.position + 1}")
        whole = await server.http.get("/v1/sessions/s1/records")
        first = json.loads(whole.text.splitlines()[0])
        assert (first["id"], first["record"]["type"]) == (str(at), "journal_pruned")


class _OneWriteTransport:
    """A transport that takes one write and then waits to be released."""

    ends_with_turn = False
    gap_s = 0.0
    is_full = False

    def __init__(self, opened: bytes) -> None:
        self.received: list[Json] = []
        self.has_taken = asyncio.Event()
        self.may_continue = asyncio.Event()
        self._frames = [opened]

    async def receive(self) -> bytes | None:
        if not self._frames:
            await asyncio.Event().wait()
        return self._frames.pop()

    async def send(self, frames: Sequence[bytes]) -> None:
        self.received += [json.loads(frame) for frame in frames]
        if any(frame["type"] == "events" for frame in self.received):
            self.has_taken.set()
            await self.may_continue.wait()


@spec("STREAM-63", "STREAM-64")
async def test_a_slow_reader_that_is_overtaken_gets_a_snapshot_in_the_middle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(journal_module, "TAIL_RECORDS_MAX", 2)
    monkeypatch.setattr(copies_module, "EVENTS_PER_FRAME_MAX", 4)
    monkeypatch.setattr(copies_module, "AHEAD_RECORDS_MAX", 4)
    async with served(make_app(ANSWER)) as server:
        host = server.app.host
        for number in range(3):
            await run_turn(host, "s1", f"question {number}")
        slow = _OneWriteTransport(b'{"type":"open","event_id":"0-0","snapshots":"gone"}')
        stream = ServerStream(now=host.world.monotonic())
        with Connection(host, "s1", stream, slow, Connections()) as connection:
            running = asyncio.create_task(connection.run())
            async with asyncio.timeout(WAIT_S):
                await slow.has_taken.wait()
                at = await prune(host)
                slow.may_continue.set()
                await run_turn(host, "s1", "and now?")
                await _until(lambda: "and now?" in json.dumps(slow.received))
                connection.end(DrainingError("the test is over"))
                await running
        kinds = [frame["type"] for frame in slow.received]
        place = kinds.index("gone")
        assert kinds[: place + 3] == ["welcome", "events", "gone", "snapshot", "events"]
        assert slow.received[place + 1]["event_id"] == str(at)
        positions = [EventId.parse(each["id"]).position for each in records_of(slow.received)]
        assert positions[:5] == [1, 2, 3, 4, at.position + 1]


async def _followed(server: Served, after: str | None, snapshots: SnapshotWhen) -> list[Event]:
    received: list[Event] = []
    async with asyncio.timeout(WAIT_S), connect(server.url) as client:
        async for event in client.follow("s1", after, snapshots=snapshots):
            received.append(event)
            if event.is_end or (snapshots is SnapshotWhen.BEGIN and isinstance(event.record, SnapshotFrame)):
                break
    return received


@spec("STREAM-64", "STREAM-65")
async def test_the_python_client_passes_the_snapshot_to_its_application() -> None:
    async with serve_pruned() as (server, at):
        gone, snapshot, *rest = await _followed(server, "0-0", SnapshotWhen.GONE)
        assert isinstance(gone.record, Gone)
        assert gone.record.has_snapshot
        assert isinstance(snapshot.record, SnapshotFrame)
        assert (snapshot.id, msgspec.json.decode(snapshot.record.session)["turns"]) == (str(at), 1)
        assert "".join(event.text for event in rest) == "one two three four"
        [whole] = await _followed(server, None, SnapshotWhen.BEGIN)
        assert isinstance(whole.record, SnapshotFrame)
        assert msgspec.json.decode(whole.record.session)["turns"] == 2


@spec("STREAM-64")
async def test_a_client_that_returns_after_its_turn_was_pruned_receives_its_end(
    tmp_path: Path, port: int
) -> None:
    memory, state = Memory(), tmp_path / "client.db"
    async with served(make_app(ANSWER, store=MemoryStore(memory)), port=port) as server:
        async with asyncio.timeout(WAIT_S), connect(server.url, state=state) as client:
            async for event in client.send("s1", "hello"):
                if event.text:
                    break
        runner = await server.app.host.session("s1")
        await _until(lambda: not runner.state.is_live)
        at = await prune(server.app.host)
    async with (
        asyncio.timeout(WAIT_S),
        served(make_app(ANSWER, store=MemoryStore(memory)), port=port) as server,
        connect(server.url, state=state) as client,
    ):
        [turn] = await client.resume_interrupted()
        received = [event async for event in turn]
        assert [type(event.record) for event in received] == [Gone, SnapshotFrame]
        assert received[-1].id == str(at)
        assert await client.resume_interrupted() == []


class _Holding(World):
    """The real world, but for one wait, which lasts until the test ends it."""

    def __init__(self) -> None:
        self.is_held = asyncio.Event()
        self.may_continue = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        if seconds == HELD_S:
            self.is_held.set()
            await self.may_continue.wait()
        else:
            await super().sleep(seconds)


@spec("STREAM-67")
async def test_events_that_arrive_during_batching_come_in_one_frame() -> None:
    world = _Holding()
    async with served(make_app(ANSWER, world=world)) as server:
        await run_turn(server.app.host, "s1", "the first one")
        async with Socket(server.socket()) as reader, asyncio.timeout(WAIT_S):
            await reader.send({"type": "open", "coalesce_s": HELD_S})
            await reader.receive_until("welcome")
            records = await run_turn(server.app.host, "s1", "the second one")
            await world.is_held.wait()
            world.may_continue.set()
            [frame] = await reader.receive_until("turn_ended")
            assert len(frame["events"]) == len(records)


@spec("STREAM-66")
def test_a_snapshot_above_the_size_limit_omits_its_oldest_entries() -> None:
    messages = [
        (UserMessage.of(f"question {each}"), Step(Response((Text("x" * 900),)))) for each in range(20)
    ]
    state = Session(turns=20)
    for message, step in messages:
        state = msgspec.structs.replace(state, history=state.history.then(message).then(step))
    snapshot = snapshot_of("s1", state, "3-9")
    assert body_within(snapshot, 10**6) == msgspec.json.encode(snapshot)
    body = body_within(snapshot, 10_000)
    report = msgspec.json.decode(body)
    assert len(body) <= 10_000
    assert report["left_out"] == 30
    assert report["history"] == msgspec.json.decode(msgspec.json.encode(snapshot.history[30:]))
    assert len(msgspec.json.decode(body_within(snapshot, 1))["history"]) == 1
