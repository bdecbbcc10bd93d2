"""The source tree for the house tests."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.permanent_objects import permanent_objects

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "midstream"

Function = ast.FunctionDef | ast.AsyncFunctionDef


def python_files(*folders: str) -> list[Path]:
    """Return the Python files below these folders of the repository; a missing folder has none."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    """Return a file's name from the root of the repository."""
    return path.relative_to(ROOT).as_posix()


def in_package(path: Path) -> str:
    """Return a source file's name below `src/midstream`."""
    return path.relative_to(PACKAGE).as_posix()


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file, in the order of `ast.walk`.

    All files together have a million nodes, which stay in memory: the garbage collector would take longer for
    them than for everything else.
    """
    with permanent_objects():
        return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))))


def calls(path: Path) -> Iterator[ast.Call]:
    return (node for node in nodes(path) if isinstance(node, ast.Call))


def functions(path: Path) -> Iterator[Function]:
    return (node for node in nodes(path) if isinstance(node, Function))


def docstring_lines(function: Function) -> int:
    """Return the number of lines of a function's docstring."""
    if ast.get_docstring(function) is None:
        return 0
    first = function.body[0]
    return (first.end_lineno or first.lineno) - first.lineno + 1


@cache
def imported_names(path: Path) -> dict[str, str]:
    """Return the meaning of each name that a file imports: `{"rand": "random.random"}`."""
    names: dict[str, str] = {}
    for node in nodes(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                names[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def full_name(node: ast.expr, imported: dict[str, str]) -> str | None:
    """Return the dotted name of an expression, if its first name was imported."""
    match node:
        case ast.Name(id=name):
            return imported.get(name)
        case ast.Attribute(value=value, attr=attr):
            owner = full_name(value, imported)
            return f"{owner}.{attr}" if owner else None
    return None
