"""Simple programs receive the whole answer, each word once, whichever process is killed in the middle of it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest

from midstream.client import Event, connect
from midstream.client.replays import answer_until
from midstream.client.sync import connect as connect_in_a_script
from midstream.errors import SessionNotFoundError, TurnFailedError
from midstream.protocol.events import EventReader
from midstream.protocol.frames import EventId, Gone
from midstream.session.records import Delta
from tests.cli.processes import Serving
from tests.house.source import ROOT

WAIT_S = 60.0
LONG = "".join(f"w{number} " for number in range(100)) + "end"

DYING = """
import asyncio, os, signal, sys
from midstream.client import connect

async def main(url, state):
    async with connect(url, state=state) as client:
        async for event in client.send("s1", "long"):
            if "w20" in event.transcript:
                os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
def server(tmp_path: Path, port: int) -> Iterator[Serving]:
    with Serving(tmp_path, port=port) as serving:
        yield serving


@pytest.mark.fault
async def test_each_word_arrives_once_although_the_server_is_killed_in_mid_answer(
    server: Serving, tmp_path: Path, port: int
) -> None:
    """Three programs: one sends, one shows transcripts, one concatenates deltas."""
    shown, words, revived = "", "", None
    async with asyncio.timeout(WAIT_S), connect(server.url) as client:
        asking = asyncio.ensure_future(client.ask("asked", "long"))
        async for event in client.send("streamed", "long"):
            shown = event.transcript if event.replaces else shown + event.text
            words += event.text
            assert shown == event.transcript
            if revived is None and "w20" in shown:
                server.kill()
                revived = await asyncio.to_thread(Serving, tmp_path, port=port)
        assert await asking == LONG
    assert revived is not None
    with revived:
        assert (shown, words) == (LONG, LONG)


@pytest.mark.fault
@pytest.mark.parametrize("is_script", [False, True])
async def test_the_process_after_a_killed_client_has_the_whole_answer(
    server: Serving, tmp_path: Path, *, is_script: bool
) -> None:
    state = tmp_path / "state.db"
    arguments = (sys.executable, "-c", DYING, server.url, str(state))
    dying = await asyncio.create_subprocess_exec(*arguments, cwd=ROOT, env=os.environ)
    assert await asyncio.wait_for(dying.wait(), WAIT_S) == -signal.SIGKILL

    def resume() -> str:
        with connect_in_a_script(server.url, state=state) as client:
            (turn,) = client.resume_interrupted()
            return turn.answer()

    if is_script:
        assert await asyncio.wait_for(asyncio.to_thread(resume), WAIT_S) == LONG
        return
    async with asyncio.timeout(WAIT_S), connect(server.url, state=state) as client:
        (turn,) = await client.resume_interrupted()
        events = [event async for event in turn]
    shown = ""
    for event in events:
        shown = event.transcript if event.replaces else shown + event.text
        assert shown == event.transcript
    assert events[0].transcript.startswith("w0 w1 "), "what the killed process had received is there at once"
    assert shown == LONG


@pytest.mark.slow
async def test_a_failed_turn_is_an_error_with_its_reason(server: Serving) -> None:
    async with asyncio.timeout(WAIT_S), connect(server.url) as client:
        with pytest.raises(TurnFailedError, match="no such key") as failed:
            await client.ask("s1", "fail")
    assert (failed.value.status, failed.value.cause) == ("failed", "model_rejected")

    def ask() -> str:
        with connect_in_a_script(server.url) as client:
            return client.ask("s2", "look")

    assert await asyncio.to_thread(ask) == "I will look.\n\nThere is nothing there."


async def replay(*events: Event, error: SessionNotFoundError | None = None) -> AsyncGenerator[Event, None]:
    for event in events:
        yield event
    if error is not None:
        raise error


async def test_handled_events_are_read_up_to_the_cursor() -> None:
    reading = EventReader()
    events = [reading.event(f"1-{number}", Delta(1, 1, 1, 0, "text", f"{number} ")) for number in range(2, 6)]
    end = EventId(1, 3)
    assert (await answer_until(replay(*events), end)).now.transcript == "2 3 "
    assert (await answer_until(replay(*events[:1], *events[3:]), end)).now.transcript == "2 "
    gone = reading.event("1-1", Gone("1-1", "a power cut"))
    assert (await answer_until(replay(gone, *events), end)).now.transcript == ""
    missing = SessionNotFoundError("no session")
    assert (await answer_until(replay(events[0], error=missing), end)).now.transcript == "2 "
