"""A served LangGraph graph, killed before and after each write of its store, and finished by the next process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from midstream.session.calls import UNKNOWN_CONTENT
from tests.fault.extent import IS_FULL

pytestmark = pytest.mark.fault

SWEEP_S = 600.0
STEP = 1 if IS_FULL else 12
"""One of this many writes is fatal."""


def test_a_graph_continues_after_a_kill_at_any_write(tmp_path: Path) -> None:
    pytest.importorskip("langgraph")
    done = subprocess.run(
        [sys.executable, "-m", "tests.fault.graph_process", tmp_path, str(STEP)],
        capture_output=True,
        text=True,
        timeout=SWEEP_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lives = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lives) > 40 / STEP
    for life in lives:
        paid = life["ledger"].count("pay")
        assert paid <= 1, life
        allowed = [UNKNOWN_CONTENT] if paid == 0 else ["paid", UNKNOWN_CONTENT]
        answers = [
            f"A plan. Told: seen, {each}, asked to Sure? Confirmed: to All right?." for each in allowed
        ]
        assert life["answer"] in answers, life
        assert life["code"] == 0, life
    assert not lives[-1]["killed"]
