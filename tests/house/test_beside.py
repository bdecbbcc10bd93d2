"""Parallel commands: their outputs are kept apart, and the failure of any is the failure of all."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def beside(*commands: list[str], last: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/beside.py", *map(shlex.join, commands), "--", *last]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_outputs_are_kept_apart_and_the_closing_line_is_the_last() -> None:
    waits = python("import sys; print('one', flush=True); print('two', file=sys.stderr)")
    done = beside(waits, last=python("print('three\\nfour')"))
    assert done.stdout.splitlines() == ["three", f"--- {shlex.join(waits)}", "one", "two", "four"]
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("failing", ["first", "second", "last"])
def test_the_failure_of_any_is_the_failure_of_all_and_the_others_are_run(failing: str) -> None:
    commands = {
        name: python(f"print('{name}'); exit({int(name == failing)})") for name in ("first", "second")
    }
    last = python(f"print('last'); exit({int(failing == 'last')})")
    done = beside(*commands.values(), last=last)
    assert done.returncode == 1
    assert (
        done.stderr.rstrip()
        == f"failed: {shlex.join(commands[failing]) if failing != 'last' else ' '.join(last)}"
    )
    assert {"first", "second", "last"} <= set(done.stdout.splitlines())
