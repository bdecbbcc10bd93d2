"""Several servers on one PostgreSQL: killed, frozen, cut off from it, and the database itself ended.

Every turn goes on, no tool runs twice, no record is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import httpx2
import pytest

from midstream.history.messages import Outcome
from midstream.session.records import AttemptStarted, CallEnded, EpochStarted, ResponseCompleted, TurnEnded
from tests.fault.stored import use_postgres
from tests.fault.workers import (
    WAIT_S,
    Worker,
    ends,
    executions,
    journal,
    lines,
    problems,
    records,
    until,
    until_there,
)
from tests.postgres_engine import Engine, running_engine
from tests.spec import spec

pytestmark = pytest.mark.fault

IS_FULL = os.environ.get("MIDSTREAM_FAULT_FULL") == "1"
LEASE_S = 1.0
TAKEOVER_S = 5.0
"""Seconds in which a dead node's turn is taken over; a quiet machine needs a twentieth of one."""
PURPOSES = ("writer", "node", "notifier", "listener", "sentry", "pool")
"""Connections of a store, by what they are for."""

_log = logging.getLogger(__name__)


@pytest.fixture
def folder(engine: Engine, tmp_path: Path) -> Path:
    """A folder whose store is a fresh schema."""
    use_postgres(tmp_path, engine)
    return tmp_path


@asynccontextmanager
async def _operator(engine: Engine) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(engine.url)
    try:
        yield connection
    finally:
        await connection.close()


async def _in_the_tool(folder: Path, worker: Worker, session: str = "s") -> None:
    """Let a worker own a session and be in its tool."""
    assert (await worker.say(session, "work")).status_code == 200
    await until(lambda: any(line.session == session for line in lines(folder)))


@spec("TURN-51")
async def test_a_killed_nodes_turn_goes_on_in_another_process(folder: Path) -> None:
    async with Worker(folder) as node, Worker(folder) as other:
        await _in_the_tool(folder, node)
        assert (await other.say("s", "more")).status_code == 409  # its node was asked: they know each other
        killed_at = time.time()
        await node.kill()
        found = await until_there(folder, "s", EpochStarted, EpochStarted, TurnEnded)
    taken_at = [each.at for each in found if isinstance(each, EpochStarted)][1]
    _log.info("taken over %.4f s after the kill", taken_at - killed_at)
    assert taken_at - killed_at < TAKEOVER_S
    assert [each.result.outcome for each in found if isinstance(each, CallEnded)] == [Outcome.UNKNOWN]
    assert len(executions(folder)) == 1
    assert problems(folder, ["s"]) == []


@spec("TURN-52", "TURN-23")
async def test_a_frozen_node_loses_its_turn_and_changes_nothing_afterwards(folder: Path) -> None:
    async with Worker(folder, "--lease", LEASE_S) as frozen, Worker(folder, "--lease", LEASE_S) as heir:
        await _in_the_tool(folder, frozen)
        assert (await heir.say("s", "more")).status_code == 409
        frozen.signal(signal.SIGSTOP)
        found = await until_there(folder, "s", EpochStarted, EpochStarted, TurnEnded)
        assert [each.result.outcome for each in found if isinstance(each, CallEnded)] == [Outcome.UNKNOWN]
        (folder / "go").touch()
        frozen.signal(signal.SIGCONT)
        await until(lambda: lines(folder)[-1].what == "ended")  # the tool of the frozen one comes to its end
        async with asyncio.timeout(WAIT_S):
            while (answer := await frozen.say("s", "think", stream="after")).status_code != 200:
                assert answer.status_code in {409, 503}, answer.text
        await until_there(folder, "s", TurnEnded, TurnEnded)
    assert len({each.epoch for each in journal(folder, "s")}) == 2, "the heir owned it to the end"
    assert len(executions(folder)) == 1
    assert problems(folder, ["s"]) == []


@spec("TURN-55", "TURN-56")
async def test_readers_and_senders_may_come_to_any_server(folder: Path) -> None:
    async with Worker(folder) as node, Worker(folder) as other:
        await _in_the_tool(folder, node)
        seen: list[str] = []
        async with asyncio.timeout(WAIT_S), other.events("s") as events:
            async for line in events:
                seen.append(line)
                if "call_started" in line:
                    (folder / "go").touch()
                if "turn_ended" in line:
                    break
        shown = [json.loads(line[6:]) for line in seen if line.startswith('data: {"type":')]
        kept = [json.loads(each.body) for each in journal(folder, "s")]
        assert [each for each in shown if each["type"] not in {"welcome", "heartbeat"}] == kept
        answers = [await other.say("s", "think", stream="k") for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 200]
        await until(lambda: ends(folder, "s") == ["completed"] * 2)
    assert {each.epoch for each in journal(folder, "s")} == {1}, "its node decided everything"
    assert problems(folder, ["s"]) == []


async def test_no_connection_that_is_terminated_costs_a_turn(folder: Path, engine: Engine) -> None:
    async with Worker(folder) as node, Worker(folder) as other, _operator(engine) as operator:
        await _in_the_tool(folder, node, "tool")
        assert (await other.say("tool", "more")).status_code == 409
        assert (await node.say("model", "think")).status_code == 200
        await until_there(folder, "model", AttemptStarted)
        for purpose in PURPOSES:
            ended = await operator.fetchval(
                "select count(pg_terminate_backend(pid)) from pg_stat_activity where application_name = $1",
                f"midstream {purpose}",
            )
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
        await _in_the_tool(tmp_path, node, "tool")
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


async def test_three_servers_that_are_killed_frozen_and_cut_off_at_random_lose_nothing(
    folder: Path, engine: Engine
) -> None:
    seed = random.randrange(2**32) if IS_FULL else 1
    print(f"seed {seed}")  # noqa: T201 - to repeat a failure
    chance = random.Random(seed)
    sessions = [f"s{number}" for number in range(24 if IS_FULL else 6)]
    turns = 3 if IS_FULL else 2
    (folder / "go").touch()
    async with contextlib.AsyncExitStack() as stack:
        operator = await stack.enter_async_context(_operator(engine))
        workers = [await stack.enter_async_context(Worker(folder, "--lease", LEASE_S)) for _ in range(3)]

        async def talk(session: str) -> None:
            for turn in range(turns):
                async with asyncio.timeout(2 * WAIT_S):
                    while not await _is_said(chance.choice(workers), session, f"{session}-{turn}"):
                        pass
                    await until(lambda turn=turn: len(ends(folder, session)) > turn)  # type: ignore[misc]

        talking = asyncio.gather(*map(talk, sessions))
        for _ in range(40 if IS_FULL else 4):
            number = chance.randrange(3)
            what = chance.choice(("kill", "freeze", "terminate", "terminate"))
            if what == "kill":
                await workers[number].kill()
                workers[number] = await stack.enter_async_context(Worker(folder, "--lease", LEASE_S))
            elif what == "freeze":
                await _freeze_for_a_lease(folder, workers[number])
            else:
                await operator.fetch(
                    "select pg_terminate_backend(pid) from pg_stat_activity where application_name = $1 "
                    "order by random() limit 2",
                    f"midstream {chance.choice(PURPOSES)}",
                )
        await talking
    assert problems(folder, sessions) == []
    for session in sessions:
        assert len(ends(folder, session)) == turns
        assert set(ends(folder, session)) == {"completed"}


async def _freeze_for_a_lease(folder: Path, worker: Worker) -> None:
    log = folder / "log"
    before = log.read_text(errors="replace").count(" was silent for ")
    worker.signal(signal.SIGSTOP)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(5 * LEASE_S):
            await until(lambda: log.read_text(errors="replace").count(" was silent for ") > before)
    worker.signal(signal.SIGCONT)


async def _is_said(worker: Worker, session: str, stream: str) -> bool:
    words = ("work", "look", "think")[sum(stream.encode()) % 3]
    with contextlib.suppress(httpx2.HTTPError):
        return (await worker.say(session, words, stream=stream)).status_code == 200
    return False
