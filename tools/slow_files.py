"""Write the list of test files that `make check` leaves to `make test`: `python tools/slow_files.py REPORT`.

REPORT is what pytest writes with `--junit-xml` in a run of all tests. Write the list anew where `make check` takes
longer than a minute.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
LIST = TESTS / "slow_files.txt"
SLOW_S = 0.03
"""Seconds of a test, on the average of its file."""
ALWAYS = "house/"
"""Tests of names, style and structure, which every commit has to pass."""


def slow_files(report: Path) -> Iterator[str]:
    """Iterate over the slow files of a report, as paths below `tests`."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for case in ET.parse(report).iter("testcase"):  # noqa: S314 - pytest wrote it
        modules = [each for each in case.attrib["classname"].split(".") if each[:1].islower()]
        if modules:
            seconds["/".join(modules[1:]) + ".py"].append(float(case.attrib["time"]))
    for path, times in sorted(seconds.items()):
        if sum(times) > SLOW_S * len(times) and not path.startswith(ALWAYS) and (TESTS / path).exists():
            yield path


if __name__ == "__main__":
    LIST.write_text("".join(f"{path}\n" for path in slow_files(Path(sys.argv[1]))), encoding="utf-8")
