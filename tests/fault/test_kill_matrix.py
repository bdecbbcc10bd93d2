"""Real processes, killed at every named point: no token is lost or duplicated, no tool runs again, every turn ends."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import time
from pathlib import Path

import apsw
import pytest

from midstream.environment import Fault
from tests.fault.death_cases import EVERY_DAY, every_case, summary, table
from tests.fault.extent import IS_FULL, select_cases
from tests.fault.matrix import CaseReport, KillCase, run
from tests.fault.stored import use_jetstream, use_postgres
from tests.fault.test_pruning import POINTS
from tests.forked import ROOT
from tests.nats_engine import NatsCluster
from tests.postgres_engine import Engine
from tests.spec import spec

pytestmark = pytest.mark.fault

CASES = select_cases(EVERY_DAY, 3, 5, 6, 8, 10, 14, 15, 16, 17, 21, 23, 24, 27, 28, 30)
"""Each point once, in the first message, in the text, in the tools and in recovery; each side, and both."""
AT_ONCE = 2
"""Concurrent cases in the full matrix; each has two processes that mostly wait."""
FULL_S = 3600


@spec("TURN-5", "TURN-21")
@pytest.mark.parametrize("is_cancelled", [False, True], ids=["to its end", "cancelled"])
async def test_the_turn_without_a_kill(tmp_path: Path, is_cancelled: bool) -> None:  # noqa: FBT001 - pytest's parameter
    report = await run(KillCase(is_cancelled=is_cancelled), tmp_path)
    assert report.problems == []
    assert report.status == ("cancelled" if is_cancelled else "completed")
    assert (report.reruns, report.unknown) == (0, int(is_cancelled))


@spec("TURN-13", "TURN-14", "TURN-16")
@pytest.mark.parametrize("case", CASES, ids=str)
async def test_the_turn_survives_a_kill(case: KillCase, tmp_path: Path) -> None:
    report = await run(case, tmp_path)
    assert report.problems == []
    assert report.deaths == len(case.kills), "a point was not reached"


ON_SERVERS = select_cases(EVERY_DAY, 17)
"""A death in the tools and one in recovery, on PostgreSQL and JetStream; `make fault` runs all cases there too."""


@spec("TURN-13", "TURN-14", "TURN-16")
@pytest.mark.parametrize("case", ON_SERVERS, ids=str)
async def test_the_turn_survives_a_kill_on_postgresql(case: KillCase, tmp_path: Path, engine: Engine) -> None:
    use_postgres(tmp_path, engine)
    report = await run(case, tmp_path)
    assert report.problems == []
    assert report.deaths == len(case.kills), "a point was not reached"


@spec("TURN-13", "TURN-14", "TURN-16")
@pytest.mark.parametrize("case", ON_SERVERS, ids=str)
async def test_the_turn_survives_a_kill_on_jetstream(
    case: KillCase, tmp_path: Path, nats_server: NatsCluster
) -> None:
    use_jetstream(tmp_path, nats_server)
    report = await run(case, tmp_path)
    assert report.problems == []
    assert report.deaths == len(case.kills), "a point was not reached"


def test_the_cases_kill_a_process_at_every_fault_point() -> None:
    assert {kill.point for case in CASES for kill in case.kills} == set(Fault).difference(POINTS)


@pytest.mark.skipif(not IS_FULL, reason="MIDSTREAM_FAULT_FULL=1 runs the whole matrix (`make fault`)")
@pytest.mark.timeout(FULL_S)
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_the_turn_survives_every_kill(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    engine: Engine | None = request.getfixturevalue("engine") if kind == "postgresql" else None

    def make_folder(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        if engine is not None:
            use_postgres(folder, engine)
        return folder

    reference = await run(KillCase(), make_folder("reference"))
    cancelled = await run(KillCase(is_cancelled=True), make_folder("cancelled"))
    assert reference.problems + cancelled.problems == []
    cases = list(every_case(reference, cancelled))
    turnstile = asyncio.Semaphore(AT_ONCE)

    async def one(number: int, case: KillCase) -> CaseReport:
        async with turnstile:
            return await run(case, make_folder(str(number)))

    reports = await asyncio.gather(*(one(number, case) for number, case in enumerate(cases)))
    figures = summary(reports)
    with capsys.disabled():
        print(f"\n{table(figures)}")  # noqa: T201 - the table is the result of this test
    results = ROOT / "bench" / "results"
    results.mkdir(parents=True, exist_ok=True)
    report = {"machine": _machine(), "result": figures}
    name = "fault.json" if engine is None else "fault-postgresql.json"
    (results / name).write_text(json.dumps(report, indent=2) + "\n")
    assert [f"{report.case}: {report.problems}" for report in reports if report.problems] == []
    assert set(figures["deaths_by_point"]) == {point.value for point in set(Fault).difference(POINTS)}
    assert figures["deaths"] > 0.9 * sum(len(case.kills) for case in cases), (
        "too many points were not reached"
    )


def _machine() -> dict[str, object]:
    """Return the description of the machine that `python -m bench` writes beside its figures."""
    return {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "sqlite": apsw.sqlite_lib_version(),
        "day": time.strftime("%Y-%m-%d"),
    }
