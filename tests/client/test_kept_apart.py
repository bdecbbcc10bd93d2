"""A client with its secrets in a keyring: one that answers, is locked, hangs, or has lost them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path

import pytest
from keyring.core import load_keyring

from midstream.client import Client, Event, PlaybackLost, connect
from midstream.client.secret_store import SecretFileSummary, survey
from midstream.environment import Fault, World
from midstream.errors import UnavailableError, UsageError
from midstream.session.records import TurnEnded, TurnStatus
from midstream.testing import Gate, text
from midstream.testing.fake_worlds import Crashed, FakeWorld
from tests.client.keyrings import FileKeyring, use_keyring
from tests.server.serving import Served, make_app, served
from tests.spec import spec

WAIT_S = 60.0
WORDS = "one two three"
NONE = "keyring.backends.fail.Keyring"


@pytest.fixture
def gate() -> asyncio.Event:
    return asyncio.Event()


@pytest.fixture
async def server(gate: asyncio.Event) -> AsyncIterator[Served]:
    """A server that waits for the gate before its first word."""
    async with served(make_app([[Gate(gate), *text(WORDS)]])) as server:
        yield server
        gate.set()


def _client(server: Served, folder: Path, *, world: World | None = None) -> Client:
    state, secrets = folder / "client" / "state.db", folder / "secrets.db"
    return connect(server.url, state=state, secrets=secrets, keyring=True, world=world)


async def _detach(client: Client) -> None:
    """Start a turn, and detach from it."""
    turn = client.send("s1", "hi")
    await asyncio.wait_for(anext(turn), WAIT_S)
    await turn.aclose()


async def _rest(events: AsyncGenerator[Event, None]) -> list[Event]:
    async with asyncio.timeout(WAIT_S):
        return [event async for event in events]


def _status(events: list[Event]) -> TurnStatus:
    last = events[-1].record
    assert isinstance(last, TurnEnded)
    return last.status


def _bytes_in(folder: Path) -> bytes:
    return b"".join(each.read_bytes() for each in sorted(folder.iterdir()))


@spec("STREAM-76")
async def test_the_keyring_has_the_secret_while_the_stream_lives_and_no_file_ever_does(
    server: Served, ring: FileKeyring, gate: asyncio.Event, tmp_path: Path
) -> None:
    async with _client(server, tmp_path) as client:
        turn = client.send("s1", "hi")
        await asyncio.wait_for(anext(turn), WAIT_S)
        (secret,) = ring.stored()
        written = _bytes_in(tmp_path / "client")
        gate.set()
        assert _status(await _rest(turn)) is TurnStatus.COMPLETED
        assert (ring.stored(), survey(tmp_path / "secrets.db")) == ([], SecretFileSummary())
    written += _bytes_in(tmp_path / "client")
    assert (b"s1" in written, secret.encode() in written) == (True, False)


@spec("STREAM-76")
async def test_a_turn_with_a_locked_secret_waits_and_continues_after_the_unlock(
    server: Served, ring: FileKeyring, gate: asyncio.Event, tmp_path: Path
) -> None:
    async with _client(server, tmp_path) as client:
        await _detach(client)
    async with _client(server, tmp_path) as client:
        with use_keyring(load_keyring(NONE)):
            (turn,) = await client.resume_interrupted()
            with pytest.raises(UnavailableError, match="keyring"):
                await _rest(turn.resume())
        gate.set()
        assert _status(await _rest(turn.resume())) is TurnStatus.COMPLETED
        assert await client.resume_interrupted() == []


@spec("STREAM-48", "STREAM-76")
async def test_a_turn_with_a_lost_secret_starts_with_a_snapshot(
    server: Served, ring: FileKeyring, gate: asyncio.Event, tmp_path: Path
) -> None:
    async with _client(server, tmp_path) as client:
        await _detach(client)
    ring.lose()
    async with _client(server, tmp_path) as client:
        (turn,) = await client.resume_interrupted()
        events = turn.resume()
        first = await asyncio.wait_for(anext(events), WAIT_S)
        assert isinstance(first.record, PlaybackLost)
        assert first.record.reason == "the secret of this stream is missing"
        gate.set()
        assert _status(await _rest(events)) is TurnStatus.COMPLETED
        assert await client.resume_interrupted() == []


@spec("STREAM-15", "STREAM-76")
async def test_a_cancel_with_a_locked_secret_is_stored_and_sent_later(
    server: Served, ring: FileKeyring, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with connect(server.url) as speaker:
        turn = speaker.send("s1", "hi")
        await asyncio.wait_for(anext(turn), WAIT_S)
        await _die_during_cancel(server, tmp_path)
        async with _client(server, tmp_path) as client:
            with use_keyring(load_keyring(NONE)):
                assert len(await client.resume_interrupted()) == 1
            assert "cannot be finished now" in caplog.text
            assert await client.resume_interrupted() == []
            assert _status(await _rest(turn)) is TurnStatus.CANCELLED


@spec("STREAM-48", "STREAM-76")
async def test_a_cancel_with_a_lost_secret_is_not_dropped(
    server: Served, ring: FileKeyring, tmp_path: Path
) -> None:
    async with _client(server, tmp_path) as client:
        await _detach(client)
    await _die_during_cancel(server, tmp_path)
    ring.lose()
    async with _client(server, tmp_path) as client:
        turns = await client.resume_interrupted()
        assert len(turns) == 2
        for turn in turns:
            events = turn.resume()
            first = await asyncio.wait_for(anext(events), WAIT_S)
            assert isinstance(first.record, PlaybackLost)
            await events.aclose()


def test_the_error_for_a_user_without_a_home_names_the_option(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("MIDSTREAM_HOME")
    monkeypatch.setattr(Path, "home", home)
    with pytest.raises(UsageError, match="`secrets=`"):
        connect("http://127.0.0.1:1", state=tmp_path / "state.db")
    connect("http://127.0.0.1:1", state=tmp_path / "state.db", secrets=tmp_path / "secrets.db")
    connect("http://127.0.0.1:1")


async def _die_during_cancel(server: Served, folder: Path) -> None:
    """Leave a cancel that is stored and was never sent."""
    world = FakeWorld(at=World().now())
    world.crash_at(Fault.AFTER_CHECKPOINT)
    async with _client(server, folder, world=world) as dying:
        with pytest.raises(Crashed):
            await dying.cancel("s1")
