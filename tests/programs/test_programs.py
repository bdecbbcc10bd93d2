"""A short form of `make agents`: two programs that come as wheels, in the most different situations."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house.source import ROOT
from tests.programs.__main__ import play
from tests.programs.agent_programs import PROGRAMS

INSTALLED = ROOT / ".venv" / "agents"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (INSTALLED / "site").is_dir(), reason="the agent programs are not installed: make agents"
    ),
]


@pytest.mark.parametrize(
    ("program", "situation"),
    [
        ("claude", "gateway killed in an answer"),
        pytest.param("codex", "gateway killed between turns", marks=pytest.mark.long),
        pytest.param("codex", "provider cuts once", marks=pytest.mark.long),
    ],
)
async def test_a_real_program_passes_the_situation(
    program: str, situation: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AGENT_PROGRAMS", str(INSTALLED))
    assert (await play(PROGRAMS[program], situation, tmp_path)).faults == []
