"""A few random kills of each program of `tests.frameworks.guide_kills`, with the frameworks that are installed here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.frameworks.guide_kills import KINDS, is_installed
from tests.search import with_slow

pytestmark = [pytest.mark.fault, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
WAIT_S = 280.0


def play(framework: str, *options: str) -> subprocess.CompletedProcess[str]:
    if not is_installed(KINDS[framework]):
        pytest.skip(f"{framework} is in its own environment: `make frameworks`")
    command = ("-m", "tests.frameworks.guide_kills", "--frameworks", framework, *options)
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False
    )


@pytest.mark.parametrize("framework", with_slow(KINDS, (), {"LangGraph"}))
def test_a_program_of_the_guide_is_killed_at_random(framework: str) -> None:
    done = play(framework, "--rounds", "1")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.count("| 1 |") >= 5


@pytest.mark.long
def test_the_judge_finds_the_faults_of_a_program_that_loses_its_journal() -> None:
    done = play("pydantic-ai", "--modes", "conversation", "--broken", "--kills", "15", "--seconds", "120")
    assert done.returncode == 1, f"{done.stdout}\n{done.stderr}"
    assert "took effect 2 times" in done.stderr or "answers are" in done.stderr


PROGRAMS = """
from tests.frameworks.guide_kills import Tally, run_all

def play(framework, mode):
    if mode == "second":
        raise RuntimeError(f"{framework} cannot start")
    return Tally(rounds=1, faults=[f"a fault of the {mode}"])

print(*run_all([("a", "first"), ("b", "second"), ("c", "third")], play, 1), sep="\\n")
"""


def test_a_program_that_cannot_be_played_is_a_fault_and_the_others_are_played() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", PROGRAMS]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    lines = done.stdout.splitlines()
    first, *second, third = lines[3:]
    assert [line.count("|") for line in lines[:3]] == [10, 10, 10]
    assert (first, third) == ("a, first, a fault of the first", "c, third, a fault of the third")
    assert second[0] == "b, second, could not be played:"
    assert second[-1] == "RuntimeError: b cannot start"
