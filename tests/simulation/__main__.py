"""Run the simulation: `python -m tests.simulation [SEED…] [--minutes N] [--runs N] [--from SEED]`.

With seeds, each run is repeated and its trace printed; the last line is the verdict. Without, new seeds are
tried on all cores until the time or the number of runs is over; a failing one is printed as it is found.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from tests.session.edges import RecordEffect, explored
from tests.simulation.simulation_run import Outcome, run

SEEDS_AT_ONCE = 50
PROGRESS_S = 10.0
FAILURES_MAX = 20
"""Number of failing seeds after which a search ends."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("seeds", type=int, nargs="*", help="replay these and print their traces")
    parser.add_argument("--minutes", type=float, default=5.0, help="how long to try new ones")
    parser.add_argument("--runs", type=int, help="how many to try at most")
    parser.add_argument(
        "--from", type=int, default=None, dest="first", help="the first new seed; by default the time"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args(arguments)
    if given.seeds:
        return max([_replayed(seed) for seed in given.seeds])
    first = given.first if given.first is not None else int(time.time())
    return _searched(first, given.minutes * 60.0, given.runs, given.jobs)


def _replayed(seed: int) -> int:
    outcome = run(seed)
    for line in outcome.lines():
        _print(line)
    _print(f"\nseed {seed}: {_figures([outcome])}")
    for problem in outcome.problems:
        _print(f"seed {seed}: {problem}")
    return bool(outcome.problems)


def _searched(first: int, seconds: float, runs: int | None, jobs: int) -> int:
    """Try seeds from `first` on; return 1 where one failed."""
    began_at = printed_at = time.monotonic()
    total: Counter[str] = Counter()
    untaken = set(explored().steps)
    blocks: Iterator[int] = itertools.count(first, SEEDS_AT_ONCE)
    if runs is not None:
        blocks = iter(range(first, first + runs, SEEDS_AT_ONCE))
    _print(f"seeds from {first}, {jobs} at once")
    with ProcessPoolExecutor(jobs) as pool:
        waiting = {pool.submit(_block, at) for at in itertools.islice(blocks, jobs + 1)}
        while waiting:
            done = next(as_completed(waiting))
            waiting.remove(done)
            figures, failed, taken = done.result()
            total += figures
            untaken -= taken
            for seed, problems in failed:
                text = "\n    ".join([f"seed {seed} failed; replay it: make sim ARGS={seed}", *problems])
                _print(text)
            is_over = time.monotonic() - began_at > seconds or total["failed"] >= FAILURES_MAX
            if not is_over and (at := next(blocks, None)) is not None:
                waiting.add(pool.submit(_block, at))
            if time.monotonic() - printed_at > PROGRESS_S or not waiting:
                printed_at = time.monotonic()
                per_minute = total["seeds"] / (printed_at - began_at) * 60.0
                _print(f"{_summary(total)}, {per_minute:,.0f} seeds a minute")
    every = len(explored().steps)
    _print(f"{every - len(untaken)} of {every} steps of the machine were taken")
    for step in sorted(untaken):
        _print(f"    never: {step.state} -- {step.record} --> {step.after}")
    return int(total["failed"] > 0)


def _block(first: int) -> tuple[Counter[str], list[tuple[int, list[str]]], set[RecordEffect]]:
    """Run some seeds in a process of the pool."""
    outcomes = [run(seed) for seed in range(first, first + SEEDS_AT_ONCE)]
    failed = [(each.plan.seed, each.problems) for each in outcomes if each.problems]
    figures = Counter(seeds=len(outcomes), failed=len(failed))
    for outcome in outcomes:
        figures += outcome.figures()
    return figures, failed, set().union(*(each.taken for each in outcomes))


def _figures(outcomes: Sequence[Outcome]) -> str:
    figures = Counter(seeds=len(outcomes), failed=sum(bool(each.problems) for each in outcomes))
    for outcome in outcomes:
        figures += outcome.figures()
    return _summary(figures)


def _summary(figures: Counter[str]) -> str:
    return ", ".join(f"{figures[name]:,} {name}" for name in ("seeds", "failed", *sorted(figures - _HEAD)))


def _print(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - a command writes to a terminal


_HEAD = Counter({"seeds": sys.maxsize, "failed": sys.maxsize})

if __name__ == "__main__":
    sys.exit(main())
