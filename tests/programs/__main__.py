"""Play every situation with every real agent program, and print the table.

    python -m tests.programs [--programs claude,codex] [--situations "two turns,stop"] [--json FILE]

The cells are merged into the table of FILE.

    python -m tests.programs --kills 50 [--seed SEED] [--programs claude,codex] [--json FILE]

The programs are in a folder that `make agents` installs (`AGENT_PROGRAMS`); each missing one is named and left out.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path

from midstream.environment import World
from tests.programs.agent_programs import PROGRAMS, AgentProgram, RunFolders, processes_of
from tests.programs.gateway_process import GatewayProcess
from tests.programs.model_server import ModelServer
from tests.programs.random_kills import random_kills
from tests.programs.situations import ASKING, POLL_S, SITUATIONS, Run, Situation, SituationVerdict

Table = dict[str, dict[str, dict[str, list[str]]]]
"""Faults and facts by program and situation."""
LIMIT_S = 600.0
KILLS = "random kills of the gateway"
"""Row of the table for `--kills`."""
ORPHAN_S = 10.0
"""Seconds after the end of the gateway in which its agents must have ended."""


async def play(program: AgentProgram, name: str, folder: Path) -> SituationVerdict:
    """Play one situation in a new folder and judge it. The folder is left only if the situation did not hold."""
    situation, options = SITUATIONS[name]
    played = program.with_permission_requests() if name in ASKING else program
    if played is None:
        return SituationVerdict(facts=["requests none"])
    return await judge(played, name, folder, situation, options, limit_s=LIMIT_S)


async def judge(
    program: AgentProgram,
    name: str,
    folder: Path,
    situation: Situation,
    options: tuple[str, ...],
    *,
    limit_s: float,
) -> SituationVerdict:
    """Play a situation with a program, and judge it."""
    model = ModelServer(folder / "ledger")
    await model.start()
    place = RunFolders(folder, model.url)
    server = {"command": sys.executable, "args": [str(Path(__file__).with_name("weather_server.py"))]}
    (folder / "mcp.json").write_text(json.dumps({"mcpServers": {"forwarded": server}}))
    gateway = GatewayProcess(program, place, *(option.format(folder=folder) for option in options))
    run = Run(program, place, model, gateway)
    try:
        await gateway.start()
        async with asyncio.timeout(limit_s):
            await situation(run)
    except Exception as error:  # noqa: BLE001 - a cell of the table
        traceback.print_exc()
        run.verdict.faults.append(f"{type(error).__name__}: {error}")
    finally:
        with suppress(TimeoutError):
            await gateway.stop()
        await _no_orphans(run)
        await model.stop()
    log = gateway.log.read_text("utf-8", "replace")
    run.check("Traceback" not in log, "a traceback in the gateway's log")
    if run.verdict.faults:
        _print("\n    ".join([f"--- {program.name}, {name}: {folder}", *run.verdict.faults]))
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return run.verdict


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


async def _no_orphans(run: Run) -> None:
    for _ in range(round(ORPHAN_S / POLL_S)):
        if not (left := processes_of(run.place)):
            return
        await World().sleep(POLL_S)
    for pid, line in left.items():
        run.verdict.faults.append(f"orphan process: {line[:120]}")
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def main(arguments: list[str]) -> int:
    """Run the table; 1 if a cell has a fault."""
    parser = argparse.ArgumentParser(prog="python -m tests.programs", description=__doc__)
    parser.add_argument("--programs", default=",".join(PROGRAMS))
    parser.add_argument("--situations", default=",".join(SITUATIONS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--kills", type=int, default=0, help="kill the gateway so often at random, instead")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    given = parser.parse_args(arguments)
    if given.kills:
        return _kill(given.programs.split(","), given.kills, given.seed, given.json)
    table: Table = {}
    for program_name in given.programs.split(","):
        cells = table[program_name] = {}
        for name in given.situations.split(","):
            started = time.monotonic()
            folder = Path(tempfile.mkdtemp(prefix=f"{program_name}-"))
            verdict = asyncio.run(play(PROGRAMS[program_name], name, folder))
            cells[name] = {"faults": verdict.faults, "facts": verdict.facts}
            mark = "FAULT" if verdict.faults else "held"
            took = time.monotonic() - started
            _print(f"{program_name:16} {name:30} {mark:6} {took:5.1f} s  {'; '.join(verdict.facts)}")
            if given.json:
                _merge(given.json, table)
    faults = sum(bool(cell["faults"]) for cells in table.values() for cell in cells.values())
    total = sum(map(len, table.values()))
    _print(f"{total} cells, {faults} with faults")
    return 1 if faults else 0


def _merge(path: Path, table: Table) -> None:
    """Write the cells that were run into the table of a file; others stay."""
    known: Table = json.loads(path.read_text())["result"] if path.exists() else {}
    for program in PROGRAMS:
        cells = known.get(program, {}) | table.get(program, {})
        if cells:
            known[program] = {name: cells[name] for name in (*SITUATIONS, KILLS) if name in cells}
    path.write_text(json.dumps({"result": known}, indent=1) + "\n")


def _kill(programs: list[str], kills: int, seed: int, path: Path | None) -> int:
    """Run random kills with each program; 1 if there was a fault."""
    is_faulty = False
    for name in programs:
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-"))
        situation = functools.partial(random_kills, kills=kills, seed=seed)
        verdict = asyncio.run(judge(PROGRAMS[name], "kills", folder, situation, (), limit_s=60.0 * kills))
        _print(
            f"{name:16} {'FAULT' if verdict.faults else 'held':6} {'; '.join(verdict.facts)} (seed {seed})"
        )
        if path:
            _merge(path, {name: {KILLS: {"faults": verdict.faults, "facts": verdict.facts}}})
        is_faulty = is_faulty or bool(verdict.faults)
    return int(is_faulty)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
