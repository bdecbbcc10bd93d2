"""CPU time of imports and `--help`, compared with `python -c pass` in the same run."""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

import msgspec

ROUNDS = 9
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import midstream": ["-c", "import midstream"],
    "import midstream.client": ["-c", "import midstream.client"],
    "midstream --help": ["-m", "midstream", "--help"],
    "midstream --version": ["-m", "midstream", "--version"],
}


class Start(msgspec.Struct):
    """CPU time of one command."""

    command: str
    cpu_ms: float
    of_python: float


def _cpu_s(arguments: list[str]) -> float:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure() -> list[Start]:
    """Run each command `ROUNDS` times, alternating. The first round only fills the caches."""
    spent: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for number in range(ROUNDS + 1):
        for name, arguments in COMMANDS.items():
            cpu_s = _cpu_s(arguments)
            if number:
                spent[name].append(cpu_s)
    python_s = statistics.median(spent["python -c pass"])
    return [
        Start(name, 1000 * statistics.median(values), statistics.median(values) / python_s)
        for name, values in spent.items()
    ]


def table(starts: list[Start]) -> str:
    """Return the starts as text for a terminal."""
    lines = [f"{'':28}{'CPU ms':>8}{'of python':>11}"]
    lines += [f"{each.command:28}{each.cpu_ms:8.0f}{each.of_python:11.1f}" for each in starts]
    return "\n".join(lines)


def run(folder: Path) -> list[Start]:  # noqa: ARG001 - every bench has this parameter
    """Measure, print, return."""
    starts = measure()
    print(table(starts))
    return starts
