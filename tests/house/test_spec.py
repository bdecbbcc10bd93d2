"""Every clause a test cites exists, and every clause of the turn is proved by some test."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.house.source import ROOT, parsed, python_files

CLAUSE = re.compile(r"^\*\*(TURN-\d+)\*\*", re.MULTILINE)
PAGE = ROOT / "docs" / "spec" / "turn.md"


def test_the_clauses_of_the_turn_are_numbered_without_gap() -> None:
    assert _clauses() == [f"TURN-{number}" for number in range(1, len(_clauses()) + 1)]
    assert _clauses() != []


def test_every_clause_is_cited_by_a_test_and_every_cited_clause_exists() -> None:
    assert sorted(set(_clauses()) ^ set(_cited())) == []


def _clauses() -> list[str]:
    return CLAUSE.findall(PAGE.read_text(encoding="utf-8"))


def _cited() -> Iterator[str]:
    for path in python_files("tests"):
        for call in ast.walk(parsed(path)):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "spec":
                for argument in call.args:
                    if isinstance(argument, ast.Constant) and str(argument.value).startswith("TURN-"):
                        yield str(argument.value)
