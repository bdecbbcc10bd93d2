"""A small fleet under crashes, freezes, cuts and restarts, and the judge notices each broken rule.

`make sim-fleet` does the same with a hundred nodes and a million sessions.
"""

from __future__ import annotations

import msgspec
import pytest

from tests.search import with_long
from tests.simulation.crowd_run import FAULTS, SHORT, run
from tests.simulation.crowd_store import Rules

SEEDS = (3, 1)
"""The first has every fault."""


@pytest.mark.slow
def test_a_fleet_under_faults_loses_nothing_and_takes_over_in_time() -> None:
    reports = [run(seed) for seed in SEEDS]
    assert [report.problems for report in reports] == [[]] * len(SEEDS)
    assert {*FAULTS, "roll"} == {kind for report in reports for kind in report.faults}
    for report in reports:
        assert report.turns > 200
        assert report.tools > 200
        assert max(report.takeover_crash_s["p50"], report.takeover_silence_s["p50"]) < 25.0
        assert report.spread_readers < 4.0
        assert report.store_busiest_second < 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rules", "problem"),
    with_long(
        [
            (Rules(is_fenced=False), "appended under epoch"),
            (Rules(raises_epoch=False), "both appended under epoch"),
            (Rules(confirms=False), "starts a tool under epoch"),
            (Rules(counts_others=False), "greedy"),
        ],
        1,
    ),
)
def test_a_broken_rule_is_found(rules: Rules, problem: str) -> None:
    assert any(problem in each for seed in SEEDS for each in run(seed, rules=rules).problems)


def test_a_seed_is_the_same_run_every_time() -> None:
    plan = msgspec.structs.replace(SHORT, nodes=4, readers=50, seconds=20.0)
    first, second = (run(3, plan) for _ in range(2))
    assert msgspec.structs.replace(first, real_s=0.0) == msgspec.structs.replace(second, real_s=0.0)


def test_sessions_that_rest_cost_nothing() -> None:
    plan = msgspec.structs.replace(SHORT, nodes=4, readers=0, turns_per_s=0.1, seconds=20.0, rolls=0)
    few, many = (run(3, msgspec.structs.replace(plan, sessions=count)) for count in (1000, 10_000_000))
    assert many.events / many.virtual_s < 1.1 * few.events / few.virtual_s
