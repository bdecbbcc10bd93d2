"""Servers that are killed around a forwarded command: it is accepted once, whatever its client has received."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sqlite3
from pathlib import Path

import asyncpg
import httpx2
import pytest

from midstream.environment import Fault
from midstream.session.records import CommandAccepted, MessageQueued, StreamOpened, TurnEnded
from tests.fault.extent import STORES, run_on_stores, select_cases
from tests.fault.stored import name_of, use_postgres
from tests.fault.workers import (
    WAIT_S,
    Worker,
    bring_into_tool,
    journal,
    lines,
    problems,
    records,
    short_pause,
    until,
    until_there,
)
from tests.spec import spec

pytestmark = pytest.mark.fault

LEASE_S = 5.0


USUAL = {"test_a_sender_that_dies_before_its_ack_leaves_an_accepted_command": STORES[1:]}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    run_on_stores(metafunc, USUAL)


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder whose store is a SQLite file, or a new schema of PostgreSQL."""
    if request.param == "postgresql":
        use_postgres(tmp_path, request.getfixturevalue("engine"))
    return tmp_path


async def _send_queued(worker: Worker) -> httpx2.Response:
    """Send a message that waits for the running turn to end, always as the same command."""
    payload = {"type": "send", "parts": [{"type": "text", "text": "more"}], "when_busy": "queue"}
    frame = {"type": "command", "seqno": 0, "payload": payload}
    return await worker.post("s", frame, connection=1, name="c")


async def _until_acknowledged(worker: Worker) -> httpx2.Response:
    """Send it again until it is acknowledged."""
    async with asyncio.timeout(WAIT_S):
        while True:
            answer = await _send_queued(worker)
            if answer.status_code == 200:
                return answer
            assert answer.status_code == 503, answer.text
            await short_pause()


async def _forwarded_rows(folder: Path) -> int:
    """Return how many forwarded commands are in the inbox."""
    name = name_of(folder)
    if not name.startswith("postgresql:"):
        with contextlib.closing(sqlite3.connect(name)) as db:
            (count,) = db.execute("select count(*) from inbox").fetchone()
            return int(count)
    url, _, schema = name.partition("&schema=")
    connection = await asyncpg.connect(url)
    try:
        return int(await connection.fetchval(f'select count(*) from "{schema}".inbox'))
    finally:
        await connection.close()


async def _until_inbox(folder: Path, *, has_commands: bool) -> None:
    async with asyncio.timeout(WAIT_S):
        while bool(await _forwarded_rows(folder)) != has_commands:
            await short_pause()


async def _until_owner_found(folder: Path, sender: Worker) -> None:
    """Wait until a server has found the other node: it refuses a second message of the session."""
    assert (await sender.send_message("s", "more")).status_code == 409


def _require_once(folder: Path) -> None:
    found = records(folder, "s")
    assert len([each for each in found if isinstance(each, MessageQueued)]) == 1
    accepted = [each for each in found if isinstance(each, CommandAccepted | StreamOpened)]
    assert len([each for each in accepted if getattr(each, "stream", "") == "k1"]) >= 1
    assert problems(folder, ["s"]) == []
    assert len([line for line in lines(folder) if line.what == "began"]) == 1, "the tool ran once"


@spec("TURN-74", "TURN-56")
@pytest.mark.parametrize(
    "point", select_cases([Fault.BEFORE_APPEND, Fault.AFTER_APPEND, Fault.AFTER_PUBLISH], 0, 1)
)
async def test_a_node_that_dies_around_the_append_of_a_forwarded_command_accepts_it_once(
    folder: Path, point: Fault
) -> None:
    async with Worker(folder, "--armed", point) as node, Worker(folder) as sender:
        await bring_into_tool(folder, node)
        await _until_owner_found(folder, sender)
        node.signal(signal.SIGUSR1)
        answer = await _send_queued(sender)
        assert answer.status_code == 200, answer.text
        assert await node.ended() == -signal.SIGKILL
        again = await _send_queued(sender)
        assert (again.status_code, again.headers["x-midstream-replayed"]) == (200, "true")
        (folder / "go").touch()
        await until_there(folder, "s", TurnEnded, TurnEnded)
    assert len({each.epoch for each in journal(folder, "s")}) == 2, "the sender has taken the session"
    _require_once(folder)


@spec("TURN-74", "TURN-56")
async def test_a_sender_that_dies_while_it_forwards_a_command_loses_and_duplicates_nothing(
    folder: Path,
) -> None:
    async with Worker(folder, "--lease", 60.0) as node, Worker(folder, "--lease", 60.0) as sender:
        await bring_into_tool(folder, node)
        await _until_owner_found(folder, sender)
        node.signal(signal.SIGSTOP)  # it decides nothing while its command is in the inbox
        asking = asyncio.ensure_future(_send_queued(sender))
        await _until_inbox(folder, has_commands=True)
        await sender.kill()
        node.signal(signal.SIGCONT)
        with pytest.raises(httpx2.HTTPError):
            await asking
        assert (await _until_acknowledged(node)).json() == {"type": "ack", "seqno": 0}
        (folder / "go").touch()
        await until_there(folder, "s", TurnEnded, TurnEnded)
    assert {each.epoch for each in journal(folder, "s")} == {1}
    _require_once(folder)


@spec("TURN-74", "TURN-56")
async def test_a_sender_that_dies_before_its_ack_leaves_an_accepted_command(folder: Path) -> None:
    async with Worker(folder) as node, Worker(folder, "--armed", Fault.BEFORE_ACK) as sender:
        await bring_into_tool(folder, node)
        await _until_owner_found(folder, sender)
        sender.signal(signal.SIGUSR1)
        with pytest.raises(httpx2.HTTPError):
            await _send_queued(sender)
        assert await sender.ended() == -signal.SIGKILL
        await until(lambda: any(isinstance(each, MessageQueued) for each in records(folder, "s")))
        again = await _send_queued(node)
        assert (again.status_code, again.headers["x-midstream-replayed"]) == (200, "true")
        (folder / "go").touch()
        await until_there(folder, "s", TurnEnded, TurnEnded)
    _require_once(folder)
