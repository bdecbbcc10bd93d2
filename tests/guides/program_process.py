"""Run Python programs one after the other, as `__main__` with their own globals: the SDKs are imported once
for all.

Each line of stdin is a `Request`, each line of stdout a `Result`.
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
import threading
import traceback
from pathlib import Path

import msgspec
from msgspec import Struct


class Request(Struct):
    """A program to run: `program.py` of this folder, in it, with this environment."""

    folder: str
    environment: dict[str, str]


class Result(Struct):
    """The output of a program, and the traceback that ended it."""

    out: str
    error: str = ""


def run(request: Request) -> Result:
    """Run one program to its end."""
    threads = {*threading.enumerate()}
    printed = io.StringIO()
    error = ""
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    sys.path.insert(0, request.folder)
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path("program.py", run_name="__main__")
    except BaseException:  # noqa: BLE001 - the test shows it
        error = traceback.format_exc()
    finally:
        sys.path.remove(request.folder)
        _unload_modules_of(Path(request.folder))
    left = [each.name for each in {*threading.enumerate()} - threads if not each.daemon]
    if left and not error:
        error = f"the program does not end: it left the threads {left}"
    return Result(printed.getvalue(), error)


def _unload_modules_of(folder: Path) -> None:
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None)
        if file is not None and Path(file).is_relative_to(folder):
            del sys.modules[name]


def main() -> None:
    """Serve requests until stdin ends."""
    for line in sys.stdin.buffer:
        result = run(msgspec.json.decode(line, type=Request))
        sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
