"""The source tree as the house tests see it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "midstream"

Function = ast.FunctionDef | ast.AsyncFunctionDef


def python_files(*folders: str) -> list[Path]:
    """Return the Python files below these folders of the repository; a missing folder has none."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    """Return a file's name as a person would write it: from the root of the repository."""
    return path.relative_to(ROOT).as_posix()


def in_package(path: Path) -> str:
    """Return a source file's name below `src/midstream`."""
    return path.relative_to(PACKAGE).as_posix()


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def docstring_lines(function: Function) -> int:
    """Return how many lines of a function are its docstring."""
    if ast.get_docstring(function) is None:
        return 0
    first = function.body[0]
    return (first.end_lineno or first.lineno) - first.lineno + 1


def imported_names(tree: ast.Module) -> dict[str, str]:
    """Return what each imported name stands for: `{"rand": "random.random"}`."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                names[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def full_name(node: ast.expr, imported: dict[str, str]) -> str | None:
    """Return the dotted name an expression stands for, if its first name was imported."""
    match node:
        case ast.Name(id=name):
            return imported.get(name)
        case ast.Attribute(value=value, attr=attr):
            owner = full_name(value, imported)
            return f"{owner}.{attr}" if owner else None
    return None
