"""Limits of size: a function fits on a screen, a file is readable in one sitting, and a class has one idea."""

from __future__ import annotations

import ast

from tests.house.source import Function, docstring_lines, functions, name_of, nodes, python_files

FUNCTION_LINES_MAX = 60
FILE_LINES_MAX = 800
ATTRIBUTES_MAX = 20
FLAGS_MAX = 3
FOLDERS = ("src", "tests", "tools", "bench", "examples")


def test_every_function_fits_on_a_screen() -> None:
    too_long = {
        f"{name_of(path)}:{function.lineno} {function.name}": lines
        for path in python_files(*FOLDERS)
        for function in functions(path)
        if (lines := _lines_of(function)) > FUNCTION_LINES_MAX
    }
    assert too_long == {}


def test_every_file_is_below_the_size_limit() -> None:
    too_long = {
        name_of(path): lines
        for path in python_files(*FOLDERS)
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > FILE_LINES_MAX
    }
    assert too_long == {}


def test_a_class_with_behaviour_has_few_attributes_and_few_flags() -> None:
    too_wide = {
        f"{name_of(path)}:{node.lineno} {node.name}": (len(names), len(flags))
        for path in python_files("src")
        for node in nodes(path)
        if isinstance(node, ast.ClassDef) and _has_behaviour(node)
        for names in [_attributes(node)]
        for flags in [[each for each in names if each.lstrip("_").startswith(("is_", "has_"))]]
        if len(names) > ATTRIBUTES_MAX or len(flags) > FLAGS_MAX
    }
    assert too_wide == {}


def _has_behaviour(node: ast.ClassDef) -> bool:
    return any(isinstance(each, ast.FunctionDef) and each.name == "__init__" for each in node.body)


def _attributes(node: ast.ClassDef) -> set[str]:
    """Return the names that a class's body annotates, and those that its methods set on `self`."""
    return {
        each.target.id
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    } | {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    }


def _lines_of(function: Function) -> int:
    end = function.end_lineno or function.lineno
    return end - function.lineno + 1 - docstring_lines(function)
