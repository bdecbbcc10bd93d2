"""The command lines of both processes."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from midstream.environment import Fault
from midstream.testing.fake_worlds import KillingWorld


class Inside(StrEnum):
    """A place to die inside a tool."""

    INSIDE_TOOL = "inside_tool"
    """The tool has started, and its effect has not happened."""


Point = Fault | Inside
"""A place where a process may die."""


def find_point(name: str) -> Point:
    """Return the point of this name; raises ValueError if there is none."""
    return Inside(name) if name in list(Inside) else Fault(name)


class Options:
    """The command line of a process that may be ordered to kill itself.


    Args:
        name: `server` or `client`: the prefix of its files in the folder.
    """

    def __init__(self, name: str, arguments: Sequence[str] | None = None) -> None:
        parser = argparse.ArgumentParser(prog=f"python -m tests.fault.fault_{name}_process")
        parser.add_argument("folder", type=Path, help="where stores, ledger and notes are")
        parser.add_argument("port", type=int)
        parser.add_argument("--kill-at", type=find_point, help="the fault point to die at")
        parser.add_argument("--kill-time", type=int, default=1, help="the time it is reached")
        parser.add_argument("--cancel", action="store_true", help="stop the turn while the slow tool runs")
        parser.add_argument("--story", default="words", help="what the turn is about")
        given = parser.parse_args(arguments)
        self.folder: Path = given.folder
        self.port: int = given.port
        self.is_cancelling: bool = given.cancel
        notes = os.open(self.folder / f"{name}.reached", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self.notes = notes
        """The file in which the world counts the reached fault points, over all processes of this name."""
        is_inside = isinstance(given.kill_at, Inside)
        self.death: tuple[Fault | None, int] = (None if is_inside else given.kill_at, given.kill_time)
        self.dies_inside: bool = is_inside
        """Whether to die in the middle of the first tool with effects."""
        self.story: str = given.story

    def world(self) -> KillingWorld:
        return KillingWorld(*self.death, report_to=self.notes)
