"""The examples in the guides of Claude and of agents behind a protocol run, and their tables are correct."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import midstream

pytest.importorskip("claude_agent_sdk", reason="the Claude Agent SDK is not installed")
pytest.importorskip("acp", reason="the Agent Client Protocol's package is not installed")

from midstream.agents.acp import AcpAgent
from midstream.agents.claude import Claude

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
MADE = {"claude.md": Claude, "acp.md": AcpAgent}
EXAMPLES = [
    pytest.param(example, id=f"{name}-{number}")
    for name in MADE
    for number, example in enumerate(
        re.findall(
            r"^```python\n(.*?)^```", (GUIDES / name).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
        )
    )
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs(example: str) -> None:
    if "Pooled" in example and not hasattr(midstream, "Pooled"):
        pytest.skip("there is no pool yet")
    names: dict[str, Any] = {}
    exec(compile(example, "guide.md", "exec"), names)  # it is our own guide
    assert {"agent", "upstream", "careful"} & {*names}


@pytest.mark.parametrize("name", MADE)
def test_every_option_is_in_the_table(name: str) -> None:
    guide = (GUIDES / name).read_text(encoding="utf-8")
    named = {*re.findall(r"^\| `(\w+)` \|", guide, re.MULTILINE)}
    taken = {
        parameter.name
        for parameter in inspect.signature(MADE[name]).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    assert named == taken - {"world"}
