"""The example of `docs/guides/reuse.md` runs, and what it says of limits is the truth."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from midstream.core.reuse.records import RECORD_AGE_MAX_S, RECORDS_MAX
from midstream.runtime.pool import Pooled, PoolLimits
from midstream.runtime.pool_turns import REBUILT_NOTE, Way
from midstream.testing import run_turn
from tests.cli.processes import Serving, run

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
    assert report.way is Way.RESUMED
    assert report.line in GUIDE


SCRIPTED = """
import importlib, sys

from midstream.testing.upstreams import ScriptedUpstream

module = importlib.import_module({module!r})
setattr(module, {kind!r}, lambda *arguments, **options: ScriptedUpstream())
"""
"""The upstream of a guide is played; all else of its snippet is run as it is printed."""
UPSTREAMS = {
    "reuse": ("midstream.testing.upstreams", "ScriptedUpstream", ""),
    "claude": ("midstream.integrations.claude_agent", "Claude", "claude_agent_sdk"),
    "acp": ("midstream.integrations.acp", "AcpAgent", "acp"),
    "approvals": ("midstream.integrations.acp", "AcpAgent", "acp"),
    "cursor": ("midstream.integrations.cursor", "Cursor", "cursor_sdk"),
    "codex": ("midstream.integrations.codex", "Codex", "openai_codex"),
    "openai-memory": ("midstream.integrations.openai_conversation", "OpenAIChain", "openai"),
}


@pytest.mark.slow
@pytest.mark.parametrize("guide", UPSTREAMS)
def test_the_snippet_of_a_guide_is_served_and_goes_on_after_a_kill(guide: str, tmp_path: Path) -> None:
    module, kind, package = UPSTREAMS[guide]
    if package:
        pytest.importorskip(package, reason=f"{package} is not installed")
    text = (GUIDES / f"{guide}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (snippet,) = [block for block in blocks if "Pooled(" in block]
    app = snippet if guide == "reuse" else SCRIPTED.format(module=module, kind=kind) + snippet
    environment = {"MIDSTREAM_HOME": str(tmp_path / "client")}
    options = ("--no-auth",)
    with Serving(tmp_path, options=options, app=app) as server:
        for number in (1, 2):
            assert _chatted(server, environment) == f"answer {number}\n"
        server.kill()
    # The scripted upstream dies with its process: a fresh agent is told everything, as one message.
    with Serving(tmp_path, options=options, app=app) as server:
        assert _chatted(server, environment) == "answer 1\n"
        assert server.terminate() == 0


def _chatted(server: Serving, environment: dict[str, str]) -> str:
    arguments = ("chat", server.url, "--session", "s", "--message", "hello")
    done = run(*arguments, environment=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "said",
    [
        f"{LIMITS.live_max} agents stay open in a process, each for {LIMITS.rest_s:.0f} s",
        f"a turn waits {LIMITS.wait_s:.0f} s",
        f"nothing for {LIMITS.silence.idle_s:.0f} s, or {LIMITS.silence.tool_s:.0f} s while",
        f"{LIMITS.silence.close_s:.0f} s for a run to stop",
        f"told {LIMITS.budget.total_chars:,} characters, {LIMITS.budget.result_chars} of each result",
        f"after {RECORD_AGE_MAX_S / 86400:.0f} days without use and beyond {RECORDS_MAX}",
        REBUILT_NOTE.strip(),
    ],
)
def test_the_guide_knows_the_limits(said: str) -> None:
    assert said in " ".join(GUIDE.split())
