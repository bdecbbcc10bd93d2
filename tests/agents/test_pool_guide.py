"""The example of `docs/guides/reuse.md` runs, and its table of limits is correct."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from midstream.agents.pool import Pooled, PoolLimits
from midstream.agents.pool_records import RECORD_AGE_MAX_S, RECORDS_MAX
from midstream.agents.pool_turns import REBUILT_NOTE, AgentOrigin
from midstream.agents.upstream_abilities import Abilities
from midstream.testing import run_turn

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
GUIDE = (GUIDES / "reuse.md").read_text(encoding="utf-8")
LIMITS = PoolLimits()


async def test_the_example_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(example, "reuse.md", "exec"), names)  # it is our own guide
    await names["host"].start()
    for text in ("one", "two", "three"):
        await run_turn(names["host"], "s", text)
    pool: Pooled = names["agent"].model
    report = pool.last("s")
    await names["host"].stop()
    assert report is not None
    assert report.way is AgentOrigin.RESUMED
    assert report.line in GUIDE


@pytest.mark.parametrize(
    "text",
    [
        f"{LIMITS.live_max} agents stay open in a process, each for {Abilities().rest_s:.0f} s",
        f"a turn waits {LIMITS.wait_s:.0f} s",
        f"nothing for {LIMITS.silence.idle_s:.0f} s, or {LIMITS.silence.tool_s:.0f} s while",
        f"{LIMITS.silence.close_s:.0f} s for a run to stop",
        f"at most {LIMITS.budget.total_chars:,} characters of a conversation",
        f"at most {LIMITS.budget.result_chars:,} of each result",
        f"after {RECORD_AGE_MAX_S / 86400:.0f} days without use",
        f"Beyond {RECORDS_MAX} records",
        REBUILT_NOTE.strip(),
    ],
)
def test_the_guide_has_the_limits(text: str) -> None:
    assert text in " ".join(GUIDE.split())
