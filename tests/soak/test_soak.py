"""The short soak: memory, descriptors, tasks and timers do not grow with the turns; `make soak` is the long one."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.soak.gauges import Gauges
from tests.soak.growth import SHORT, growing
from tests.soak.soak_run import soak_gateway, soak_server

pytestmark = [pytest.mark.slow, pytest.mark.fault, pytest.mark.timeout(900)]

NODE = shutil.which("node")
WINDOWS, TURNS = 7, 50
"""Windows of the last life of a server, which are judged, and turns of each."""
KILLS = 2
"""Windows before them, in each of which the server is killed."""
LEAKED_BYTES = 24 * 1024
"""A turn's share of the leak that a soak of two minutes has found once."""


def _growing(soaked: dict[str, list[Gauges]]) -> dict[str, dict[str, float]]:
    for name, gauges in soaked.items():
        print(f"{name}:", *gauges, sep="\n  ")  # noqa: T201 - shown with a failure
    return {name: found for name, gauges in soaked.items() if (found := growing(gauges))}


def _skip_without_memory(soaked: dict[str, list[Gauges]]) -> None:
    """Skip, after all other assertions, where a gauge was not read."""
    if any(each.anonymous_bytes is None for gauges in soaked.values() for each in gauges):
        pytest.skip("memory needs /proc/PID/smaps_rollup; all other gauges are flat")


async def test_server_and_client_do_not_grow_with_the_turns(tmp_path: Path) -> None:
    """Use the JavaScript client where node (20 or newer) is installed; the one in Python uses the leaking server."""
    soaked = await soak_server(tmp_path, windows=KILLS + WINDOWS, turns=TURNS, kills=KILLS, node=NODE or "")
    assert _growing(soaked) == {}
    _skip_without_memory({"server": soaked["server"]})


@pytest.mark.long
async def test_the_gateway_does_not_grow_with_the_turns(tmp_path: Path) -> None:
    soaked = await soak_gateway(tmp_path, windows=WINDOWS, turns=TURNS, kills=0)
    assert _growing(soaked) == {}
    _skip_without_memory(soaked)


@pytest.mark.long
async def test_a_leaking_server_is_found_and_its_client_does_not_grow(tmp_path: Path) -> None:
    soaked = await soak_server(tmp_path, windows=WINDOWS, turns=TURNS, kills=0, leaked_bytes=LEAKED_BYTES)
    judged = _growing(soaked)
    assert judged.keys() == {"server"}
    assert judged["server"].keys() >= {"tasks", "timers", "cyclic"}
    if sys.platform == "linux":
        assert judged["server"].keys() >= {"anonymous_bytes", "descriptors"}


def _gauges(turns: int, grown: float) -> Gauges:
    return Gauges(turns, int(10_000_000 + 20_000 * grown), 20, 5, 3, 2000, 100)


def test_growth_beyond_the_warm_up_is_found() -> None:
    plateau = [_gauges(50 * number, min(150, 50 * number)) for number in range(9)]
    assert growing(plateau) == {}
    peak = [*plateau[:5], _gauges(250, 600), *plateau[6:]]
    assert growing(peak) == {}
    endless = [_gauges(50 * number, 50 * number) for number in range(9)]
    assert growing(endless) == {"anonymous_bytes": 20_000}
    assert SHORT.anonymous_bytes < 20_000


def test_memory_is_ignored_where_the_system_does_not_offer_it() -> None:
    gauges = [Gauges(50 * number, None, None, 5, 3, 2000, 100) for number in range(9)]
    assert growing(gauges) == {}
    assert growing(
        [*gauges[:3], *(Gauges(g.turns, None, None, g.turns, 3, 2000, 100) for g in gauges[3:])]
    ) == {"tasks": 1.0}
