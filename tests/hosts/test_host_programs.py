"""A short form of `make hosts`: two programs that come as wheels, in the most different situations."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.hosts.__main__ import play
from tests.hosts.host_programs import PROGRAMS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PROGRAMS["claude"].is_installed, reason="the agent programs are not installed: make agents"
    ),
]


@pytest.mark.parametrize(
    ("program", "situation"),
    [
        pytest.param("claude", "gateway killed during an answer", marks=pytest.mark.long),
        ("codex", "connection closed by TCP reset (RST)"),
        pytest.param("codex", "tool of an MCP server", marks=pytest.mark.long),
    ],
)
async def test_an_unmodified_program_passes_the_situation(
    program: str, situation: str, tmp_path: Path
) -> None:
    run = await play(PROGRAMS[program], situation, tmp_path, random.Random(f"{program} {situation}"))
    assert (run.is_played, run.verdict.faults) == (True, []), run.verdict
