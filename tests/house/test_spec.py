"""Every clause a test cites exists, and every clause of the turn and of the stream has a test."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.house.source import ROOT, calls, python_files

CLAUSE = re.compile(r"^\*\*([A-Z]+-\d+)\*\*", re.MULTILINE)
PAGES = {
    "TURN": "turn.md",
    "STREAM": "stream.md",
    "DRIVEN": "driven.md",
    "REUSE": "reuse.md",
    "SEC": "security.md",
}
SECTIONS = {"SEC": (1, 40, 70)}
"""Numbers with which the sections of a page begin; a page without sections begins with 1."""


@pytest.mark.parametrize("kind", PAGES)
def test_the_clauses_of_a_page_are_in_order(kind: str) -> None:
    numbers = [int(clause.partition("-")[2]) for clause in _clauses(kind)]
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize("kind", PAGES)
def test_the_clauses_of_a_page_are_numbered_without_gap(kind: str) -> None:
    numbers = [int(clause.partition("-")[2]) for clause in _clauses(kind)]
    begins = SECTIONS.get(kind, (1,))
    gaps = [number for number in numbers if number not in begins and number - 1 not in numbers]
    assert gaps == []
    assert numbers[:1] == [1]


@pytest.mark.parametrize("kind", PAGES)
def test_every_clause_is_cited_by_a_test_and_every_cited_clause_exists(kind: str) -> None:
    assert sorted(set(_clauses(kind)) ^ set(_cited(kind))) == []


def test_every_clause_of_the_stream_names_the_side_that_it_binds() -> None:
    assert sorted(set(_clauses("STREAM")) - _sides().keys()) == []


def test_the_table_for_clients_has_every_clause_that_binds_a_client_once_and_no_other() -> None:
    text = (ROOT / "docs" / "spec" / "stream.md").read_text(encoding="utf-8")
    table = text.partition("| a client that | needs |")[2].partition("\n\n")[0]
    listed = [clause for row in table.splitlines()[2:] for clause in _listed(row.split("|")[2])]
    bound = [clause for clause, side in _sides().items() if side != "server"]
    assert sorted(listed) == sorted(bound)


def _sides() -> dict[str, str]:
    text = (ROOT / "docs" / "spec" / "stream.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^\*\*(STREAM-\d+)\*\* \*(client|server|both)\*: ", text, re.MULTILINE))


def _listed(cell: str) -> Iterator[str]:
    for part in cell.strip().removeprefix("STREAM-").split(", "):
        first, _, last = part.partition(" to ")
        yield from (f"STREAM-{number}" for number in range(int(first), int(last or first) + 1))


def _clauses(kind: str) -> list[str]:
    return CLAUSE.findall((ROOT / "docs" / "spec" / PAGES[kind]).read_text(encoding="utf-8"))


def _cited(kind: str) -> Iterator[str]:
    for path in python_files("tests"):
        for call in calls(path):
            if isinstance(call.func, ast.Name) and call.func.id == "spec":
                for argument in call.args:
                    if isinstance(argument, ast.Constant) and str(argument.value).startswith(f"{kind}-"):
                        yield str(argument.value)
