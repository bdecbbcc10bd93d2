"""A docstring begins with a verb or a noun."""

from __future__ import annotations

import ast
import re

from tests.house.source import name_of, nodes, python_files

OPENING = re.compile(r"(What|Who|Whoever|Whose|Where|Whatever|Of|That|Those|Nobody|Everybody)\b")
LEFT = 38
"""Docstrings that still begin otherwise. Lower it with each that is rewritten; it never rises."""


def test_docstrings_that_begin_with_a_pronoun_do_not_become_more() -> None:
    found = [
        f"{name_of(path)}:{node.body[0].lineno}"
        for path in python_files("src/midstream")
        for node in nodes(path)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if OPENING.match(ast.get_docstring(node) or "")
    ]
    assert len(found) <= LEFT, "begin a new docstring with a verb or a noun"
    assert len(found) >= LEFT, f"lower LEFT to {len(found)}"
