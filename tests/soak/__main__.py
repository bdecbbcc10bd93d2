"""The long soak: `python -m tests.soak [MINUTES]`, an hour by default.

Five soaks take turns on the processor: server and client, and the gateway, each with kills and without, and a client in
JavaScript. A window is a number of turns, so a busy machine makes fewer windows. Prints all gauges, and ends with 1
where one grows.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.soak.growth import LONG, growing
from tests.soak.soak_run import soak_gateway, soak_server

MINUTES = 60.0
TURNS = 200
WINDOWS_MIN = 6
KILLS = 5


async def main(minutes: float) -> int:
    clock = _Clock(minutes * 60)
    with tempfile.TemporaryDirectory(prefix="midstream-soak-") as name:
        folders = [
            Path(name) / each
            for each in ("server", "killed-server", "gateway", "killed-gateway", "javascript")
        ]
        for folder in folders:
            folder.mkdir()
        server, killed, gateway, killed_gateway, javascript = folders
        soaks = [
            soak_server(server, windows=WINDOWS_MIN, turns=TURNS, more=clock.more),
            soak_server(killed, windows=WINDOWS_MIN, turns=TURNS, kills=KILLS, more=clock.more),
            soak_gateway(gateway, windows=WINDOWS_MIN, turns=TURNS, more=clock.more),
            soak_gateway(killed_gateway, windows=WINDOWS_MIN, turns=TURNS, kills=KILLS, more=clock.more),
        ]
        if node := shutil.which("node"):
            soaks.append(
                soak_server(
                    javascript, windows=WINDOWS_MIN, turns=TURNS, kills=KILLS, node=node, more=clock.more
                )
            )
        results = await asyncio.gather(*soaks)
    failures = 0
    for folder, soaked in zip(folders, results, strict=False):
        for process, gauges in soaked.items():
            _print(f"{folder.name}, {process}:")
            for each in gauges:
                _print(f"  {each}")
            if gauges[0].anonymous_bytes is None:
                _print("  skipped: memory and descriptors, which need /proc")
            found = growing(gauges, LONG)
            failures += bool(found)
            _print(f"  GROWING for each turn: {found}" if found else "  flat")
    return 1 if failures else 0


class _Clock:
    """Decision whether another window begins."""

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds

    def more(self) -> bool:
        return time.monotonic() < self._until


def _print(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - it writes to a terminal


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.soak")
    parser.add_argument("minutes", type=float, nargs="?", default=MINUTES)
    sys.exit(asyncio.run(main(parser.parse_args().minutes)))
