"""The long chaos run: `python -m tests.chaos [SEED] [--reconnects N]`; the seed is printed, and repeats all decisions.

The figures of a whole run go to `bench/results/chaos.json`. Problems are printed, and the folder stays.
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
from pathlib import Path

import apsw
import msgspec

from tests.chaos.chaos_run import ChaosReport, run
from tests.chaos.plan import ChaosPlan
from tests.forked import ROOT

RECONNECTS = 10_000
CONNECTIONS_PER_KILL = 250
SECONDS_PER_RECONNECT = 0.5
"""A bound: an idle machine of two cores makes ten to twenty in that time."""
PROBLEMS_SHOWN = 30


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("seed", type=int, nargs="?", default=int(time.time()))
    parser.add_argument("--reconnects", type=int, default=RECONNECTS)
    given = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="midstream-chaos-"))
    plan = ChaosPlan(given.seed, connections_per_kill=CONNECTIONS_PER_KILL)
    _print(f"seed {given.seed}; repeat it: make chaos ARGS='{given.seed} --reconnects {given.reconnects}'")
    within_s = 300.0 + SECONDS_PER_RECONNECT * given.reconnects
    report = asyncio.run(run(plan, folder, given.reconnects, within_s=within_s, print_progress=_print))
    return _print_result(report, folder)


def _print_result(report: ChaosReport, folder: Path) -> int:
    verdict = report.verdict
    problems, verdict.problems = verdict.problems, []
    _print(msgspec.json.format(msgspec.json.encode(report)).decode())
    for problem in problems[:PROBLEMS_SHOWN]:
        _print(f"seed {report.seed}: {problem}")
    if problems:
        _print(f"{len(problems)} problems; all notes are in {folder}")
        return 1
    if report.reconnects >= RECONNECTS:
        _store_figures(report)
    _print(
        f"{report.reconnects} reconnects, {sum(report.kills.values())} kills: {verdict.lost} lost, "
        f"{verdict.duplicated} duplicated, {verdict.repeated} executed again"
    )
    shutil.rmtree(folder)
    return 0


def _store_figures(report: ChaosReport) -> None:
    machine = {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "sqlite": apsw.sqlite_lib_version(),
        "day": time.strftime("%Y-%m-%d"),
    }
    body = json.dumps({"machine": machine, "result": msgspec.to_builtins(report)}, indent=2)
    (ROOT / "bench" / "results" / "chaos.json").write_text(f"{body}\n")


def _print(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - it writes to a terminal


if __name__ == "__main__":
    sys.exit(main())
