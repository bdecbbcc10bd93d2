"""Run the search: `python -m tests.reuse [SEED…] [--lives N] [--from SEED] [--jobs N]`.

With seeds, each life is repeated and its trace printed. Without, new lives run until the wanted number; a
failing one is printed as it is found.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from tests.reuse.client_lives import ACTIONS, run_life

LIVES = 110_000
BLOCK = 200
"""Lives of one piece of work."""
PROGRESS_S = 20.0
FAILURES_MAX = 20
"""Number of failing lives after which a run ends."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.reuse")
    parser.add_argument("seeds", type=int, nargs="*", help="live these again and print their traces")
    parser.add_argument("--lives", type=int, default=LIVES, help="how many to live")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first new seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args(arguments)
    if given.seeds:
        return max([_again(seed) for seed in given.seeds])
    return _searched(given.first, given.lives, given.jobs)


def _again(seed: int) -> int:
    life = run_life(seed)
    _print("\n".join([*life.trace, f"\nseed {seed}: {life.problems or 'every promise was kept'}"]))
    return bool(life.problems)


def _block(first: int, count: int) -> tuple[Counter[str], list[tuple[int, list[str]]]]:
    figures: Counter[str] = Counter()
    failed: list[tuple[int, list[str]]] = []
    for seed in range(first, first + count):
        life = run_life(seed)
        figures += life.figures
        figures["lives"] += 1
        if life.problems:
            failed.append((seed, life.problems))
    return figures, failed


def _searched(first: int, lives: int, jobs: int) -> int:
    """Run so many lives; return 1 where a promise was broken."""
    began_at = printed_at = time.monotonic()
    total: Counter[str] = Counter()
    failures = 0
    blocks = iter(range(first, first + lives, BLOCK))
    end = first + lives
    with ProcessPoolExecutor(jobs) as pool:
        waiting = {pool.submit(_block, at, min(BLOCK, end - at)) for at in itertools.islice(blocks, jobs + 1)}
        while waiting:
            done = next(as_completed(waiting))
            waiting.remove(done)
            figures, failed = done.result()
            total += figures
            failures += len(failed)
            for seed, problems in failed:
                _print("\n    ".join([f"seed {seed}; again: make pool-search ARGS={seed}", *problems]))
            if failures < FAILURES_MAX and (at := next(blocks, None)) is not None:
                waiting.add(pool.submit(_block, at, min(BLOCK, end - at)))
            if time.monotonic() - printed_at > PROGRESS_S or not waiting:
                printed_at = time.monotonic()
                _print(_summary(total, failures, printed_at - began_at))
    return bool(failures)


def _summary(total: Counter[str], failures: int, seconds: float) -> str:
    behaviours = sum(total[act.__name__.strip("_")] for act, _ in ACTIONS)
    return (
        f"{total['lives']:,} lives, {behaviours:,} behaviours, {total['asks']:,} requests, {total['whole']:,} whole "
        f"answers, {total['kill']:,} kills, {total['resumed']:,} resumed, {total['forked']:,} forked, "
        f"{total['replays']:,} full replays; {failures} broken promises; "
        f"{total['lives'] / seconds * 60:,.0f} lives a minute"
    )


def _print(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
