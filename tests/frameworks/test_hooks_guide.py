"""Every example of `docs/guides/hooks.md` runs, with the real packages and a strict provider on this machine."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.models.strict_provider import strict_provider

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "hooks.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_the_guide_has_its_examples() -> None:
    assert len(EXAMPLES) == 6


@pytest.mark.parametrize("example", EXAMPLES, ids=[f"example {number}" for number in range(len(EXAMPLES))])
def test_an_example_runs(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in re.findall(r"^(?:from|import) (\w+)", example, re.MULTILINE):
        pytest.importorskip(package)
    names: dict[str, Any] = {}
    with strict_provider() as provider, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="create_react_agent has been moved")
        monkeypatch.setenv("ANTHROPIC_BASE_URL", provider.url)
        monkeypatch.setenv("OPENAI_BASE_URL", f"{provider.url}/v1")
        monkeypatch.setenv("ANTHROPIC_API_KEY", "k")
        monkeypatch.setenv("OPENAI_API_KEY", "k")
        exec(compile(example, GUIDE.name, "exec"), names)  # it is our own guide
    outcome = names.get("response") or names.get("result") or names.get("state") or names.get("agent")
    assert outcome is not None
    assert "on it" in repr(outcome) or "agent" in names
