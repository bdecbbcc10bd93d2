"""Every Python example of `docs/guides/pydantic-ai.md` runs, in order and together."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from langchain_core.tools import tool
from pydantic_ai.models.test import TestModel

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "pydantic-ai.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


async def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    @tool
    async def book(city: str) -> str:
        """Book a hotel."""
        return city

    names: dict[str, Any] = {"model": TestModel(), "tools": [book]}
    for example in EXAMPLES:
        exec(compile(example, GUIDE.name, "exec"), names)  # it is our own guide
    assert len(EXAMPLES) == 3
    first = await names["answer"]("chat-42", "m-1", "Book a hotel in Oslo")
    assert first == '{"book":"booked in a"}'
    assert await names["answer"]("chat-42", "m-1", "Book a hotel in Oslo") == first
    await names["carry_on"]()  # nothing is open
    await names["durable"].close()
