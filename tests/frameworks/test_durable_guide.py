"""The examples of `docs/guides/pydantic-ai.md` about pydantic-ai run together, with a model that calls tools."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic_ai.models.test import TestModel

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "pydantic-ai.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


async def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    monkeypatch.setenv("OPENAI_API_KEY", "k")
    names: dict[str, Any] = {}
    for example in EXAMPLES[:2]:
        exec(compile(example, GUIDE.name, "exec"), names)  # it is our own guide
    with names["agent"].override(model=TestModel()):
        first = await names["answer"]("chat-42", "m-1", "Book a hotel in Oslo")
        assert first == '{"book":"booked in a"}'
        assert await names["answer"]("chat-42", "m-1", "Book a hotel in Oslo") == first
    await names["carry_on"]()  # nothing is open
    await names["durable"].close()
