"""Docstrings are plain technical English, as far as a machine can check it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.house.source import name_of, nodes, python_files

OPENING = re.compile(r"(What|Who|Whoever|Whose|Where|Whatever|Of|That|Those|Nobody|Everybody)\b")
PERSONS = re.compile(
    r"\b(told|tells?|says?|said|hears?|heard|nobody|whoever|somebody|everybody|anybody|knows?|forgets?"
    r"|asks? for leave|wants?)\b",
    re.IGNORECASE,
)
PERSONS_MAX = 11
"""Limit of personifying words that are left: names of fields and of steps, such as `said` and `told`."""


def _docstrings() -> Iterator[tuple[str, str]]:
    for path in python_files("src/midstream"):
        for node in nodes(path):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                if text := ast.get_docstring(node):
                    yield f"{name_of(path)}:{node.body[0].lineno}", text


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    assert [place for place, text in _docstrings() if OPENING.match(text)] == []


def test_programs_are_not_described_as_persons() -> None:
    found = [f"{place} {word}" for place, text in _docstrings() for word in PERSONS.findall(text)]
    assert len(found) <= PERSONS_MAX, found
