"""A few random kills of each program of `tests.frameworks.kills`, with the frameworks that are installed here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.frameworks.kills import KINDS, is_installed

pytestmark = [pytest.mark.fault, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
WAIT_S = 170.0


@pytest.mark.parametrize("framework", KINDS)
def test_a_program_of_the_guide_is_killed_at_random(framework: str) -> None:
    if not is_installed(KINDS[framework]):
        pytest.skip(f"{framework} is in its own environment: `make frameworks`")
    command = ("-m", "tests.frameworks.kills", "--rounds", "1", "--frameworks", framework)
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.count("| 1 |") >= 5
