"""Processes that are killed while they prune a database: every journal is complete before or after the pruning."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.engine.journal import Journal
from midstream.environment import Fault, World
from midstream.session.session import Session, fold
from midstream.store.sqlite import SQLiteStore
from midstream.testing import ScriptedModel, run_turn, text
from tests.search import with_long
from tests.spec import spec

pytestmark = pytest.mark.fault

HERE = Path(__file__).parent
POINTS = (Fault.BEFORE_PRUNE, Fault.AFTER_PRUNE)
"""The fault points that the matrix of turns does not reach."""
WAIT_S = 60.0


async def _prune(path: Path, point: str) -> int:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.fault.pruning_process", str(path), point, cwd=HERE.parents[1]
    )
    return await asyncio.wait_for(process.wait(), WAIT_S)


async def _look(path: Path) -> tuple[Session, int]:
    """Return the session, and the first position of its journal."""
    store = SQLiteStore(path)
    await store.open()
    session = fold(await Journal(store, "s", World()).load())
    line = await store.find("s")
    await store.close()
    assert line is not None
    assert line.end == session.position
    return session, line.oldest


@spec("STREAM-60")
@pytest.mark.parametrize("point", with_long(POINTS, 1))
async def test_a_killed_process_leaves_the_journal_before_or_after(point: Fault, tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    host = Host(Agent(ScriptedModel([text("one two three", tokens=7)])), SQLiteStore(path))
    await host.start()
    for number in range(4):
        await run_turn(host, "s", f"question {number}")
    await host.stop(grace_s=0.1)
    before, oldest = await _look(path)
    assert oldest == 1

    assert await _prune(path, point) == -signal.SIGKILL
    after, oldest = await _look(path)
    assert (after, oldest > 1) == (before, point is Fault.AFTER_PRUNE)

    assert await _prune(path, "") == 0
    after, oldest = await _look(path)
    assert (after, oldest > 1) == (before, True)
