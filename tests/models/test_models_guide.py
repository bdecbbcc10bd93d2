"""The examples of `docs/guides/models.md` run, and its tables are complete."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from midstream import errors
from midstream.engine.agent import Agent
from midstream.engine.watchdog import Level, StallSeen
from midstream.errors import ModelError
from midstream.models.http_limits import HttpLimits
from midstream.timing import StallBudgets, StalledOn

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "models.md").read_text(encoding="utf-8")


def _examples() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for example in re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL):
        names: dict[str, Any] = {}
        exec(compile(example, "models.md", "exec"), names)  # The code is from our own guide.
        found.append(names)
    return found


def test_the_examples_run() -> None:
    watched, limited, claude, kept = _examples()
    agent = watched["agent"]
    assert isinstance(agent, Agent)
    assert agent.on_stall is not None
    agent.on_stall(StallSeen(Level.FAIL, "s", 1, 1, StalledOn.FIRST_TOKEN, 600.0))
    assert watched["stalls"] == {("fail", "first_token"): 1}
    assert limited["model"].name == "openai-compatible:some-model"
    assert claude["model"].name == "anthropic-messages:some-model"
    assert kept["model"].name == "openai-responses:some-model"


def test_every_budget_is_in_the_table_with_its_default() -> None:
    rows = re.findall(r"^\| `(\w+_s)` \| (\d+) \|", GUIDE, re.MULTILINE)
    budgets, limits = StallBudgets(), HttpLimits()
    assert {name: float(seconds) for name, seconds in rows} == {
        **{name: getattr(budgets, name) for name in budgets.__struct_fields__},
        **{name: getattr(limits, name) for name in ("connect_s", "acquire_s")},
    }


def test_every_error_of_a_model_that_needs_an_action_is_named() -> None:
    kinds = [
        each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, ModelError)
    ]
    codes = {kind.code for kind in kinds if kind is not ModelError}
    assert codes - set(re.findall(r"`(\w+)`", GUIDE)) == {"model_missing", "model_forgot"}
