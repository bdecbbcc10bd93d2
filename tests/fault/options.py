"""What both processes are told on their command lines."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from midstream.environment import Fault
from midstream.testing.fake_worlds import KillingWorld


class Inside(StrEnum):
    """A place to die that only a tool knows."""

    INSIDE_TOOL = "inside_tool"
    """The tool has begun, and its effect has not happened."""


Point = Fault | Inside
"""Where a process may die."""


def point_named(name: str) -> Point:
    """Return the point of this name; raises ValueError for none."""
    return Inside(name) if name in list(Inside) else Fault(name)


class Options:
    """The command line of a process that may be told to kill itself.

    Args:
        name: `server` or `client`: what its files in the folder are called.
    """

    def __init__(self, name: str, arguments: Sequence[str] | None = None) -> None:
        parser = argparse.ArgumentParser(prog=f"python -m tests.fault.{name}_process")
        parser.add_argument("folder", type=Path, help="where stores, ledger and notes are")
        parser.add_argument("port", type=int)
        parser.add_argument("--kill-at", type=point_named, help="the fault point to die at")
        parser.add_argument("--kill-time", type=int, default=1, help="the time it is reached")
        parser.add_argument("--cancel", action="store_true", help="stop the turn while the slow tool runs")
        parser.add_argument("--story", default="words", help="what the turn is about")
        given = parser.parse_args(arguments)
        self.folder: Path = given.folder
        self.port: int = given.port
        self.is_cancelling: bool = given.cancel
        notes = os.open(self.folder / f"{name}.reached", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self.notes = notes
        """Where the world reports the fault points reached, over all processes of this name."""
        is_inside = isinstance(given.kill_at, Inside)
        self.death: tuple[Fault | None, int] = (None if is_inside else given.kill_at, given.kill_time)
        self.dies_inside: bool = is_inside
        """Die in the middle of the first tool that has effects."""
        self.story: str = given.story

    def world(self) -> KillingWorld:
        return KillingWorld(*self.death, report_to=self.notes)
