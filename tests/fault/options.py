"""What both processes are told on their command lines."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from midstream.testing.worlds import KillingWorld
from midstream.world import Fault


class Options:
    """The command line of a process that may be told to kill itself.

    Args:
        name: `server` or `client`: what its files in the folder are called.
    """

    def __init__(self, name: str, arguments: Sequence[str] | None = None) -> None:
        parser = argparse.ArgumentParser(prog=f"python -m tests.fault.{name}_process")
        parser.add_argument("folder", type=Path, help="where stores, ledger and notes are")
        parser.add_argument("port", type=int)
        parser.add_argument("--kill-at", type=Fault, help="the fault point to die at")
        parser.add_argument("--kill-time", type=int, default=1, help="the time it is reached")
        parser.add_argument("--cancel", action="store_true", help="stop the turn while the slow tool runs")
        given = parser.parse_args(arguments)
        self.folder: Path = given.folder
        self.port: int = given.port
        self.is_cancelling: bool = given.cancel
        notes = os.open(self.folder / f"{name}.reached", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self.notes = notes
        """Where the world reports the fault points reached, over all processes of this name."""
        self.death: tuple[Fault | None, int] = (given.kill_at, given.kill_time)

    def world(self) -> KillingWorld:
        return KillingWorld(*self.death, report_to=self.notes)
