from __future__ import annotations

import ast
from pathlib import Path

import midstream.history.repair
from midstream.history.repair.rules import REFUSALS, HistoryRule

HOME = Path(midstream.history.repair.__file__).parent


def test_every_code_of_an_edit_has_its_rule() -> None:
    found = {
        node.args[0].value
        for path in HOME.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "note"
        and isinstance(node.args[0], ast.Constant)
    }
    assert found - REFUSALS.keys() == set()


def test_a_rule_may_have_no_known_error_text() -> None:
    assert HistoryRule("Say something.").errors == ()
