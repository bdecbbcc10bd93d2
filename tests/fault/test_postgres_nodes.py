"""Faults of PostgreSQL under several servers: connections that are terminated, a restart, a crash.

`test_nodes` has the deaths of servers, on this store too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from midstream.client import Event, connect
from midstream.history.messages import Outcome
from midstream.protocol.frames import Gone
from midstream.session.records import AttemptStarted, CallEnded, Delta, ResponseCompleted, TurnEnded
from tests.fault.client_process import HastyWorld
from tests.fault.stored import use_postgres
from tests.fault.workers import (
    WAIT_S,
    Worker,
    ends,
    executions,
    in_the_tool,
    lines,
    problems,
    records,
    until,
    until_there,
)
from tests.postgres_engine import PURPOSES, Engine, read_sql, running_engine, terminate
from tests.spec import spec

pytestmark = pytest.mark.fault


@pytest.fixture
def folder(engine: Engine, tmp_path: Path) -> Path:
    """A folder whose store is a fresh schema."""
    use_postgres(tmp_path, engine)
    return tmp_path


async def test_no_connection_that_is_terminated_costs_a_turn(folder: Path, engine: Engine) -> None:
    async with Worker(folder) as node, Worker(folder) as other:
        await in_the_tool(folder, node, "tool")
        assert (await other.say("tool", "more")).status_code == 409
        assert (await node.say("model", "think")).status_code == 200
        await until_there(folder, "model", AttemptStarted)
        for purpose in PURPOSES:
            ended = await terminate(engine, f"midstream {purpose}")
            assert ended or purpose == "pool", purpose
            assert (await other.say(f"after-{purpose}", "look")).status_code in {200, 503}
        (folder / "go").touch()
        await until_there(folder, "tool", TurnEnded)
        await until_there(folder, "model", TurnEnded)
        found = records(folder, "tool")
        said = records(folder, "model")
    assert [each.result.outcome for each in found if isinstance(each, CallEnded)] == [Outcome.OK]
    assert [each.attempt for each in said if isinstance(each, AttemptStarted)] == [1]
    assert [each.body.text for each in said if isinstance(each, ResponseCompleted)] == ["half and half"]
    assert len([each for each in executions(folder) if each.tool == "work"]) == 1
    assert problems(folder, ["tool", "model"]) == []


@pytest.fixture(scope="module")
def mortal() -> Iterator[Engine]:
    """A server that the tests end: synced, as one of a user is."""
    with running_engine(is_synced=True) as engine:
        yield engine


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT], ids=["restart", "crash"])
async def test_a_turn_goes_on_when_postgresql_is_started_anew(
    mortal: Engine, tmp_path: Path, how: signal.Signals
) -> None:
    use_postgres(tmp_path, mortal)
    async with Worker(tmp_path) as node, Worker(tmp_path) as other:
        await in_the_tool(tmp_path, node, "tool")
        assert (await other.say("tool", "more")).status_code == 409
        assert (await node.say("model", "think")).status_code == 200
        await until_there(tmp_path, "model", AttemptStarted)
        mortal.stop(how)
        (tmp_path / "go").touch()
        await until(lambda: any(line.what == "ended" for line in lines(tmp_path)))
        mortal.start()
        tool = await until_there(tmp_path, "tool", TurnEnded)
        await until_there(tmp_path, "model", TurnEnded)
        async with asyncio.timeout(WAIT_S):
            while (await other.say("tool", "think", stream="after")).status_code != 200:
                pass
        await until(lambda: len(ends(tmp_path, "tool")) == 2)
    outcomes = [each.result.outcome for each in tool if isinstance(each, CallEnded)]
    assert outcomes == [Outcome.OK], "its outcome waited for the server"
    assert ends(tmp_path, "tool") == ["completed"] * 2
    assert ends(tmp_path, "model") == ["completed"]
    assert len(executions(tmp_path)) == 1
    assert problems(tmp_path, ["tool", "model"]) == []


@spec("STREAM-23")
async def test_what_a_crash_of_postgresql_lost_is_taken_back_and_the_turn_goes_on(
    mortal: Engine, tmp_path: Path
) -> None:
    """Tokens are committed without waiting for the disk: those of the last moment are lost, as in a power cut."""
    use_postgres(tmp_path, mortal)
    log_writer = await read_sql(mortal, "select pid from pg_stat_activity where backend_type = 'walwriter'")
    async with (
        Worker(tmp_path) as node,
        Worker(tmp_path) as other,
        connect(node.url, world=HastyWorld(None, 1)) as speaker,
        connect(other.url, world=HastyWorld(None, 1)) as reader,
    ):
        (tmp_path / "go").touch()
        assert await speaker.ask("s", "look") == "done"
        seen: list[Event] = []
        answers: list[asyncio.Task[str]] = []
        async with asyncio.timeout(WAIT_S), contextlib.aclosing(reader.follow("s", after="0-0")) as events:
            async for event in events:
                seen.append(event)
                if event.is_end and not answers:
                    (tmp_path / "go").unlink()
                    os.kill(log_writer, signal.SIGSTOP)  # what no commit waits for is not written
                    answers.append(asyncio.create_task(speaker.ask("s", "think")))
                elif isinstance(event.record, Delta) and not (tmp_path / "go").exists():
                    mortal.stop(signal.SIGQUIT)
                    mortal.start()
                    (tmp_path / "go").touch()
                elif isinstance(event.record, TurnEnded) and event.record.turn == 2:
                    break
        async with asyncio.timeout(WAIT_S):
            assert await answers[0] == "half and half"
    assert seen[-1].transcript == "half and half"
    assert any(isinstance(each.record, Gone) for each in seen), "nothing was lost"
    assert ends(tmp_path, "s") == ["completed"] * 2
    assert problems(tmp_path, ["s"]) == []
