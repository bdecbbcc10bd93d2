"""The example of `docs/guides/prefix-cache.md` runs, and its table is complete."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from midstream.agents.prefix_difference import PrefixCause

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "prefix-cache.md").read_text(encoding="utf-8")


def test_the_example_runs() -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(example, "prefix-cache.md", "exec"), names)  # The code is from our own guide.

    marked = names["marked"]
    blocks = (marked["tools"][0], marked["system"][0], marked["messages"][0]["content"][0])
    assert [block["cache_control"] for block in blocks] == [{"type": "ephemeral"}] * 3


def test_every_cause_is_in_the_table() -> None:
    assert sorted(re.findall(r"^\| `(\w+)` \|", GUIDE, re.MULTILINE)) == sorted(PrefixCause)
