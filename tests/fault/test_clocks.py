"""Servers of one store whose wall clocks differ by hours, or jump while they run: leases do not depend on them.

A clock that is ahead by more than the look-back shows an open turn as untouched for that long: it is
interrupted.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path

import pytest

from midstream.client import Client, Event, connect
from midstream.history.messages import Outcome
from midstream.session.records import CallEnded, EpochStarted, TurnEnded
from midstream.session.turn.states import LOOK_BACK_S
from tests.fault.extent import run_on_stores, select_cases
from tests.fault.fault_client_process import HastyWorld
from tests.fault.stored import name_of, use_postgres
from tests.fault.workers import (
    WAIT_S,
    Worker,
    bring_into_tool,
    ends,
    executions,
    freeze,
    lines,
    problems,
    records,
    until,
    until_there,
)
from tests.postgres_engine import Engine
from tests.spec import spec

pytestmark = pytest.mark.fault

AHEAD_S, FAR_AHEAD_S, BEHIND_S = LOOK_BACK_S - 600.0, LOOK_BACK_S + 600.0, -3 * LOOK_BACK_S
LEASE_S = 3.0


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    run_on_stores(metafunc, {})


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder whose store is a SQLite file, or a new schema of PostgreSQL."""
    if request.param == "postgresql":
        use_postgres(tmp_path, request.getfixturevalue("engine"))
    return tmp_path


@pytest.mark.parametrize(
    ("error_s", "end"),
    select_cases(
        [
            pytest.param(AHEAD_S, "completed", id="ahead"),
            pytest.param(BEHIND_S, "completed", id="behind"),
            pytest.param(FAR_AHEAD_S, "interrupted", id="far ahead"),
        ],
        1,
        2,
    ),
)
@spec("TURN-51", "TURN-56")
async def test_a_server_whose_clock_is_off_by_hours_serves_and_takes_over_normally(
    engine: Engine, tmp_path: Path, error_s: float, end: str
) -> None:
    folder = tmp_path
    use_postgres(folder, engine)
    async with Worker(folder) as node, Worker(folder, "--clock-error", error_s) as heir:
        await bring_into_tool(folder, node)
        assert (await heir.send_message("s", "more")).status_code == 409, "its node answered"
        assert len([each for each in records(folder, "s") if isinstance(each, EpochStarted)]) == 1
        await node.kill()
        found = await until_there(folder, "s", EpochStarted, EpochStarted, TurnEnded)
        assert [each.result.outcome for each in found if isinstance(each, CallEnded)] == [Outcome.UNKNOWN]
        async with Worker(folder) as third:
            (folder / "go").touch()
            assert (await third.send_message("s", "look")).status_code == 200, (
                "the node with the wrong clock has it"
            )
            await until_there(folder, "s", TurnEnded, TurnEnded)
    assert ends(folder, "s") == [end, "completed"]
    assert len([each for each in executions(folder) if each.tool == "work"]) == 1
    assert problems(folder, ["s"]) == []


@pytest.mark.parametrize(
    "jump_s", select_cases([pytest.param(AHEAD_S / 2, id="ahead"), pytest.param(BEHIND_S, id="back")], 1)
)
@spec("TURN-52", "TURN-23")
async def test_a_jumping_clock_and_a_freeze_cost_no_lease(folder: Path, jump_s: float) -> None:
    """Then the server is frozen for longer than its lease, and its clock jumps meanwhile."""
    async with (
        Worker(folder, "--lease", LEASE_S, "--jump", jump_s) as node,
        Worker(folder, "--lease", LEASE_S, "--jump", jump_s) as other,
        connect(other.url, world=HastyWorld(None, 1)) as reader,
    ):
        await bring_into_tool(folder, node)
        seen: list[Event] = []
        following = asyncio.create_task(_follow(reader, seen))
        await until(lambda: bool(seen))
        is_one_machine = not name_of(folder).startswith("postgresql:")
        for jumping in ((node, other),) if is_one_machine else ((node,), (other,)):
            for each in jumping:
                each.signal(signal.SIGUSR2)
            assert (await other.send_message("s", "more")).status_code == 409
        assert len([each for each in records(folder, "s") if isinstance(each, EpochStarted)]) == 1
        await freeze(folder, node)
        found = await until_there(folder, "s", EpochStarted, EpochStarted, TurnEnded)
        assert [each.result.outcome for each in found if isinstance(each, CallEnded)] == [Outcome.UNKNOWN]
        (folder / "go").touch()
        for each in (node, other) if is_one_machine else (node,):
            each.signal(signal.SIGUSR2)
        node.signal(signal.SIGCONT)
        await until(lambda: lines(folder)[-1].what == "ended")
        async with asyncio.timeout(WAIT_S):
            await following
        await node.send_until_accepted("s", "think", stream="after")
        await until_there(folder, "s", TurnEnded, TurnEnded)
    assert len(executions(folder)) == 1
    assert ends(folder, "s") == ["completed"] * 2
    assert problems(folder, ["s"]) == []


async def _follow(reader: Client, seen: list[Event]) -> None:
    async with contextlib.aclosing(reader.follow("s", after="0-0")) as events:
        async for event in events:
            seen.append(event)
            if event.is_end:
                return
