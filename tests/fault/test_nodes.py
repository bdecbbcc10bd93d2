"""Several servers on one store, a SQLite file or PostgreSQL: killed, frozen, stopped.

Every turn continues elsewhere, every tool runs once, no record is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from http import HTTPStatus
from pathlib import Path

import httpx2
import pytest

from midstream.client import Event, connect
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
from midstream.store.sqlite.store import LEASE_S as DEFAULT_LEASE_S
from tests.fault.extent import IS_FULL, STORES, run_on_stores, select_cases
from tests.fault.fault_client_process import HastyWorld
from tests.fault.stored import name_of, use_postgres
from tests.fault.workers import (
    WAIT_S,
    Worker,
    bring_into_tool,
    ends,
    executions,
    freeze,
    journal,
    lines,
    problems,
    records,
    short_pause,
    until,
    until_there,
)
from tests.postgres_engine import PURPOSES, Engine, terminate
from tests.spec import spec

pytestmark = pytest.mark.fault

IN_FLIGHT = 1000 if IS_FULL else 30
TURNS = 3 if IS_FULL else 2
RECOVERED_WITHIN_S = 30.0
"""Seconds from the start of a process; an idle machine needs one of them."""
LEASE_S = 3.0
"""A second was too short for the heartbeats of a living node on a busy machine."""
USUAL = {
    "test_a_killed_nodes_turn_continues_unprompted_in_another_process": STORES,
    "test_a_frozen_node_loses_its_turn_and_changes_nothing_afterwards": STORES[1:],
    "test_a_stopped_process_hands_its_turns_over_without_an_interruption": STORES[1:],
    "test_any_process_serves_readers_and_senders": STORES[1:],
    "test_three_servers_killed_frozen_and_disconnected_at_random_lose_nothing": STORES[1:],
}
_log = logging.getLogger(__name__)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    run_on_stores(metafunc, USUAL)


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder whose store is a SQLite file, or a new schema of PostgreSQL."""
    if request.param == "postgresql":
        use_postgres(tmp_path, request.getfixturevalue("engine"))
    return tmp_path


@pytest.fixture
def takeover_s() -> float:
    """Seconds in which a dead node's turn is taken over: less than a lease. An idle machine needs a quarter of one."""
    return 0.75 * DEFAULT_LEASE_S


@spec("TURN-51")
async def test_a_killed_nodes_turn_continues_unprompted_in_another_process(
    folder: Path, takeover_s: float
) -> None:
    async with Worker(folder) as node, Worker(folder) as other:
        await bring_into_tool(folder, node)
        assert (
            await other.send_message("s", "more")
        ).status_code == 409  # its node was contacted: they have found each other
        killed_at = time.time()
        await node.kill()
        found = await until_there(folder, "s", EpochStarted, EpochStarted, TurnEnded)
    taken_at = [each.at for each in found if isinstance(each, EpochStarted)][1]
    _log.info("taken over %.4f s after the kill", taken_at - killed_at)
    assert taken_at - killed_at < takeover_s
    assert [each.result.outcome for each in found if isinstance(each, CallEnded)] == [Outcome.UNKNOWN]
    assert len(executions(folder)) == 1
    assert problems(folder, ["s"]) == []


@spec("TURN-52", "TURN-23")
async def test_a_frozen_node_loses_its_turn_and_changes_nothing_afterwards(folder: Path) -> None:
    async with Worker(folder, "--lease", LEASE_S) as frozen, Worker(folder, "--lease", LEASE_S) as heir:
        await bring_into_tool(folder, frozen)
        assert (
            await heir.send_message("s", "more")
        ).status_code == 409  # its node was contacted: they have found each other
        await freeze(folder, frozen)
        found = await until_there(folder, "s", EpochStarted, EpochStarted, TurnEnded)
        assert [each.result.outcome for each in found if isinstance(each, CallEnded)] == [Outcome.UNKNOWN]
        (folder / "go").touch()
        frozen.signal(signal.SIGCONT)
        # The tool of the frozen node ends.
        await until(lambda: lines(folder)[-1].what == "ended")
        # It is forwarded to the new node. The thawed one refuses it as busy until it has detected its loss.
        await frozen.send_until_accepted("s", "think", stream="after-thaw")
        await until_there(folder, "s", TurnEnded, TurnEnded)
        assert (await heir.get("/ready")).status_code == 200
    assert len({each.epoch for each in journal(folder, "s")}) == 2, "the heir owned it to the end"
    assert len(executions(folder)) == 1
    assert problems(folder, ["s"]) == []


@spec("TURN-52", "STREAM-100")
async def test_a_node_that_thaws_follows_a_session_that_another_one_took_meanwhile(folder: Path) -> None:
    """No turn was open when it froze, so none of its own actions shows the loss."""
    (folder / "go").touch()
    async with (
        Worker(folder, "--lease", LEASE_S) as frozen,
        Worker(folder, "--lease", LEASE_S) as heir,
        connect(frozen.url, world=HastyWorld(None, 1)) as client,
    ):
        assert await client.ask("s", "look") == "done"
        reader = client.follow("s", after="0-0")
        first = [event async for event in _through_turn(reader, 1)]
        await freeze(folder, frozen)
        await heir.send_until_accepted("s", "look", stream="after-thaw")
        await until(lambda: ends(folder, "s") == ["completed"] * 2)
        newest = journal(folder, "s")[-1]
        frozen.signal(signal.SIGCONT)
        welcome = await _welcome(frozen, f"{newest.epoch}-{newest.position}")
        assert welcome["event_id"] == f"{newest.epoch}-{newest.position}", "not what it knew before"
        second = [event async for event in _through_turn(reader, 2)]
        await reader.aclose()
    assert [each.id for each in first + second] == [
        f"{each.epoch}-{each.position}" for each in journal(folder, "s")
    ]
    assert problems(folder, ["s"]) == []


async def _through_turn(events: AsyncIterator[Event], turn: int) -> AsyncIterator[Event]:
    """Yield events up to the end of a turn."""
    async with asyncio.timeout(WAIT_S):
        async for event in events:
            yield event
            if isinstance(event.record, TurnEnded) and event.record.turn == turn:
                return


async def _welcome(worker: Worker, event_id: str) -> dict[str, object]:
    """Return the welcome for a reader that has this event."""
    frame = {"type": "open", "event_id": event_id}
    async with asyncio.timeout(WAIT_S), worker.open_stream("s", frame, name="reader") as lines_shown:
        async for line in lines_shown:
            if '"welcome"' in line:
                shown: dict[str, object] = json.loads(line[6:])
                return shown
    raise AssertionError("no welcome")


@spec("TURN-53")
async def test_a_node_that_was_frozen_before_its_tool_does_not_start_it_afterwards(folder: Path) -> None:
    options = ("--lease", LEASE_S)
    async with (
        Worker(folder, *options, "--freeze-at", Fault.BEFORE_TOOL) as frozen,
        Worker(folder, *options) as heir,
    ):
        assert (await frozen.send_message("s", "work")).status_code == 200
        found = await until_there(folder, "s", CallStarted, EpochStarted, TurnEnded)
        assert [each.result.outcome for each in found if isinstance(each, CallEnded)] == [Outcome.UNKNOWN]
        (folder / "go").touch()
        frozen.signal(signal.SIGCONT)
        await frozen.send_until_accepted("s", "think", stream="after-thaw")
        await until_there(folder, "s", TurnEnded, TurnEnded)
        assert (await heir.get("/ready")).status_code == 200
    assert executions(folder) == [], "in doubt, and not run"
    assert problems(folder, ["s"]) == []


@spec("TURN-54")
async def test_a_stopped_process_hands_its_turns_over_without_an_interruption(folder: Path) -> None:
    async with Worker(folder) as leaving, Worker(folder) as heir:
        await bring_into_tool(folder, leaving, "tool")
        assert (await heir.send_message("tool", "more")).status_code == 409, (
            "the node was asked: it knows its peer by now"
        )
        assert (await leaving.send_message("model", "think")).status_code == 200
        await until_there(folder, "model", AttemptStarted)
        leaving.signal(signal.SIGTERM)
        await until(lambda: "releasing 2 sessions, with 1 peers" in log_of(folder))
        (folder / "go").touch()
        tool = await until_there(folder, "tool", EpochStarted, EpochStarted, TurnEnded)
        model = await until_there(folder, "model", TurnEnded)
        assert await leaving.ended() == 0
    assert [each.result.outcome for each in tool if isinstance(each, CallEnded)] == [Outcome.OK]
    assert [each.is_handover for each in tool if isinstance(each, EpochStarted)] == [False, True]
    assert [each.attempt for each in model if isinstance(each, AttemptStarted)] == [1]
    assert [each.body.text for each in model if isinstance(each, ResponseCompleted)] == ["half and half"]
    assert len(executions(folder)) == 1
    assert problems(folder, ["tool", "model"]) == []


def log_of(folder: Path) -> str:
    return (folder / "log").read_text(errors="replace")


@spec("TURN-55", "TURN-56")
async def test_any_process_serves_readers_and_senders(folder: Path) -> None:
    async with Worker(folder) as node, Worker(folder) as other:
        await bring_into_tool(folder, node)
        seen: list[str] = []
        async with asyncio.timeout(WAIT_S), other.events("s") as events:
            async for line in events:
                seen.append(line)
                if "call_started" in line:
                    break
            (folder / "go").touch()
            async for line in events:
                seen.append(line)
                if "turn_ended" in line:
                    break
        shown = [json.loads(line[6:]) for line in seen if line.startswith('data: {"type":')]
        kept = [json.loads(each.body) for each in journal(folder, "s")]
        assert [each for each in shown if each["type"] not in {"welcome", "heartbeat"}] == kept

        answers = [await other.send_message("s", "think", stream="k") for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 200]
        await until(lambda: ends(folder, "s") == ["completed"] * 2)
        (folder / "go").unlink()
        assert (await other.send_message("s", "think")).status_code == 200
        busy = await other.send_message("s", "think")
        assert (busy.status_code, busy.json()["code"]) == (409, "session_busy")
        assert (await other.cancel("s")).status_code == 202
        found = records(folder, "s")
    assert ends(folder, "s") == ["completed", "completed", "cancelled"]
    assert len([each for each in found if isinstance(each, MessageAccepted)]) == 3
    assert len([each for each in found if isinstance(each, CancelRequested)]) == 1
    assert {each.epoch for each in journal(folder, "s")} == {1}, "its node decided everything"
    assert problems(folder, ["s"]) == []


@spec("TURN-57", "TURN-58")
async def test_all_sessions_in_flight_are_recovered_in_seconds(folder: Path) -> None:
    sessions = [f"s{number}" for number in range(IN_FLIGHT)]
    async with Worker(folder, "--begin", IN_FLIGHT) as first:
        await until(lambda: len(lines(folder)) == sum(number % 3 != 1 for number in range(IN_FLIGHT)))
        await first.kill()
    async with Worker(folder) as second:
        async with asyncio.timeout(WAIT_S):
            while (answer := await second.get("/ready")).status_code == HTTPStatus.SERVICE_UNAVAILABLE:
                assert answer.json()["code"] == "recovering"
                await short_pause()
        epochs = {each: _epochs(folder, each) for each in sessions}
        assert all(len(each) == 2 for each in epochs.values()), "ready means that everything is taken up"
        (folder / "go").touch()
        await until(lambda: all(ends(folder, each) == ["completed"] for each in sessions))
    last_at = max(each[-1].at for each in epochs.values()) - second.started_at
    _log.info("the last of %d was taken up %.3f s after the start of the process", IN_FLIGHT, last_at)
    assert last_at < RECOVERED_WITHIN_S
    runs = executions(folder)
    assert len([each for each in runs if each.tool == "work"]) == len(range(0, IN_FLIGHT, 3)), "each once"
    assert problems(folder, sessions) == []
    summaries = [line for line in log_of(folder).splitlines() if "recovery: " in line]
    assert len(summaries) == 2, "one for each start"
    assert (
        f"recovery: {IN_FLIGHT} open turns, {IN_FLIGHT} continue here, 0 elsewhere, 0 interrupted, 0 locked, 0 failed"
        in summaries[1]
    )


def _epochs(folder: Path, session: str) -> list[EpochStarted]:
    return [each for each in records(folder, session) if isinstance(each, EpochStarted)]


@spec("TURN-58")
@pytest.mark.parametrize("point", select_cases([Fault.AFTER_CLAIM, Fault.AFTER_APPEND], 1))
async def test_a_recovery_that_dies_leaves_no_more_to_recover(folder: Path, point: Fault) -> None:
    sessions = [f"s{number}" for number in range(30)]
    async with Worker(folder, "--begin", 30) as first:
        await until(lambda: len(lines(folder)) == 20)
        await first.kill()
    async with Worker(folder, "--kill-at", point, "--count", 12) as dying:
        assert await dying.ended() == -signal.SIGKILL
    async with Worker(folder):
        (folder / "go").touch()
        await until(lambda: all(ends(folder, each) == ["completed"] for each in sessions))
    assert len([each for each in executions(folder) if each.tool == "work"]) == 10
    assert problems(folder, sessions) == []


@spec("TURN-51", "TURN-52", "TURN-56")
async def test_three_servers_killed_frozen_and_disconnected_at_random_lose_nothing(
    folder: Path, request: pytest.FixtureRequest
) -> None:
    seed = random.randrange(2**32) if IS_FULL else 1
    print(f"seed {seed}")  # noqa: T201 - to repeat a failure
    chance = random.Random(seed)
    is_file = name_of(folder).endswith(".db")
    harms = ("kill", "freeze") if is_file else ("kill", "freeze", "terminate", "terminate")

    async def terminate_some(_: int) -> None:
        engine: Engine = request.getfixturevalue("engine")
        await terminate(engine, f"midstream {chance.choice(PURPOSES)}", most=2)

    await lose_nothing(folder, chance, harms, terminate_some, rounds=40 if IS_FULL else 4)


async def lose_nothing(
    folder: Path,
    chance: random.Random,
    harms: Sequence[str],
    harm_store: Callable[[int], Awaitable[None]],
    *,
    rounds: int,
) -> None:
    """Chat in sessions at three servers under harms; every turn completes, and each journal is correct.


    Args:
        chance: Chooses the harm, and its server.     harms: "kill" and "freeze" are done to a server; for any
            other one `harm_store` is called, with 0 to 2.     rounds: The number of harms.
    """
    sessions = [f"s{number}" for number in range(24 if IS_FULL else 6)]
    (folder / "go").touch()
    async with contextlib.AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(Worker(folder, "--lease", LEASE_S)) for _ in range(3)]

        async def send_turns(session: str) -> None:
            for turn in range(TURNS):
                async with asyncio.timeout(2 * WAIT_S):
                    while not await _has_accepted(chance.choice(workers), session, f"{session}-{turn}"):
                        pass
                    await until(lambda turn=turn: len(ends(folder, session)) > turn)  # type: ignore[misc]

        sending = asyncio.gather(*map(send_turns, sessions))
        for _ in range(rounds):
            number = chance.randrange(3)
            what = chance.choice(harms)
            if what == "kill":
                await workers[number].kill()
                workers[number] = await stack.enter_async_context(Worker(folder, "--lease", LEASE_S))
            elif what == "freeze":
                await _freeze_for_a_lease(folder, workers[number])
            else:
                await harm_store(number)
        await sending
    assert problems(folder, sessions) == []
    for session in sessions:
        assert len(ends(folder, session)) == TURNS
        assert set(ends(folder, session)) == {"completed"}


async def _freeze_for_a_lease(folder: Path, worker: Worker) -> None:
    before = log_of(folder).count(" was silent for ")
    worker.signal(signal.SIGSTOP)
    with contextlib.suppress(TimeoutError):  # stopped inside a commit it holds the file: no turn continues
        async with asyncio.timeout(5 * LEASE_S):
            await until(lambda: log_of(folder).count(" was silent for ") > before)
    worker.signal(signal.SIGCONT)


async def _has_accepted(worker: Worker, session: str, stream: str) -> bool:
    words = ("work", "look", "think")[sum(stream.encode()) % 3]
    with contextlib.suppress(httpx2.HTTPError):
        return (await worker.send_message(session, words, stream=stream)).status_code == 200
    return False
