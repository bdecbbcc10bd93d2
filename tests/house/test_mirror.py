"""`src/midstream/a/b.py` is tested by `tests/a/test_b.py`."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.conftest import SLOW_FILES
from tests.house.source import PACKAGE, ROOT, in_package, nodes, python_files

# Module below src/midstream: why it has no test file of its own.
WITHOUT_TEST_FILE: dict[str, str] = {
    "dialects/api_callers.py": "values without rules: the tests of the gateway's limits make them",
    "agents/upstream_abilities.py": "values without rules: every test of classification makes them",
    "session/application_request.py": "values without rules: the tests of applications make them",
    "session/call_references.py": "values without rules: every test of the turn makes them",
    "session/turn/commands.py": "values without rules: every test of the turn makes them",
    "session/turn/states.py": "values without rules: every test of the turn makes them",
    "__main__.py": "two lines; the tests of the command line run it as a process",
}


def test_every_module_with_code_has_its_test_file() -> None:
    missing = {
        in_package(path): str(expected.relative_to(ROOT))
        for path in python_files("src/midstream")
        if in_package(path) not in WITHOUT_TEST_FILE
        and _has_code(path)
        and not (expected := _test_file(path)).exists()
    }
    assert missing == {}


def test_every_exception_is_still_needed() -> None:
    needless = [name for name in WITHOUT_TEST_FILE if _is_present_and_tested(PACKAGE / name)]
    assert needless == []


def _test_file(path: Path) -> Path:
    """Return the expected test file. `cli/__init__.py` is the module `cli`: its tests are `tests/cli/test_cli.py`."""
    module = path.parent.name if path.stem == "__init__" else path.stem.strip("_")
    return ROOT / "tests" / path.parent.relative_to(PACKAGE) / f"test_{module}.py"


def _is_present_and_tested(path: Path) -> bool:
    return path.exists() and _test_file(path).exists()


def _has_code(path: Path) -> bool:
    """Return whether a module has code beyond a list of imported public names."""
    return any(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) for node in nodes(path)
    )


def test_files_excluded_from_the_quick_run_exist() -> None:
    assert [name for name in SLOW_FILES if not (ROOT / "tests" / name).exists()] == []
