"""List the cases of kill matrices, chaos, simulation and conformance.

`python -m tests.golden.recorded_cases` records them.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from midstream.testing.conformance.scripts import scripts
from tests.chaos.plan import ChaosPlan
from tests.chaos.turns import WAYS

ROOT = Path(__file__).parents[2]
PATH = Path(__file__).parent / "data" / "cases.json"
FOLDERS = ("fault", "chaos", "testing/conformance", "simulation")
COLLECT_S = 150
FATES = 200
"""Number of connections of a chaos run whose fates are recorded."""
SEED, CONNECTIONS_PER_KILL = 5, 40
"""Settings of the recorded run: a seed always gives the same decisions, whichever seed the short run has."""


@functools.cache
def collected() -> dict[str, dict[str, int]]:
    """Return the tests of each folder, with the full matrices, without the names of their files: name to count."""
    environment = {**os.environ, "MIDSTREAM_FAULT_FULL": "1"}
    environment.pop("MIDSTREAM_QUICK", None)
    # Without plugins for parallel runs and without the options of the current run.
    environment = {key: value for key, value in environment.items() if not key.startswith("PYTEST_")}
    places = [f"tests/{folder}" for folder in FOLDERS]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *places],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=COLLECT_S,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    lines = run.stdout.splitlines()
    return {
        folder: dict(
            sorted(Counter(line.partition("::")[2] for line in lines if line.startswith(place)).items())
        )
        for folder, place in zip(FOLDERS, [f"{each}/" for each in places], strict=True)
    }


def listed_scripts() -> list[dict[str, Any]]:
    """Return the conformance scripts: their identities and lengths."""
    return [
        {
            "side": side,
            "name": script.name,
            "clauses": list(script.clauses),
            "needs": list(script.needs),
            "steps": len(script.steps),
        }
        for side in ("server", "client")
        for script in scripts(side)
    ]


def planned_chaos() -> dict[str, Any]:
    """Return the decisions of a seed of a chaos run, as plain values."""
    plan = ChaosPlan(SEED, connections_per_kill=CONNECTIONS_PER_KILL)
    return {
        "seed": SEED,
        "fates": [str(plan.fate(number).harm.value) for number in range(FATES)],
        "kills": [list(plan.kill(number, list(WAYS))) for number in range(FATES // 10)],
    }


def main() -> None:
    recorded = {
        "tests": collected(),
        "scripts": listed_scripts(),
        "chaos": planned_chaos(),
    }
    PATH.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
