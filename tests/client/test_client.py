"""The client as an application uses it, against the real server; a scripted peer shows behaviour that no server has."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest

from midstream.client import Client, ClientSettings, Event, PlaybackLost, connect
from midstream.client.checkpoint_file import StreamBegun
from midstream.client.transport_selection import TransportKind
from midstream.environment import Fault, World
from midstream.errors import (
    AccessError,
    ConnectionLostError,
    MidstreamError,
    SessionBusyError,
    SessionNotFoundError,
    StoreBusyError,
    StoreDamagedError,
    StreamFencedError,
    StreamNotFoundError,
    UsageError,
)
from midstream.history.messages import Finish, Outcome, Response, Text, ToolCall
from midstream.models.responses import TextDelta
from midstream.protocol.checkpoint import CommandKept
from midstream.protocol.frames import Ack, Error, Gone, Welcome
from midstream.session import records
from midstream.session.call_references import AttemptRef
from midstream.session.calls import CallPlan, OnDoubtName, Site
from midstream.session.records import CallEnded, CallStarted, Delta, StreamOpened, TurnEnded, TurnStatus
from midstream.session.turn.commands import ModelResponded
from midstream.session.turn.states import AwaitingModel
from midstream.store.memory import MemoryStore
from midstream.testing import Gate, calls, text
from midstream.testing.fake_worlds import Crashed, FakeWorld
from midstream.tools.function_tools import Tool, tool
from tests.client.http_peer import HttpPeer
from tests.client.peer import Cutter, WebSocketPeer, after_frames, after_half_a_frame
from tests.server.serving import KEYS, Served, Socket, make_app, served
from tests.spec import spec

Dial = Callable[..., Client]
Scripted = type[WebSocketPeer] | type[HttpPeer]
WAIT_S = 60.0
IMPATIENT = ClientSettings(patience_s=0.0)
CUTS_MAX = 200
LIVES_MAX = 100
CHECKPOINTS = 15
"""More than a client writes in one life."""
DEATHS = (Fault.BEFORE_CHECKPOINT, Fault.AFTER_CHECKPOINT, Fault.BEFORE_TOOL, Fault.AFTER_TOOL)
WORDS = "one two three four five six seven eight nine ten"


class Eager(World):
    """A world in which every random wait is short."""

    def chance(self) -> float:
        return 0.999


class Hand:
    """A tool that counts its effects."""

    def __init__(self, on_doubt: OnDoubtName = "unknown") -> None:
        self.done: list[str] = []

        @tool(name="push", on_doubt=on_doubt)
        def push(button: str) -> str:
            """Push a button."""
            self.done.append(button)
            return f"pushed {button}"

        self.tool: Tool = push


@pytest.fixture(params=[*TransportKind])
def way(request: pytest.FixtureRequest) -> TransportKind:
    """Every promise holds over every transport."""
    return TransportKind(request.param)


@pytest.fixture
def dial(way: TransportKind) -> Dial:
    return partial(connect, transport=way)


@pytest.fixture
def scripted(way: TransportKind) -> Scripted:
    """A server that may break the rules of a correct one."""
    return WebSocketPeer if way is TransportKind.WEBSOCKET else HttpPeer


@pytest.fixture
async def server() -> AsyncIterator[Served]:
    script = [calls(("c1", "push", '{"button":"red"}')), text(WORDS)]
    async with served(make_app(script)) as served_app:
        yield served_app


async def _all(events: AsyncIterator[Event]) -> list[Event]:
    async with asyncio.timeout(WAIT_S):
        return [event async for event in events]


@spec("STREAM-49")
async def test_the_events_of_a_turn_end_with_the_turn(dial: Dial) -> None:
    async with served(make_app([text(WORDS)])) as server, dial(server.url) as client:
        events = await _all(client.send("s1", "hi"))
        assert "".join(event.text for event in events) == WORDS
        assert [event.is_end for event in events] == [False] * (len(events) - 1) + [True]
        assert [event.id for event in events] == [f"1-{n}" for n in range(2, len(events) + 2)]
        again = await _all(client.send("s1", "and again"))
        assert again[0].id == f"1-{len(events) + 2}"


async def test_a_tool_of_the_client_runs_in_the_client(dial: Dial, server: Served) -> None:
    hand = Hand()
    async with dial(server.url, tools=[hand.tool]) as client:
        events = await _all(client.send("s1", "push it"))
    (ended,) = [event.record for event in events if isinstance(event.record, CallEnded)]
    assert (ended.result.content, ended.result.outcome, hand.done) == ("pushed red", Outcome.OK, ["red"])
    assert _status(events) is TurnStatus.COMPLETED


async def test_a_tool_of_a_cancelled_turn_is_cancelled_too(dial: Dial, server: Served) -> None:
    running, stopped = asyncio.Event(), asyncio.Event()

    async def push(button: str) -> None:
        """Push a button, for ever."""
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    async with dial(server.url, tools=[push]) as client:
        turn = client.send("s1", "push it")
        await anext(turn)
        await asyncio.wait_for(running.wait(), WAIT_S)
        await client.cancel("s1")
        async with asyncio.timeout(WAIT_S):
            async for event in turn:
                if event.is_end:
                    await stopped.wait()


async def test_a_plain_function_is_a_tool(dial: Dial, server: Served) -> None:
    done: list[str] = []

    def push(button: str) -> None:
        """Push a button."""
        done.append(button)

    async with dial(server.url, tools=[push]) as client:
        await _all(client.send("s1", "push it"))
    assert done == ["red"]


async def test_a_busy_session_is_reported_at_once(dial: Dial) -> None:
    gate = asyncio.Event()
    async with served(make_app([[Gate(gate), *text(WORDS)]])) as server, dial(server.url) as client:
        first = client.send("s1", "hi")
        await anext(first)
        assert await client.resume_interrupted() == [], "what is attached is not interrupted"
        with pytest.raises(SessionBusyError):
            await _all(client.send("s1", "me too", when_busy="refuse"))
        gate.set()
        assert _status(await _all(first)) is TurnStatus.COMPLETED


@spec("STREAM-15")
async def test_a_cancel_by_the_sender_ends_the_turn_that_it_iterates_over(dial: Dial) -> None:
    async with served(make_app([[TextDelta("half a"), Gate(asyncio.Event())]])) as server:
        async with dial(server.url) as client:
            events: list[Event] = []
            async for event in client.send("s1", "hi"):
                events.append(event)
                if event.text:
                    await asyncio.wait_for(client.cancel("s1"), WAIT_S)
        assert _status(events) is TurnStatus.CANCELLED


@spec("STREAM-15", "STREAM-26")
async def test_any_client_may_cancel(dial: Dial) -> None:
    app = make_app([[TextDelta("half a"), Gate(asyncio.Event())]])
    async with served(app) as server, dial(server.url) as speaker, dial(server.url) as other:
        turn = speaker.send("s1", "hi")
        await anext(turn)
        await asyncio.wait_for(other.cancel("s1"), WAIT_S)
        assert _status(await _all(turn)) is TurnStatus.CANCELLED
        await asyncio.wait_for(other.cancel("s1"), WAIT_S)


@spec("STREAM-25", "STREAM-26")
async def test_leaving_the_loop_detaches_and_the_next_process_receives_the_rest(
    dial: Dial, tmp_path: Path
) -> None:
    state = tmp_path / "state.db"
    gate = asyncio.Event()
    async with served(make_app([[TextDelta("half a"), Gate(gate), *text(" sentence")]])) as server:
        seen: list[Event] = []
        async with dial(server.url, state=state) as client:
            async for event in client.send("s1", "hi"):
                seen.append(event)
                if event.text:
                    break
        gate.set()
        async with dial(server.url, state=state) as client:
            (turn,) = await client.resume_interrupted()
            assert turn.session == "s1"
            rest = await _all(aiter(turn))
            assert await client.resume_interrupted() == []
    assert rest[0] == seen[-1], "the event in hand comes again"
    assert _status(rest) is TurnStatus.COMPLETED
    assert "".join(event.text for event in [*seen, *rest[1:]]) == "half a sentence"


async def test_leaving_the_loop_at_the_end_leaves_nothing_to_resume(dial: Dial, tmp_path: Path) -> None:
    async with served(make_app([text(WORDS)])) as server:
        async with dial(server.url, state=tmp_path / "state.db") as client:
            async for event in client.send("s1", "hi"):
                if event.is_end:
                    break
        async with dial(server.url, state=tmp_path / "state.db") as client:
            assert await client.resume_interrupted() == []


@spec("STREAM-30")
async def test_streams_older_than_the_look_back_are_deleted(dial: Dial, tmp_path: Path) -> None:
    async with served(make_app([[Gate(asyncio.Event())]])) as server:
        async with dial(server.url, state=tmp_path / "s.db", world=FakeWorld(at=1000.0)) as client:
            await anext(client.send("s1", "hi"))
        async with dial(server.url, state=tmp_path / "s.db", world=FakeWorld(at=1100.0)) as client:
            assert len(await client.resume_interrupted(look_back_s=101.0)) == 1
            assert await client.resume_interrupted(look_back_s=99.0) == []
            assert await client.resume_interrupted(look_back_s=101.0) == []


@spec("STREAM-30")
async def test_a_stream_without_any_command_is_deleted(dial: Dial, tmp_path: Path) -> None:
    async with dial("http://127.0.0.1:1", state=tmp_path / "s.db") as client:
        await client._file.write("stream-1", [StreamBegun("s1", "secret")])
        assert await client.resume_interrupted() == []
        assert await client._file.streams() == []


async def test_an_unacknowledged_cancel_is_sent_again(dial: Dial, tmp_path: Path) -> None:
    state = tmp_path / "state.db"
    async with served(make_app([[Gate(asyncio.Event())]])) as server, dial(server.url) as speaker:
        turn = speaker.send("s1", "hi")
        await anext(turn)
        async with dial(server.url, state=state, world=_dying(Fault.AFTER_CHECKPOINT)) as client:
            with pytest.raises(Crashed):
                await client.cancel("s1")
        async with dial(server.url, state=state) as client:
            assert await client.resume_interrupted() == []
            assert _status(await _all(turn)) is TurnStatus.CANCELLED


async def _detach_and_damage(dial: Dial, url: str, state: Path) -> None:
    """Leave a turn, and damage the stored numbers of its commands."""
    async with dial(url, state=state) as client:
        turn = client.send("s1", "hi")
        await anext(turn)
        await turn.aclose()
    _damage(state, "UPDATE stream SET next_seqno = 'two'; DELETE FROM command")


def _damage(state: Path, change: str) -> None:
    with contextlib.closing(sqlite3.connect(state)) as db:
        db.executescript(change)


@spec("STREAM-48")
async def test_an_unplayable_command_is_replaced_by_a_snapshot_and_the_rest_follows(
    dial: Dial, tmp_path: Path
) -> None:
    state, gate = tmp_path / "state.db", asyncio.Event()
    async with served(make_app([[TextDelta("half a"), Gate(gate), *text(" sentence")]])) as server:
        await _detach_and_damage(dial, server.url, state)
        async with dial(server.url, state=state) as client:
            (turn,) = await client.resume_interrupted()
            events = aiter(turn)
            first = await asyncio.wait_for(anext(events), WAIT_S)
            assert isinstance(first.record, PlaybackLost)
            assert "is damaged" in first.record.reason
            session = msgspec.json.decode(first.record.session)
            assert (session["event_id"], session["turns"]) == (first.id, 1)
            gate.set()
            rest = await _all(events)
            assert _status(rest) is TurnStatus.COMPLETED
            assert _positions([first, *rest]) == list(range(_position(first), _position(rest[-1]) + 1))
            assert await client.resume_interrupted() == []


@spec("STREAM-48")
async def test_a_lost_playback_is_reported_until_it_was_received_and_an_idle_session_has_no_more(
    tmp_path: Path,
) -> None:
    state, gate = tmp_path / "state.db", asyncio.Event()
    async with served(make_app([[Gate(gate), *text(WORDS)]])) as server:
        await _detach_and_damage(connect, server.url, state)
        gate.set()
        async with connect(server.url) as other:
            async for event in other.follow("s1", "0-0"):
                if event.is_end:
                    break
        async with connect(server.url, state=state) as client:
            (turn,) = await client.resume_interrupted()
            events = turn.resume()
            assert isinstance((await anext(events)).record, PlaybackLost)
            await events.aclose()
            (turn,) = await client.resume_interrupted()
            (only,) = await _all(aiter(turn))
            assert isinstance(only.record, PlaybackLost)
            assert await client.resume_interrupted() == []


@spec("STREAM-48")
async def test_an_unreadable_playback_without_any_event_is_an_error(tmp_path: Path) -> None:
    async with served(make_app()) as server, connect(server.url, state=tmp_path / "s.db") as client:
        command = CommandKept(0, b"what is this")
        await client._file.write("stream-1", [StreamBegun("s1", "secret"), command])
        (turn,) = await client.resume_interrupted()
        with pytest.raises(StoreDamagedError, match="send the message again"):
            await _all(aiter(turn))
        assert await client.resume_interrupted() == []


async def test_a_reader_receives_the_turns_of_others(dial: Dial) -> None:
    app = make_app([text(WORDS)])
    async with served(app) as server, dial(server.url) as client, dial(server.url) as reader:
        events = await _all(client.send("s1", "hi"))
        read: list[Event] = []
        async with asyncio.timeout(WAIT_S):
            async for event in reader.follow("s1", "0-0"):
                read.append(event)
                if event.is_end:
                    break
        assert read[-len(events) :] == events
        later = reader.follow("s1", events[-2].id)
        assert await anext(later) == events[-1]
        await later.aclose()


@spec("STREAM-58")
@pytest.mark.parametrize("beginning", ["0", "0-0"])
async def test_zero_is_the_start_of_a_session(
    dial: Dial, server: Served, way: TransportKind, beginning: str
) -> None:
    hand = Hand()
    async with dial(server.url, tools=[hand.tool]) as client:
        await _all(client.send("s1", "push it"))
        async with contextlib.aclosing(client.follow("s1", beginning)) as events:
            assert (await anext(aiter(events))).id == "1-1"
    lines = (await server.http.get(f"/v1/sessions/s1/records?after={beginning}")).text.splitlines()
    assert json.loads(lines[0])["id"] == "1-1"
    if way is TransportKind.WEBSOCKET:
        async with Socket(server.socket("s1", query=f"?after={beginning}")) as socket:
            await socket.receive_until("epoch_started")
    else:
        shown = {**KEYS, "accept": "text/event-stream", "last-event-id": beginning}
        path = "events" if way is TransportKind.SSE else "poll?n=0"
        async with server.http.stream("GET", f"/v1/sessions/s2/{path}", headers=shown) as answer:
            assert answer.status_code == 200, "one that has seen nothing may begin a session"


async def test_an_unknown_session_cannot_be_followed(dial: Dial, server: Served) -> None:
    async with dial(server.url) as client:
        with pytest.raises(SessionNotFoundError):
            await _all(client.follow("nobody"))
        with pytest.raises(MidstreamError, match="event id"):
            await _all(client.follow("s1", "nonsense"))
        with pytest.raises(UsageError):
            await _all(client.send("", "hi"))
        with pytest.raises(UsageError, match="a session needs an id"):
            await _all(client.follow(""))


def test_an_invalid_url_is_refused_at_once() -> None:
    with pytest.raises(UsageError):
        connect("localhost:8000")


@pytest.mark.parametrize(
    "headers", [{"x-a": "b\r\nc: d"}, {"x-a": "\u20ac"}, {"x-a": "secret\n"}, {"x a": "b"}, {"": "b"}]
)
def test_values_that_no_request_can_carry_are_refused_at_once_and_not_retried(
    headers: dict[str, str],
) -> None:
    with pytest.raises(UsageError) as caught:
        connect("http://127.0.0.1:1", headers=headers)
    assert "secret" not in str(caught.value)


async def test_one_state_file_serves_one_process_at_a_time(tmp_path: Path) -> None:
    async with connect("http://127.0.0.1:1", state=tmp_path / "s.db"):
        with pytest.raises(StoreBusyError):
            await connect("http://127.0.0.1:1", state=tmp_path / "s.db").__aenter__()


# --- the network ----------------------------------------------------------------------------------------------


@spec("STREAM-14", "STREAM-21")
@pytest.mark.parametrize(
    ("way", "step"),
    [
        *((way, 401) for way in TransportKind),
        pytest.param(TransportKind.WEBSOCKET, 53, marks=pytest.mark.long),
    ],
)
async def test_a_turn_survives_a_cut_at_every_offset(dial: Dial, step: int) -> None:
    script = [calls(("c1", "push", '{"button":"red"}')), text(WORDS)]
    async with served(make_app(script)) as server, Cutter(server.url).listening() as wire:
        for cut_after in range(1, CUTS_MAX * step, step):
            hand = Hand()
            wire.connections, wire.cuts, wire.cut_after = 0, 0, [cut_after, cut_after // 2]
            async with dial(wire.url, tools=[hand.tool], world=Eager()) as client:
                events = await _all(client.send(f"s{cut_after}", "hi"))
            _check_whole(events, hand)
            if wire.cuts == 0:
                break
        assert (cut_after > 2000, wire.cuts) == (True, 0), "it was cut up to the last byte"


@spec("STREAM-14", "STREAM-21")
async def test_a_restarted_server_is_reached_again(dial: Dial) -> None:
    store = MemoryStore()
    reconnecting: list[tuple[str, bool]] = []
    first = make_app([[TextDelta("half a"), Gate(asyncio.Event())]], store=store)
    second = make_app([text("a whole sentence")], store=store)
    async with (
        served(first) as one,
        Cutter(one.url).listening() as wire,
        dial(wire.url, on_reconnecting=lambda *values: reconnecting.append(values)) as client,
    ):
        events: list[Event] = []
        turn = client.send("s1", "hi")
        while not events or not events[-1].text:
            events.append(await asyncio.wait_for(anext(turn), WAIT_S))
        one.stop.set()
        await asyncio.wait_for(asyncio.shield(one.serving), WAIT_S)
        async with served(second) as two:
            wire.target = Cutter(two.url).target
            events += await _all(turn)
    assert _status(events) is TurnStatus.COMPLETED
    assert _positions(events) == list(range(2, len(events) + 2))
    last = max(event.record.attempt for event in events if isinstance(event.record, Delta))
    texts = [
        event.text for event in events if isinstance(event.record, Delta) and event.record.attempt == last
    ]
    assert "".join(texts) == "a whole sentence"
    assert (reconnecting[0], reconnecting[-1]) == (("s1", True), ("s1", False))


@spec("STREAM-29")
async def test_an_unreachable_server_exhausts_the_patience_and_loses_nothing(tmp_path: Path) -> None:
    async with connect("http://127.0.0.1:1", state=tmp_path / "s.db", settings=IMPATIENT) as client:
        with pytest.raises(ConnectionLostError):
            await _all(client.send("s1", "hi"))
        assert [turn.session for turn in await client.resume_interrupted()] == ["s1"]


# --- a client that dies ------------------------------------------------------------------------------------------


@spec("STREAM-11", "STREAM-18", "STREAM-24")
@pytest.mark.parametrize(
    ("way", "point", "policy"),
    [
        *((TransportKind.WEBSOCKET, point, policy) for point in DEATHS for policy in ("unknown", "rerun")),
        (TransportKind.SSE, Fault.AFTER_CHECKPOINT, "unknown"),
        (TransportKind.POLL, Fault.AFTER_TOOL, "rerun"),
    ],
)
async def test_a_client_that_dies_at_any_point_is_continued_by_the_next(
    dial: Dial, tmp_path: Path, point: Fault, policy: OnDoubtName
) -> None:
    script = [calls(("c1", "push", '{"button":"red"}')), text("one two")]
    async with served(make_app(script)) as server:
        for count in range(1, LIVES_MAX):
            hand, seen, world = Hand(policy), dict[str, Event](), _dying(point, count)
            session, state = f"s{count}", tmp_path / f"{count}.db"
            first = dial(server.url, state=state, tools=[hand.tool], world=world)
            await _live(first, session, seen)
            if not world.is_dead:
                assert (_status([*seen.values()]), hand.done) == (TurnStatus.COMPLETED, ["red"])
                break
            await _second_life(dial, server, state, hand, seen)
            _check_outcome([*seen.values()], hand, policy)
        assert 1 < count < LIVES_MAX - 1


@spec("STREAM-48")
@pytest.mark.parametrize(
    "change",
    [
        "UPDATE command SET payload = x'00'",
        "DELETE FROM command",
        "UPDATE call SET plan = 'what'",
        "UPDATE stream SET position = 'what'",
        "UPDATE call SET result = substr(result, 1, 9)",
    ],
)
async def test_a_damaged_row_loses_no_stored_outcome(tmp_path: Path, change: str) -> None:
    script = [calls(("c1", "push", '{"button":"red"}')), text("one two")]
    hand, seen, state = Hand(), dict[str, Event](), tmp_path / "s.db"
    async with served(make_app(script)) as server:
        for life in range(1, LIVES_MAX):  # until the process dies right after the outcome was stored
            hand, seen, state = Hand(), {}, tmp_path / f"{life}.db"
            # The number of earlier checkpoints depends on timing: each number is tried several times.
            count = life % CHECKPOINTS + 1
            first = connect(
                server.url, state=state, tools=[hand.tool], world=_dying(Fault.AFTER_CHECKPOINT, count)
            )
            await _live(first, f"s{life}", seen)
            with contextlib.closing(sqlite3.connect(state)) as db:
                stored = db.execute("SELECT count(*) FROM call WHERE result IS NOT NULL").fetchone()
                unsent = db.execute("SELECT count(*) FROM command WHERE seqno > 0").fetchone()
            if (stored, unsent) == ((1,), (1,)):
                break
            await _second_life(connect, server, state, hand, seen)
        assert life < LIVES_MAX - 1
        _damage(state, change)
        await _second_life(connect, server, state, hand, seen)
    (result,) = [each.record.result for each in seen.values() if isinstance(each.record, CallEnded)]
    assert (result.content, result.outcome, hand.done) == ("pushed red", Outcome.OK, ["red"])


def _check_outcome(seen: list[Event], hand: Hand, policy: str) -> None:
    """Assert that a tool that may not run again ran at most once, and an unknown outcome was sent to the model."""
    results = [each.record.result for each in seen if isinstance(each.record, CallEnded)]
    if not seen:
        assert hand.done == [], "no command was sent before the first write"
    elif policy == "unknown":
        assert [result.outcome for result in results] in ([Outcome.UNKNOWN], [Outcome.OK])
        assert hand.done in ([], ["red"])
        assert results[0].outcome is Outcome.UNKNOWN or hand.done == ["red"]
    else:
        assert [result.content for result in results] == ["pushed red"]
        assert hand.done in (["red"], ["red", "red"])


async def _second_life(dial: Dial, server: Served, state: Path, hand: Hand, seen: dict[str, Event]) -> None:
    async with dial(server.url, state=state, tools=[hand.tool]) as client:
        turns = await client.resume_interrupted()
        for turn in turns:
            async with asyncio.timeout(WAIT_S):
                async for event in turn:
                    seen.setdefault(event.id, event)
        assert await client.resume_interrupted() == []
    if turns:
        assert _positions([*seen.values()]) == list(range(2, len(seen) + 2))
        assert _status([*seen.values()]) is TurnStatus.COMPLETED


async def _live(client: Client, session: str, seen: dict[str, Event]) -> None:
    """Send until the turn or the process ends."""
    with contextlib.suppress(Crashed):
        async with client, asyncio.timeout(WAIT_S):
            async for event in client.send(session, "hi"):
                seen[event.id] = event


# --- beyond a correct server ---------------------------------------------------------------------------------------


async def test_a_frame_that_breaks_in_the_middle_is_received_again(dial: Dial, scripted: Scripted) -> None:
    script = after_half_a_frame(Welcome("", "1-1", "1-1"))
    async with scripted(script).serving() as peer, dial(peer.url) as client:
        assert _status(await _turn_at(peer, client)) is TurnStatus.COMPLETED


@pytest.mark.parametrize(
    "sent",
    [
        [Ack(0)],
        [Welcome("", "1-1", "1-1"), Ack(9)],
        [Welcome("", "1-1", "1-1"), Welcome("", "1-1", "1-1")],
        [Welcome("", "1-1", "1-1"), b"not json"],
        [Welcome("", "1-1", "1-1"), b'{"type":"events","events":[{"id":"1-9","record":{}}]}'],
        [Welcome("", "1-1", "1-1"), b'{"type":"unheard of"}'],
        [Error("draining", "restarting", "later")],
        [Error("store_full", "no space is left", "later", seqno=0, retry_after_s=0.0)],
    ],
)
async def test_a_server_that_breaks_the_protocol_is_disconnected_and_tried_again(
    dial: Dial, scripted: Scripted, sent: list[Ack | bytes]
) -> None:
    async with scripted(after_frames(*sent)).serving() as peer, dial(peer.url) as client:
        assert _status(await _turn_at(peer, client)) is TurnStatus.COMPLETED


@spec("STREAM-8", "STREAM-28")
@pytest.mark.parametrize(
    ("error", "kind", "is_kept"),
    [
        (Error("stream_fenced", "newer"), StreamFencedError, True),
        (Error("access", "log in"), AccessError, True),
        (Error("stream_not_found", "forgotten"), StreamNotFoundError, False),
        (Error("session_busy", "turn 1", "later", seqno=0), SessionBusyError, False),
    ],
)
async def test_a_classified_refusal_is_raised_as_its_type(
    dial: Dial, scripted: Scripted, error: Error, kind: type[MidstreamError], *, is_kept: bool
) -> None:
    async with (
        scripted(after_frames(Welcome("", "1-1", "1-1"), error)).serving() as peer,
        dial(peer.url) as client,
    ):
        with pytest.raises(kind):
            await _all(client.send("s1", "hi"))
        assert (client.is_reconnecting("s1"), len(await client.resume_interrupted())) == (False, is_kept)
    assert len(peer.requests) == 1, "it was asked once, and not again"


@spec("STREAM-107")
async def test_a_turn_survives_a_foreign_answer_in_the_servers_place(dial: Dial, scripted: Scripted) -> None:
    script = after_frames(Welcome("", "1-1", "1-1"))
    async with scripted(script, 404).serving() as peer, dial(peer.url) as client:
        assert _status(await _turn_at(peer, client)) is TurnStatus.COMPLETED


@spec("STREAM-107")
async def test_a_stored_stream_survives_a_foreign_answer_in_the_servers_place(
    dial: Dial, scripted: Scripted, tmp_path: Path
) -> None:
    state = tmp_path / "state.db"
    async with scripted().serving() as peer:
        async with (
            dial(peer.url, state=state) as client,
            contextlib.aclosing(client.send("s1", "hi")) as turn,
        ):
            await asyncio.wait_for(anext(turn), WAIT_S)
        peer._scripts = [404]
        async with dial(peer.url, state=state) as client:
            (left,) = await client.resume_interrupted()
            answering = asyncio.create_task(_answer(peer))
            assert _status(await _all(aiter(left))) is TurnStatus.COMPLETED
            await answering


@pytest.mark.parametrize("status", [401, 403])
async def test_an_http_refusal_is_raised_and_nothing_is_lost(
    dial: Dial, scripted: Scripted, status: int
) -> None:
    async with scripted(status).serving() as peer, dial(peer.url, headers={"authorization": "x"}) as client:
        with pytest.raises(AccessError):
            await _all(client.send("s1", "hi"))
        (turn,) = await client.resume_interrupted()
        answering = asyncio.create_task(_answer(peer))
        assert _status(await _all(aiter(turn))) is TurnStatus.COMPLETED
        await answering
    assert [request.headers["authorization"] for request in peer.requests] == ["x", "x"]


@spec("STREAM-9")
async def test_a_degraded_server_is_used_once_and_nothing_is_stored(dial: Dial, scripted: Scripted) -> None:
    peer = scripted(degraded_reason="no disk")
    hand = Hand()
    async with peer.serving(), dial(peer.url, tools=[hand.tool]) as client:
        turn = client.send("s1", "hi")
        first = await asyncio.wait_for(anext(turn), WAIT_S)
        assert isinstance(first.record, StreamOpened)
        await _call_push(peer)
        async with asyncio.timeout(WAIT_S):
            while not isinstance((await anext(turn)).record, CallEnded):
                pass
        assert hand.done == ["red"], "what needs no memory works"
        assert await client._file.streams() == []
        assert await client._file.calls(first.record.stream) == []
        peer.cut()
        with pytest.raises(ConnectionLostError):
            await _all(turn)
        assert not client.is_reconnecting("s1")
    assert len(peer.requests) == 1


@spec("STREAM-23")
async def test_lost_events_are_reported_as_void(dial: Dial, scripted: Scripted) -> None:
    async with scripted().serving() as peer, dial(peer.url) as client:
        turn = client.send("s1", "hi")
        seen = [await asyncio.wait_for(anext(turn), WAIT_S) for _ in range(3)]
        model = peer.host.session.turn
        assert isinstance(model, AwaitingModel)
        delta = Delta(1, 1, 1, 0, "text", "lost with the power")
        peer.host.append((delta,))
        await peer.feed()
        seen += [await asyncio.wait_for(anext(turn), WAIT_S) for _ in range(2)]
        assert seen[-1].text == "lost with the power"
        peer.host.cut_power(at=1.0)
        peer.cut()
        gone = await asyncio.wait_for(anext(turn), WAIT_S)
        assert isinstance(gone.record, Gone)
        kept = [event for event in seen if _position(event) <= _position(gone)]
        answering = asyncio.create_task(_answer(peer))
        whole = [*kept, *await _all(turn)]
        await answering
        found = [Event(str(event_id), records.decode(body)) for event_id, body in peer.host.line[1:]]
        assert whole == found


async def _turn_at(peer: WebSocketPeer | HttpPeer, client: Client) -> list[Event]:
    answering = asyncio.create_task(_answer(peer))
    events = await _all(client.send("s1", "hi"))
    await answering
    return events


async def _call_push(peer: WebSocketPeer | HttpPeer) -> None:
    """Let the peer's model call the client's tool."""
    response = Response((ToolCall("c1", "push", '{"button":"red"}'),), Finish.CALLS)
    plans = (CallPlan("c1", "digest", Site.CLIENT),)
    peer.host.do(ModelResponded(AttemptRef(1, 1, 1), response, plans), at=1.0)
    await peer.feed()


async def _answer(peer: WebSocketPeer | HttpPeer) -> None:
    """Let the peer's model answer as soon as a response is requested."""
    async with asyncio.timeout(WAIT_S):
        while not isinstance(turn := peer.host.session.turn, AwaitingModel):  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0)
    response = Response((Text("done"),))
    peer.host.do(ModelResponded(turn.ref, response), at=1.0)
    await peer.feed()


def _check_whole(events: list[Event], hand: Hand) -> None:
    assert _positions(events) == list(range(2, len(events) + 2))
    assert _status(events) is TurnStatus.COMPLETED
    assert "".join(event.text for event in events) == WORDS
    assert len([event for event in events if isinstance(event.record, CallStarted)]) == 1
    assert hand.done == ["red"]


def _dying(point: Fault, count: int = 1) -> FakeWorld:
    world = FakeWorld(at=World().now())
    world.crash_at(point, count=count)
    return world


def _status(events: list[Event]) -> TurnStatus:
    last = events[-1].record
    assert isinstance(last, TurnEnded)
    return last.status


def _position(event: Event) -> int:
    return int(event.id.partition("-")[2])


def _positions(events: list[Event]) -> list[int]:
    return sorted(_position(event) for event in events)


@pytest.mark.parametrize("steps", range(1, 6))
async def test_a_cancelled_close_still_releases_the_state_file(tmp_path: Path, steps: int) -> None:
    async def open_client() -> Client:
        client = connect("http://127.0.0.1:1", state=tmp_path / "state.db", secrets=tmp_path / "secrets.db")
        return await client.__aenter__()

    first = await open_client()
    closing = asyncio.create_task(first.close())
    for _ in range(steps):
        await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait({closing}, timeout=60)
    async with asyncio.timeout(60):
        while True:
            try:
                second = await open_client()
            except StoreBusyError:
                continue
            break
    await second.close()
