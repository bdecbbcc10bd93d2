"""Faults of PostgreSQL under several servers: connections that are terminated, a restart, a crash.

`test_nodes` has the deaths of servers, on this store too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest

from midstream.client import Event, connect
from midstream.history.messages import Outcome
from midstream.protocol.frames import Gone
from midstream.session.records import (
    AttemptStarted,
    CallEnded,
    Delta,
    EpochStarted,
    ResponseCompleted,
    TurnEnded,
)
from tests.fault.fault_client_process import HastyWorld
from tests.fault.stored import name_of, use_postgres
from tests.fault.workers import (
    UNAVAILABLE,
    WAIT_S,
    Worker,
    bring_into_tool,
    ends,
    executions,
    lines,
    problems,
    records,
    until,
    until_there,
)
from tests.postgres_engine import NOBODY, PURPOSES, Engine, read_sql, running_engine, terminate
from tests.search import with_long
from tests.spec import spec
from tests.store.postgres.postgres_relay import PostgresRelay

pytestmark = pytest.mark.fault

LEASE_S = 3.0
"""A second was too short for the heartbeats of a living node on a busy machine."""
ROWS_MAX = 10_000


@pytest.fixture
def folder(engine: Engine, tmp_path: Path) -> Path:
    """A folder whose store is a new schema."""
    use_postgres(tmp_path, engine)
    return tmp_path


async def test_no_terminated_connection_costs_a_turn(folder: Path, engine: Engine) -> None:
    async with Worker(folder) as node, Worker(folder) as other:
        await bring_into_tool(folder, node, "tool")
        assert (await other.send_message("tool", "more")).status_code == 409
        assert (await node.send_message("model", "think")).status_code == 200
        await until_there(folder, "model", AttemptStarted)
        for purpose in PURPOSES:
            ended = await terminate(engine, f"midstream {purpose}")
            assert ended or purpose == "pool", purpose
            assert (await other.send_message(f"after-{purpose}", "look")).status_code in {200, 503}
        (folder / "go").touch()
        await until_there(folder, "tool", TurnEnded)
        await until_there(folder, "model", TurnEnded)
        found = records(folder, "tool")
        reported = records(folder, "model")
    assert [each.result.outcome for each in found if isinstance(each, CallEnded)] == [Outcome.OK]
    assert [each.attempt for each in reported if isinstance(each, AttemptStarted)] == [1]
    assert [each.body.text for each in reported if isinstance(each, ResponseCompleted)] == ["half and half"]
    assert len([each for each in executions(folder) if each.tool == "work"]) == 1
    assert problems(folder, ["tool", "model"]) == []


@pytest.fixture(scope="module")
def mortal() -> Iterator[Engine]:
    """A server that the tests end: with synced writes, as in production."""
    with running_engine(is_synced=True) as engine:
        yield engine


@pytest.mark.parametrize("how", with_long([signal.SIGQUIT, signal.SIGINT], 1), ids=["crash", "restart"])
async def test_a_turn_continues_when_postgresql_restarts(
    mortal: Engine, tmp_path: Path, how: signal.Signals
) -> None:
    use_postgres(tmp_path, mortal)
    async with Worker(tmp_path) as node, Worker(tmp_path) as other:
        await bring_into_tool(tmp_path, node, "tool")
        assert (await other.send_message("tool", "more")).status_code == 409
        assert (await node.send_message("model", "think")).status_code == 200
        await until_there(tmp_path, "model", AttemptStarted)
        mortal.stop(how)
        (tmp_path / "go").touch()
        await until(lambda: any(line.what == "ended" for line in lines(tmp_path)))
        mortal.start()
        tool = await until_there(tmp_path, "tool", TurnEnded)
        await until_there(tmp_path, "model", TurnEnded)
        await other.send_until_accepted("tool", "think", stream="after")
        await until(lambda: len(ends(tmp_path, "tool")) == 2)
    outcomes = [each.result.outcome for each in tool if isinstance(each, CallEnded)]
    assert outcomes == [Outcome.OK], "its outcome waited for the server"
    assert ends(tmp_path, "tool") == ["completed"] * 2
    assert ends(tmp_path, "model") == ["completed"]
    assert len(executions(tmp_path)) == 1
    assert problems(tmp_path, ["tool", "model"]) == []


@spec("STREAM-23")
async def test_records_lost_in_a_crash_of_postgresql_are_withdrawn_and_the_turn_continues(
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
                    os.kill(log_writer, signal.SIGSTOP)  # writes without a waiting commit are not on disk
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


@pytest.mark.long
@spec("TURN-52", "TURN-23")
async def test_a_server_disconnected_from_the_database_loses_its_turn_and_changes_nothing_afterwards(
    folder: Path, engine: Engine
) -> None:
    """No packet passes, and neither end is informed: its lock stays, and its heartbeats stop."""
    schema = name_of(folder).partition("schema=")[2]
    async with (
        PostgresRelay(engine, schema).serving() as network,
        Worker(folder, "--lease", LEASE_S, "--store", network.url) as cut_off,
        Worker(folder, "--lease", LEASE_S) as heir,
    ):
        await bring_into_tool(folder, cut_off)
        assert (await heir.send_message("s", "more")).status_code == 409
        network.passes.clear()
        found = await until_there(folder, "s", EpochStarted, EpochStarted, TurnEnded)
        assert [each.result.outcome for each in found if isinstance(each, CallEnded)] == [Outcome.UNKNOWN]
        (folder / "go").touch()
        await until(lambda: lines(folder)[-1].what == "ended")  # the tool of the disconnected node ends
        network.passes.set()
        await cut_off.send_until_accepted("s", "think", stream="after")
        await until_there(folder, "s", TurnEnded, TurnEnded)
    assert len(executions(folder)) == 1
    assert problems(folder, ["s"]) == []


@pytest.mark.long
async def test_a_full_disk_of_the_database_refuses_and_loses_nothing(tmp_path: Path) -> None:
    with Engine(is_synced=True) as engine, _small_disk(engine.make_folder("small")) as disk:
        await read_sql(engine, f"create tablespace small location '{disk}'")
        await read_sql(engine, "alter database postgres set default_tablespace = 'small'")
        use_postgres(tmp_path, engine)
        async with Worker(tmp_path) as node:
            await bring_into_tool(tmp_path, node, "tool")
            await read_sql(engine, "create table filler (body bytea)")
            await _fill(engine)
            large = "x".join(str(number) for number in range(20_000))
            refused = await node.send_message("large", large, stream="once")
            assert (refused.status_code, refused.json()["code"]) == (503, "store_full")
            (tmp_path / "go").touch()
            await until(lambda: lines(tmp_path)[-1].what == "ended")
            await read_sql(engine, "drop table filler")
            await node.send_until_accepted("large", "look", stream="once", refusals=(UNAVAILABLE,))
            found = await until_there(tmp_path, "tool", TurnEnded)
            await until_there(tmp_path, "large", TurnEnded)
            assert [each.result.outcome for each in found if isinstance(each, CallEnded)] == [Outcome.OK]
            assert len([each for each in executions(tmp_path) if each.session == "tool"]) == 1
            assert problems(tmp_path, ["tool", "large"]) == []


@contextlib.contextmanager
def _small_disk(folder: Path) -> Iterator[Path]:
    """Mount a file system of some megabytes, if this machine allows it."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m,mode=0777", "tmpfs", folder],
        capture_output=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip("no file system may be mounted here")
    inner = folder / "space"
    try:
        inner.mkdir()
        if os.geteuid() == 0:
            os.chown(inner, NOBODY, NOBODY)
        yield inner
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


async def _fill(engine: Engine) -> None:
    """Write until nothing more fits."""
    statement = (
        "insert into filler select string_agg(sha512(random()::text::bytea), '') from generate_series(1, $1)"
    )
    for size in (100_000, 1_000):
        with contextlib.suppress(asyncpg.DiskFullError):
            for _ in range(ROWS_MAX):
                await read_sql(engine, statement, size // 64)
            raise AssertionError("the disk is not full")
