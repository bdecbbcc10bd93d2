"""Run benchmarks: `python -m bench [NAME ...]`. Tables go to the terminal, JSON goes to `bench/results/`."""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import msgspec

from bench import (
    dialects,
    encryption,
    fleet,
    fleet_jetstream,
    gateway,
    growth,
    histories,
    loop,
    peers,
    population,
    recovery,
    rendering,
    reuse,
    startup,
    steps,
    streaming,
    takeover,
    turns,
)
from bench.streams import commands, costs, idle

RESULTS = Path(__file__).parent / "results"


def _steps(folder: Path) -> list[steps.Point]:
    contestants = {**steps.CONTESTANTS, "loop": loop.native_loop}
    points: list[steps.Point] = []
    for sessions in (1, 10, 100):
        points += asyncio.run(steps.measure(contestants, sessions, folder, rounds=5))
    print(steps.table(points))
    return points


BENCHES: dict[str, Callable[[Path], Any]] = {
    "steps": _steps,
    "turns": turns.run,
    "takeover": takeover.run,
    "fleet": fleet.run,
    "fleet_jetstream": fleet_jetstream.run,
    "population": population.run,
    "recovery": recovery.run,
    "startup": startup.run,
    "streaming": streaming.run,
    "histories": histories.run,
    "growth": growth.run,
    "rendering": rendering.run,
    "dialects": dialects.run,
    "encryption": encryption.run,
    "commands": commands.run,
    "costs": costs.run,
    "idle": idle.run,
    "gateway": gateway.run,
    "reuse": reuse.run,
    "peers": peers.run,
}
"""Benchmarks by name. Each measures in a scratch folder."""
ON_DEMAND = frozenset({"peers", "commands", "population"})
"""Benchmarks that run only on request: they need 20 minutes, or `make bench-peers` or `make bench-streams`."""


def main() -> None:
    """Run the named benchmarks, by default those that need no other environment."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *BENCHES], help=", ".join(BENCHES))
    parser.add_argument("--folder", type=Path, default=Path(), help="a folder on the disk to measure")
    chosen = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    for name in chosen.names or [name for name in BENCHES if name not in ON_DEMAND]:
        print(f"\n{name}")
        with tempfile.TemporaryDirectory(dir=chosen.folder, prefix=".bench-") as folder:
            result = BENCHES[name](Path(folder))
        machine = {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "sqlite": apsw.sqlite_lib_version(),
            "day": time.strftime("%Y-%m-%d"),
        }
        report = {"machine": machine, "result": result}
        body = msgspec.json.format(msgspec.json.encode(report), indent=2)
        (RESULTS / f"{name}.json").write_bytes(body + b"\n")


if __name__ == "__main__":
    main()
