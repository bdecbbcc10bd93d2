"""A function fits on a screen, a file in a head."""

from __future__ import annotations

from tests.house.source import Function, docstring_lines, functions, name_of, python_files

FUNCTION_LINES_MAX = 60
FILE_LINES_MAX = 800
FOLDERS = ("src", "tests", "tools", "bench", "examples")


def test_every_function_fits_on_a_screen() -> None:
    too_long = {
        f"{name_of(path)}:{function.lineno} {function.name}": lines
        for path in python_files(*FOLDERS)
        for function in functions(path)
        if (lines := _lines_of(function)) > FUNCTION_LINES_MAX
    }
    assert too_long == {}


def test_every_file_fits_in_a_head() -> None:
    too_long = {
        name_of(path): lines
        for path in python_files(*FOLDERS)
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > FILE_LINES_MAX
    }
    assert too_long == {}


def _lines_of(function: Function) -> int:
    end = function.end_lineno or function.lineno
    return end - function.lineno + 1 - docstring_lines(function)
