"""The examples of `docs/guides/approvals.md` run, and its table is correct."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from midstream.agents.permission_rules import Ask, Permission
from midstream.client import Question
from midstream.server.app import asgi
from midstream.session.calls import CHOICES
from midstream.store.memory import MemoryStore
from tests.server.serving import served

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "approvals.md").read_text(encoding="utf-8")
WAIT_S = 60.0


async def test_the_agents_question_is_answered_by_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    agents, coders, programs = re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(agents, "approvals.md", "exec"), names)  # it is our own guide
    exec(compile(programs, "approvals.md", "exec"), names)
    asked: list[tuple[str, str]] = []

    def decide(question: Question) -> tuple[str, str]:
        asked.append((question.kind.value, question.name))
        return ("respond", "the large one") if question.kind == "question" else ("allow", "")

    async with served(asgi(names["agent"], store=MemoryStore())) as server, asyncio.timeout(WAIT_S):
        answer = await names["ask"](server.url, "Pay the invoice.", decide)
    assert (answer, names["PAID"]) == ("It is paid.", {"Ann": 250})
    assert asked == [("question", "ask_user"), ("approval", "pay")]
    assert names["was_paid"]("Ann", 250) == names["Happened"]("paid 250 to Ann")
    assert not names["is_large"]("Ann", 99)
    pytest.importorskip("acp", reason="the Agent Client Protocol's package is not installed")
    exec(compile(coders, "approvals.md", "exec"), names)
    wanted = Permission("", "Edit a.txt", "edit", "{}")
    assert names["rules"].verdict(wanted) == Ask("It changes something.", 3600)


def test_the_table_has_every_choice_of_every_question() -> None:
    rows = {
        match[1]: set(re.findall(r"`(\w+)`", match[2]))
        for match in re.finditer(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|$", GUIDE, re.MULTILINE)
    }
    assert rows == {kind.value: {choice.value for choice in choices} for kind, choices in CHOICES.items()}
