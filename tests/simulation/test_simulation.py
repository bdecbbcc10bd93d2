"""The real runtime in simulated worlds: after any faults in any order, every promise holds at the end.

`make sim` tries new seeds for minutes; here a few hundred known ones run. `make sim ARGS=SEED` repeats a
failing seed with a trace of all events.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.search import with_long
from tests.session.edges import RecordEffect, explored
from tests.simulation.loop import SimulatedLoop, SimulatedProcess, Stuck, pass_time
from tests.simulation.simulation_run import run
from tests.spec import spec

ROOT = Path(__file__).parents[2]
BLOCKS = 4
RUNS = 20
"""Seeds of one block."""


@spec("TURN-12", "TURN-13", "TURN-21", "TURN-22", "TURN-23", "TURN-35", "TURN-46", "TURN-47")
@pytest.mark.slow
@pytest.mark.parametrize("block", with_long(range(BLOCKS), 1))
def test_every_promise_holds_whatever_goes_wrong(block: int) -> None:
    failed = {}
    figures: Counter[str] = Counter()
    taken: set[RecordEffect] = set()
    for seed in range(block * RUNS, (block + 1) * RUNS):
        outcome = run(seed)
        figures += outcome.figures()
        taken |= outcome.taken
        if outcome.problems:
            failed[seed] = outcome.problems
    assert failed == {}
    never = [name for name in ("deaths", "freezes", "outages", "tools", "children") if not figures[name]]
    assert never == [], "nothing was tried"
    if (
        block == 0
    ):  # Exploring takes seconds in each process that does it; the other blocks take as many steps.
        assert len(taken & explored().steps) > 0.5 * len(explored().steps)


@pytest.mark.slow
def test_a_seed_is_the_same_run_every_time_and_in_every_process() -> None:
    seed = 37
    code = f"from tests.simulation.test_simulation import digest\nprint(digest({seed}))"
    ours = digest(seed)
    assert digest(seed) == ours
    for hashes in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hashes, "PYTHONPATH": os.pathsep.join(sys.path)}
        theirs = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert theirs.stdout.strip() == ours


def digest(seed: int) -> str:
    """Return the digest of all events of a run."""
    return hashlib.sha256("\n".join(run(seed).lines()).encode()).hexdigest()


# --- the loop itself ----------------------------------------------------------------------------------------------


def test_time_passes_only_while_all_tasks_wait() -> None:
    loop = SimulatedLoop(None)

    async def wait() -> float:
        await pass_time(3600.0)
        return loop.time()

    assert 3600.0 <= loop.run_until_complete(wait()) < 3601.0


def test_a_killed_process_takes_no_further_step_and_a_thawed_one_continues() -> None:
    loop = SimulatedLoop(None)
    killed, frozen = SimulatedProcess("killed"), SimulatedProcess("frozen")
    steps: list[str] = []

    async def work(name: str) -> None:
        for number in range(3):
            steps.append(f"{name} {number}")
            await pass_time(1.0)

    async def live() -> None:
        loop.start(killed, work("killed"))
        loop.start(frozen, work("frozen"))
        await pass_time(1.5)
        loop.kill(killed)
        frozen.is_frozen = True
        await pass_time(10.0)
        assert steps == ["killed 0", "frozen 0", "killed 1", "frozen 1"]
        loop.thaw(frozen)
        await pass_time(10.0)

    loop.run_until_complete(live())
    loop.close_remains(killed)
    assert steps[4:] == ["frozen 2"]


def test_a_run_in_which_all_tasks_wait_for_ever_is_stuck() -> None:
    async def wait() -> None:
        await asyncio.get_running_loop().create_future()

    loop = SimulatedLoop(None)
    with pytest.raises(Stuck, match="everybody waits"):
        loop.run_until_complete(wait())
