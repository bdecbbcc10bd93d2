"""Play every situation with every program as an unmodified client of the gateway, and print and write the table.

    python -m tests.hosts [--programs claude,codex] [--situations "two turns with a tool"] [--times 3] [--seed SEED]
                          [--write docs/reference/client-applications.md]

The programs are in the folder that `make agents` installs; a missing one is named and left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from midstream.version import __version__
from tests.hosts.host_programs import PROGRAMS, HostProgram
from tests.hosts.host_situations import SITUATIONS, HostRun, place_in
from tests.hosts.line_cuts import ByteCountingRelay
from tests.programs.agent_programs import AgentProgram, RunFolders
from tests.programs.gateway_process import TOKEN, GatewayProcess
from tests.programs.model_server import ModelServer

LIMIT_S = 900.0


def _upstream_options(place: RunFolders) -> list[str]:
    return [
        *("--upstream", f"openai-compatible:{place.model_url}/v1"),
        *("--model", "m", "--key-from", "SCRIPTED_PROVIDER_KEY"),
    ]


def _prepare_nothing(place: RunFolders) -> None:
    del place


UPSTREAM = AgentProgram(
    name="a model",
    upstream=_upstream_options,
    env=lambda place: {"SCRIPTED_PROVIDER_KEY": "scripted"},
    prepare=_prepare_nothing,
    is_agent=lambda line: False,
    sessions=(),
)


async def play(program: HostProgram, name: str, folder: Path, chance: random.Random) -> HostRun:
    """Play one situation in a new folder, and judge it. The folder is left only if the situation did not hold."""
    model = ModelServer(folder / "ledger", continues=True)
    await model.start()
    place = place_in(folder, model)
    gateway = GatewayProcess(UPSTREAM, place)
    relay = ByteCountingRelay(0)
    run = HostRun(program, place, model, gateway, relay, chance)
    try:
        async with relay.listening():
            program.prepare(place, relay.url)
            await run.restart()
            async with asyncio.timeout(LIMIT_S):
                await SITUATIONS[name](run)
    except Exception as error:  # noqa: BLE001 - a cell of the table
        traceback.print_exc()
        run.verdict.faults.append(f"{type(error).__name__}: {error}")
    finally:
        with suppress(TimeoutError):
            await gateway.stop()
        await model.stop()
    log = gateway.log.read_text("utf-8", "replace")
    run.check("Traceback" not in log, "a traceback in the gateway's log")
    run.check(TOKEN not in log, "the key is in the gateway's log")
    if not run.verdict.faults:
        shutil.rmtree(folder, ignore_errors=True)
    return run


def main(arguments: list[str]) -> int:
    """Run the table; 1 if a cell has a fault."""
    parser = argparse.ArgumentParser(prog="python -m tests.hosts", description=__doc__)
    parser.add_argument("--programs", default=",".join(PROGRAMS))
    parser.add_argument("--situations", default=",".join(SITUATIONS))
    parser.add_argument("--times", type=int, default=1, help="of each situation (1)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--json", type=Path, help="write the table to this file too")
    parser.add_argument("--write", type=Path, help="write the page of the documentation to this file too")
    given = parser.parse_args(arguments)
    _print(f"--seed {given.seed}")
    faults = 0
    table: dict[str, dict[str, list[HostRun]]] = {}
    for program_name in given.programs.split(","):
        program = PROGRAMS[program_name]
        if not program.is_installed:
            _print(f"{program_name} is not installed here: skipped")
            continue
        for name in given.situations.split(","):
            chance = random.Random(f"{given.seed} {program_name} {name}")
            for _ in range(given.times):
                started = time.monotonic()
                folder = Path(tempfile.mkdtemp(prefix=f"host-{program_name}-"))
                run = asyncio.run(play(program, name, folder, chance))
                verdict = run.verdict
                table.setdefault(program_name, {}).setdefault(name, []).append(run)
                faults += bool(verdict.faults)
                mark = "FAULT" if verdict.faults else "held"
                took = time.monotonic() - started
                notes = [*verdict.facts, *verdict.faults, *([str(folder)] if verdict.faults else [])]
                _print(f"{program_name:10} {name:30} {mark:6} {took:5.1f} s  {'; '.join(notes)}")
    total = sum(run.is_played for cells in table.values() for runs in cells.values() for run in runs)
    _print(f"{total} played, {faults} with faults")
    is_whole = [*table] == [*PROGRAMS] and all([*cells] == [*SITUATIONS] for cells in table.values())
    if given.write and not is_whole:
        _print(f"{given.write} is not written: it has all programs and all situations")
    elif given.write:
        given.write.write_text(page_of(table, seed=given.seed), encoding="utf-8")
    if given.json:
        found = {
            program: {
                name: {
                    "played": len(all_),
                    "faults": [fault for each in all_ for fault in each.verdict.faults],
                }
                for name, all_ in cells.items()
            }
            for program, cells in table.items()
        }
        given.json.write_text(json.dumps({"seed": given.seed, "result": found}, indent=1) + "\n")
    return 1 if faults else 0


PAGE = """# Client applications at the gateway

`make hosts` runs these situations with unmodified client applications, and writes this page. The applications use
`midstream gateway`, which uses a scripted model server on this machine. Their settings are the blocks of
[the guide](../guides/gateway.md#client-applications). Clients of other protocols are on [another page](clients.md).

Each run has two checks. The model server must receive each message once, after the right messages. The program must
show each word once, in order. After a lost connection, a program may also show the text that it had before (Continue
does). The connection between program and gateway is closed at a random byte. The gateway is killed with SIGKILL.

| program | version |
| --- | --- |
{versions}
| midstream | {version} |

| situation | {names} |
| --- | {lines} |
{rows}

{total} runs on {day}, {faults} with faults (seed {seed}). A dash: the program does not offer this without a terminal.

Continue repeats a request whose connection was lost. It also shows the text that it had before the connection was lost.
The model does not receive a second request.
{failed}"""


def page_of(table: Mapping[str, Mapping[str, Sequence[HostRun]]], *, seed: int) -> str:
    """Return the page with the results."""
    runs = [run for cells in table.values() for runs in cells.values() for run in runs if run.is_played]
    rows = [
        " | ".join(
            [
                f"| {name}",
                *(_cell(cells[name]) if name in cells else "-" for cells in table.values()),
            ]
        )
        + " |"
        for name in SITUATIONS
    ]
    failed = [
        f"\n- {program}, {name}: {fault}"
        for program, cells in table.items()
        for name, all_ in cells.items()
        for run in all_
        for fault in run.verdict.faults
    ]
    return PAGE.format(
        versions="\n".join(f"| {name} | {PROGRAMS[name].version()} |" for name in table),
        version=__version__,
        names=" | ".join(table),
        lines=" | ".join("---" for _ in table),
        rows="\n".join(rows),
        total=len(runs),
        day=time.strftime("%Y-%m-%d", time.gmtime()),
        faults=sum(bool(run.verdict.faults) for run in runs),
        seed=seed,
        failed="".join([*failed, "\n"]) if failed else "",
    )


def _cell(runs: Sequence[HostRun]) -> str:
    played = [run for run in runs if run.is_played]
    passed = sum(not run.verdict.faults for run in played)
    return f"{passed} of {len(played)} passed" if played else "-"


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
