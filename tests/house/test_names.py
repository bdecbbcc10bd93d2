"""One name for one thing: public class names and module names are unique in the package."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from tests.house.source import PACKAGE, in_package, nodes, python_files


def test_no_public_class_name_is_used_twice() -> None:
    assert _used_twice((path, name) for path in _modules() for name in _classes(path)) == {}


def test_no_module_name_is_used_twice() -> None:
    assert _used_twice((path, path.stem) for path in _modules() if not path.stem.startswith("__")) == {}


def _modules() -> list[Path]:
    return python_files(PACKAGE.as_posix())


def _classes(path: Path) -> list[str]:
    return [
        node.name for node in nodes(path) if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]


def _used_twice(names: Iterable[tuple[Path, str]]) -> dict[str, list[str]]:
    """Return the names with more than one module, and these modules."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path, name in names:
        found[name].add(in_package(path))
    return {name: sorted(modules) for name, modules in found.items() if len(modules) > 1}
