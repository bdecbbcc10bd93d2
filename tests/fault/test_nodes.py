"""Several servers on one database: killed, frozen, told to end. Every turn goes on elsewhere, every tool runs once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import signal
import time
from http import HTTPStatus
from pathlib import Path

import httpx2
import pytest

from midstream.environment import Fault
from midstream.history.messages import Outcome
from midstream.session.records import (
    AttemptStarted,
    CallEnded,
    CallStarted,
    CancelRequested,
    EpochStarted,
    MessageAccepted,
    ResponseCompleted,
    TurnEnded,
)
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
from tests.spec import spec

pytestmark = pytest.mark.fault

IS_FULL = os.environ.get("MIDSTREAM_FAULT_FULL") == "1"
IN_FLIGHT = 1000 if IS_FULL else 100
RECOVERED_WITHIN_S = 5.0
LEASE_S = 1.0

_log = logging.getLogger(__name__)


async def _in_the_tool(folder: Path, worker: Worker, session: str = "s", words: str = "work") -> None:
    """Let a worker own a session and be in its tool."""
    assert (await worker.say(session, words)).status_code == 200
    await until(lambda: any(line.session == session for line in lines(folder)))


@spec("TURN-51")
async def test_a_killed_nodes_turn_goes_on_in_another_process_unasked(tmp_path: Path) -> None:
    async with Worker(tmp_path) as node, Worker(tmp_path):
        await _in_the_tool(tmp_path, node)
        killed_at = time.time()
        await node.kill()
        found = await until_there(tmp_path, "s", EpochStarted, EpochStarted, TurnEnded)
    taken_at = [each.at for each in found if isinstance(each, EpochStarted)][1]
    _log.info("taken over %.4f s after the kill", taken_at - killed_at)
    assert taken_at - killed_at < WAIT_S
    assert [each.result.outcome for each in found if isinstance(each, CallEnded)] == [Outcome.UNKNOWN]
    assert len(executions(tmp_path)) == 1
    assert problems(tmp_path, ["s"]) == []


@spec("TURN-52", "TURN-23")
async def test_a_frozen_node_loses_its_turn_and_changes_nothing_afterwards(tmp_path: Path) -> None:
    async with Worker(tmp_path, "--lease", LEASE_S) as frozen, Worker(tmp_path, "--lease", LEASE_S) as heir:
        await _in_the_tool(tmp_path, frozen)
        await until_peers_know_each_other(tmp_path)
        frozen.signal(signal.SIGSTOP)
        found = await until_there(tmp_path, "s", EpochStarted, EpochStarted, TurnEnded)
        assert [each.result.outcome for each in found if isinstance(each, CallEnded)] == [Outcome.UNKNOWN]
        (tmp_path / "go").touch()
        frozen.signal(signal.SIGCONT)
        # The tool of the frozen one comes to its end.
        await until(lambda: lines(tmp_path)[-1].what == "ended")
        await _accepted(frozen, "s", "think")  # it is forwarded to the new node
        await until_there(tmp_path, "s", TurnEnded, TurnEnded)
        assert (await heir.get("/ready")).status_code == 200
    assert {each.epoch for each in journal(tmp_path, "s")} == {1, 2}, "the heir owned it to the end"
    assert len(executions(tmp_path)) == 1
    assert problems(tmp_path, ["s"]) == []


async def _accepted(thawed: Worker, session: str, words: str) -> None:
    """Send a message until it is accepted: a thawed node refuses it as busy until it has noticed its loss."""
    async with asyncio.timeout(WAIT_S):
        while (answer := await thawed.say(session, words, stream="after-thaw")).status_code != 200:
            assert answer.status_code == 409, answer.text


async def until_peers_know_each_other(folder: Path) -> None:
    """Wait until both have beaten: who has never been seen to beat is given a whole lease anyway."""
    nodes = folder / "server.db.nodes"
    await until(lambda: len(list(nodes.glob("*.lock"))) == 2)


@spec("TURN-53")
async def test_an_node_that_was_frozen_before_its_tool_does_not_start_it_afterwards(tmp_path: Path) -> None:
    options = ("--lease", LEASE_S)
    async with (
        Worker(tmp_path, *options, "--freeze-at", Fault.BEFORE_TOOL) as frozen,
        Worker(tmp_path, *options) as heir,
    ):
        assert (await frozen.say("s", "work")).status_code == 200
        found = await until_there(tmp_path, "s", CallStarted, EpochStarted, TurnEnded)
        assert [each.result.outcome for each in found if isinstance(each, CallEnded)] == [Outcome.UNKNOWN]
        (tmp_path / "go").touch()
        frozen.signal(signal.SIGCONT)
        await _accepted(frozen, "s", "think")
        await until_there(tmp_path, "s", TurnEnded, TurnEnded)
        assert (await heir.get("/ready")).status_code == 200
    assert executions(tmp_path) == [], "in doubt, and not run"
    assert problems(tmp_path, ["s"]) == []


@spec("TURN-54")
async def test_a_process_told_to_end_hands_its_turns_over_without_a_cut(tmp_path: Path) -> None:
    async with Worker(tmp_path) as leaving, Worker(tmp_path) as heir:
        await _in_the_tool(tmp_path, leaving, "tool")
        assert (await heir.say("tool", "more")).status_code == 409, (
            "the node was asked: it knows its peer by now"
        )
        assert (await leaving.say("model", "think")).status_code == 200
        await until_there(tmp_path, "model", AttemptStarted)
        leaving.signal(signal.SIGTERM)
        await until(lambda: "releasing 2 sessions, with 1 peers" in log_of(tmp_path))
        (tmp_path / "go").touch()
        tool = await until_there(tmp_path, "tool", EpochStarted, EpochStarted, TurnEnded)
        model = await until_there(tmp_path, "model", TurnEnded)
        assert await leaving.ended() == 0
    assert [each.result.outcome for each in tool if isinstance(each, CallEnded)] == [Outcome.OK]
    assert [each.is_handover for each in tool if isinstance(each, EpochStarted)] == [False, True]
    assert [each.attempt for each in model if isinstance(each, AttemptStarted)] == [1]
    assert [each.body.text for each in model if isinstance(each, ResponseCompleted)] == ["half and half"]
    assert len(executions(tmp_path)) == 1
    assert problems(tmp_path, ["tool", "model"]) == []


def log_of(folder: Path) -> str:
    return (folder / "log").read_text(errors="replace")


@spec("TURN-55", "TURN-56")
async def test_readers_and_senders_may_come_to_any_process(tmp_path: Path) -> None:
    async with Worker(tmp_path) as node, Worker(tmp_path) as other:
        await _in_the_tool(tmp_path, node)
        seen: list[str] = []
        async with asyncio.timeout(WAIT_S), other.events("s") as events:
            async for line in events:
                seen.append(line)
                if "call_started" in line:
                    break
            (tmp_path / "go").touch()
            async for line in events:
                seen.append(line)
                if "turn_ended" in line:
                    break
        shown = [json.loads(line[6:]) for line in seen if line.startswith('data: {"type":')]
        kept = [json.loads(each.body) for each in journal(tmp_path, "s")]
        assert [each for each in shown if each["type"] not in {"welcome", "heartbeat"}] == kept

        answers = [await other.say("s", "think", stream="k") for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 200]
        await until(lambda: ends(tmp_path, "s") == ["completed"] * 2)
        (tmp_path / "go").unlink()
        assert (await other.say("s", "think")).status_code == 200
        busy = await other.say("s", "think")
        assert (busy.status_code, busy.json()["code"]) == (409, "session_busy")
        assert (await other.cancel("s")).status_code == 202
        found = records(tmp_path, "s")
    assert ends(tmp_path, "s") == ["completed", "completed", "cancelled"]
    assert len([each for each in found if isinstance(each, MessageAccepted)]) == 3
    assert len([each for each in found if isinstance(each, CancelRequested)]) == 1
    assert {each.epoch for each in journal(tmp_path, "s")} == {1}, "its node decided everything"
    assert problems(tmp_path, ["s"]) == []


@spec("TURN-57", "TURN-58")
async def test_all_sessions_in_flight_are_recovered_in_seconds(tmp_path: Path) -> None:
    sessions = [f"s{number}" for number in range(IN_FLIGHT)]
    async with Worker(tmp_path, "--begin", IN_FLIGHT) as first:
        await until(lambda: len(lines(tmp_path)) == sum(number % 3 != 1 for number in range(IN_FLIGHT)))
        await first.kill()
    async with Worker(tmp_path) as second:
        async with asyncio.timeout(WAIT_S):
            while (answer := await second.get("/ready")).status_code == HTTPStatus.SERVICE_UNAVAILABLE:
                assert answer.json()["code"] == "recovering"
        epochs = {each: _epochs(tmp_path, each) for each in sessions}
        assert all(len(each) == 2 for each in epochs.values()), "ready means that everything is taken up"
        (tmp_path / "go").touch()
        await until(lambda: all(ends(tmp_path, each) == ["completed"] for each in sessions))
    last_at = max(each[-1].at for each in epochs.values()) - second.started_at
    _log.info("the last of %d was taken up %.3f s after the start of the process", IN_FLIGHT, last_at)
    assert last_at < RECOVERED_WITHIN_S
    runs = executions(tmp_path)
    assert len([each for each in runs if each.tool == "work"]) == len(range(0, IN_FLIGHT, 3)), "each once"
    assert problems(tmp_path, sessions) == []
    summaries = [line for line in log_of(tmp_path).splitlines() if "recovery: " in line]
    assert len(summaries) == 2, "one for each start"
    assert (
        f"recovery: {IN_FLIGHT} open turns, {IN_FLIGHT} continue here, 0 elsewhere, 0 interrupted, 0 locked, 0 failed"
        in summaries[1]
    )


def _epochs(folder: Path, session: str) -> list[EpochStarted]:
    return [each for each in records(folder, session) if isinstance(each, EpochStarted)]


@spec("TURN-58")
@pytest.mark.parametrize("point", [Fault.AFTER_CLAIM, Fault.AFTER_APPEND])
async def test_a_recovery_that_dies_is_no_worse_than_none(tmp_path: Path, point: Fault) -> None:
    sessions = [f"s{number}" for number in range(30)]
    async with Worker(tmp_path, "--begin", 30) as first:
        await until(lambda: len(lines(tmp_path)) == 20)
        await first.kill()
    async with Worker(tmp_path, "--kill-at", point, "--count", 12) as dying:
        assert await dying.ended() == -signal.SIGKILL
    async with Worker(tmp_path):
        (tmp_path / "go").touch()
        await until(lambda: all(ends(tmp_path, each) == ["completed"] for each in sessions))
    assert len([each for each in executions(tmp_path) if each.tool == "work"]) == 10
    assert problems(tmp_path, sessions) == []


@spec("TURN-51", "TURN-52", "TURN-56")
async def test_three_processes_that_are_killed_or_frozen_at_random_lose_nothing(tmp_path: Path) -> None:
    seed = random.randrange(2**32) if IS_FULL else 1
    print(f"seed {seed}")  # noqa: T201 - to repeat a failure
    chance = random.Random(seed)
    sessions = [f"s{number}" for number in range(24 if IS_FULL else 12)]
    (tmp_path / "go").touch()
    async with contextlib.AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(Worker(tmp_path, "--lease", LEASE_S)) for _ in range(3)]

        async def talk(session: str) -> None:
            for turn in range(3):
                async with asyncio.timeout(2 * WAIT_S):
                    while not await _is_said(chance.choice(workers), session, f"{session}-{turn}"):
                        pass
                    await until(lambda turn=turn: len(ends(tmp_path, session)) > turn)  # type: ignore[misc]

        talking = asyncio.gather(*map(talk, sessions))
        for _ in range(8 if IS_FULL else 4):
            number = chance.randrange(3)
            if chance.random() < 0.5:
                await _freeze_for_a_lease(tmp_path, workers[number])
                continue
            await workers[number].kill()
            workers[number] = await stack.enter_async_context(Worker(tmp_path, "--lease", LEASE_S))
        await talking
    assert problems(tmp_path, sessions) == []
    for session in sessions:
        assert len(ends(tmp_path, session)) == 3
        assert set(ends(tmp_path, session)) == {"completed"}


async def _freeze_for_a_lease(folder: Path, worker: Worker) -> None:
    before = log_of(folder).count(" was silent for ")
    worker.signal(signal.SIGSTOP)
    with contextlib.suppress(TimeoutError):  # stopped inside a commit it holds the database: nobody goes on
        async with asyncio.timeout(5 * LEASE_S):
            # Both others have seen it.
            await until(lambda: log_of(folder).count(" was silent for ") >= before + 2)
    worker.signal(signal.SIGCONT)


async def _is_said(worker: Worker, session: str, stream: str) -> bool:
    words = ("work", "look", "think")[sum(stream.encode()) % 3]
    with contextlib.suppress(httpx2.HTTPError):
        return (await worker.say(session, words, stream=stream)).status_code == 200
    return False
