"""Write the list of test files that `make check` leaves to `make test`: `python tools/slow_files.py REPORT`.

`make test ARGS=--junit-xml=REPORT` makes the report, of all tests. A file is slow if its tests are, on average, or
if it imports for long, because it is the first that needs a large package. Write the list again if `make check`
takes longer than a minute.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

TOOLS = Path(__file__).parent
TESTS = TOOLS.parent / "tests"
LIST = TESTS / "slow_files.txt"
SLOW_S = 0.02
"""Seconds of a test, on the average of its file."""
IMPORT_S = 0.35
"""Seconds of CPU to import a file of tests."""
ALWAYS = "house/"
"""Tests of names, style and structure, which every commit has to pass."""
MARK = "slow to import: "


def slow_files(report: Path) -> Iterator[str]:
    """Iterate over the files of a report whose tests are slow, as paths below `tests`."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for case in ET.parse(report).iter("testcase"):  # noqa: S314 - pytest wrote it
        modules = [each for each in case.attrib["classname"].split(".") if each[:1].islower()]
        if modules:
            seconds["/".join(modules[1:]) + ".py"].append(float(case.attrib["time"]))
    for path, times in sorted(seconds.items()):
        if sum(times) > SLOW_S * len(times) and not path.startswith(ALWAYS) and (TESTS / path).exists():
            yield path


def slow_imports() -> list[str]:
    """Return the files that import for long in a run of `make check` with the present list.

    A package is imported by the next file that needs it, so repeat this with the longer list until nothing is found.
    """
    command = [sys.executable, "-m", "pytest", "--collect-only", "--quiet", "-p", "slow_files"]
    environment = {**os.environ, "MIDSTREAM_QUICK": "1", "PYTHONPATH": str(TOOLS)}
    done = subprocess.run(
        command,
        cwd=TOOLS.parent,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [line.removeprefix(MARK) for line in done.stderr.splitlines() if line.startswith(MARK)]


def write(files: set[str]) -> None:
    LIST.write_text("".join(f"{path}\n" for path in sorted(files)), encoding="utf-8")


def main(report: Path) -> None:
    files = set(slow_files(report))
    write(files)
    while found := slow_imports():
        print(*found, sep="\n")
        files.update(found)
        write(files)


# --- as a plugin of pytest --------------------------------------------------------------------------------------------

_FOUND: list[str] = []


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Measure the import of a file."""
    began = time.process_time()
    collected = yield
    if isinstance(collector, pytest.Module) and time.process_time() - began > IMPORT_S:
        _FOUND.append(collector.path.relative_to(TESTS).as_posix())
    return collected


def pytest_unconfigure() -> None:
    """Print the files, after pytest has ceased to capture what is printed."""
    sys.stderr.write("".join(f"{MARK}{path}\n" for path in _FOUND))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
