"""An application's settings for its streams apply immediately."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import pytest

from midstream.client import ClientSettings, Event, InterruptedTurn, connect
from midstream.client.secret_store import SecretFileSummary, survey
from midstream.client.transport_selection import TransportName
from midstream.environment import World
from midstream.errors import ConnectionLostError, UsageError
from midstream.protocol.stream_settings import StreamSettings
from midstream.session.records import CallEnded, TurnEnded
from midstream.testing import Gate, calls, text
from midstream.testing.fake_worlds import FakeWorld
from midstream.testing.scripted_model import ScriptedStep
from tests.client.peer import Cutter
from tests.server.serving import make_app, served
from tests.spec import spec

WAIT_S = 60.0
WORDS = "one two three four five six"


def _held(gate: asyncio.Event) -> list[ScriptedStep]:
    """Return a response that waits before its first word."""
    return [Gate(gate), *text(WORDS)]


async def _first(events: AsyncGenerator[Event, None]) -> Event:
    return await asyncio.wait_for(anext(events), WAIT_S)


@pytest.mark.parametrize(
    "wrong", [{"look_back_s": -1.0}, {"look_back_s": 1e9}, {"patience_s": -1.0}, {"stall_after_s": 0.0}]
)
def test_numbers_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        ClientSettings(**wrong)  # type: ignore[arg-type]  # each is a number


@spec("STREAM-78")
async def test_without_recovery_nothing_is_stored_and_it_can_be_switched_at_run_time(
    tmp_path: Path,
) -> None:
    gate = asyncio.Event()
    state, secrets = tmp_path / "s.db", tmp_path / "secrets.db"
    async with (
        served(make_app([_held(gate)] * 2)) as server,
        connect(server.url, state=state, secrets=secrets) as client,
    ):
        kept = client.send("kept", "hi")
        await _first(kept)
        client.settings = ClientSettings(is_recovery_on=False)
        unkept = client.send("unkept", "hi")
        await _first(unkept)
        assert [each.session for each in await client._file.streams()] == ["kept"]
        assert survey(secrets).in_file == 1
        await unkept.aclose()
        await kept.aclose()
        assert await client.resume_interrupted() == []
        client.settings = ClientSettings()
        assert [turn.session for turn in await client.resume_interrupted()] == ["kept"]
        gate.set()
    assert b"unkept" not in _read(state)


def _read(path: Path) -> bytes:
    return path.read_bytes()


@spec("STREAM-78")
async def test_a_stream_without_a_checkpoint_survives_lost_connections_and_its_tools_run_once(
    tmp_path: Path,
) -> None:
    done: list[str] = []

    def push(button: str) -> str:
        """Push a button."""
        done.append(button)
        return "pushed"

    off = ClientSettings(is_recovery_on=False)
    script = [calls(("c1", "push", '{"button":"red"}')), text(WORDS)]
    async with served(make_app(script)) as server, Cutter(server.url).listening() as wire:
        wire.cut_after = [1200, 900]
        async with connect(wire.url, state=tmp_path / "s.db", tools=[push], settings=off) as client:
            events = await asyncio.wait_for(_all(client.send("s1", "push it")), WAIT_S)
        assert wire.cuts > 0
    assert isinstance(events[-1].record, TurnEnded)
    assert (len([each for each in events if isinstance(each.record, CallEnded)]), done) == (1, ["red"])


async def test_the_look_back_of_the_settings_is_the_default(tmp_path: Path) -> None:
    gate = asyncio.Event()
    state, secrets = tmp_path / "s.db", tmp_path / "secrets.db"
    async with served(make_app([_held(gate)])) as server:
        async with connect(server.url, state=state, secrets=secrets) as client:
            turn = client.send("s1", "hi")
            await _first(turn)
            await turn.aclose()
        later = FakeWorld(at=World().now() + 100.0)
        async with connect(server.url, state=state, secrets=secrets, world=later) as client:
            client.settings = ClientSettings(look_back_s=1000.0)
            assert len(await client.resume_interrupted()) == 1
            client.settings = ClientSettings(look_back_s=10.0)
            assert len(await client.resume_interrupted(look_back_s=1000.0)) == 1
            assert survey(secrets) == SecretFileSummary(in_file=1)
            assert await client.resume_interrupted() == []
            client.settings = ClientSettings(look_back_s=1000.0)
            assert await client.resume_interrupted() == [], "it was cleared"
            assert survey(secrets) == SecretFileSummary()
        gate.set()


async def test_a_changed_patience_applies_to_later_streams(tmp_path: Path) -> None:
    async with connect("http://127.0.0.1:1", state=tmp_path / "s.db") as client:
        client.settings = ClientSettings(patience_s=0.0)
        with pytest.raises(ConnectionLostError):
            await asyncio.wait_for(_all(client.send("s1", "hi")), WAIT_S)
        assert len(await client.resume_interrupted()) == 1


async def _all(events: AsyncGenerator[Event, None]) -> list[Event]:
    return [event async for event in events]


@spec("STREAM-30", "STREAM-79")
async def test_interrupted_turns_are_resumed_at_the_start_concurrently(tmp_path: Path) -> None:
    gate = asyncio.Event()
    state, seen = tmp_path / "s.db", dict[str, list[Event]]()
    both_run = asyncio.Barrier(2)
    async with served(make_app([_held(gate)] * 2)) as server:
        async with connect(server.url, state=state) as client:
            for session in ("s1", "s2"):
                turn = client.send(session, "hi")
                await _first(turn)
                await turn.aclose()
        ended = asyncio.Event()

        async def resume(turn: InterruptedTurn) -> None:
            seen[turn.session] = []
            await both_run.wait()
            gate.set()
            async for event in turn:
                seen[turn.session].append(event)
            if all(events and events[-1].is_end for events in seen.values()):
                ended.set()

        async with connect(server.url, state=state, on_interrupted=resume) as client:
            await asyncio.wait_for(ended.wait(), WAIT_S)
            assert await client.resume_interrupted() == []
    assert sorted(seen) == ["s1", "s2"]
    assert {"".join(event.text for event in events) for events in seen.values()} == {WORDS}


@spec("STREAM-79")
async def test_errors_of_resumption_are_raised_at_the_end_and_leaving_detaches(tmp_path: Path) -> None:
    gate = asyncio.Event()
    state = tmp_path / "s.db"
    async with served(make_app([_held(gate)])) as server:
        async with connect(server.url, state=state) as client:
            turn = client.send("s1", "hi")
            await _first(turn)
            await turn.aclose()
        begun = asyncio.Event()

        async def wait_for_ever(turn: InterruptedTurn) -> None:
            async for _ in turn:
                begun.set()

        async with connect(server.url, state=state, on_interrupted=wait_for_ever):
            await asyncio.wait_for(begun.wait(), WAIT_S)

        async def fail(turn: InterruptedTurn) -> None:
            begun.set()
            raise LookupError(turn.session)

        begun.clear()
        with pytest.raises(LookupError, match="s1"):
            async with connect(server.url, state=state, on_interrupted=fail):
                await asyncio.wait_for(begun.wait(), WAIT_S)
        gate.set()


@spec("STREAM-47")
@pytest.mark.parametrize("transport", ["websocket", "sse", "poll"])
async def test_a_stall_is_reported_before_the_first_heartbeat(transport: TransportName) -> None:
    gate, stalled = asyncio.Event(), asyncio.Event()
    app = make_app([_held(gate)])
    app.settings = StreamSettings(heartbeat_s=300.0)
    waits: list[tuple[str, str]] = []

    def note(session: str, waiting_on: str) -> None:
        waits.append((session, waiting_on))
        stalled.set()

    settings = ClientSettings(stall_after_s=1.0)
    async with (
        served(app) as server,
        connect(server.url, transport=transport, settings=settings, on_stalled=note) as client,
    ):
        events = client.send("s1", "hi")
        reading = asyncio.create_task(_last(events))
        await asyncio.wait_for(stalled.wait(), WAIT_S)
        gate.set()
        await asyncio.wait_for(reading, WAIT_S)
    assert waits == [("s1", "model")]


async def _last(events: AsyncGenerator[Event, None]) -> Event:
    async with aclosing(events) as reading:
        async for event in reading:
            last = event
    return last
