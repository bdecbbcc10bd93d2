"""Print the graded figures per format over generated broken histories.

PYTHONPATH=src:. python tests/oracles/scorecard.py [cases per format] [seed] [format ...]
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from random import Random
from typing import Any

import midstream.history.operations
from tests.oracles.accidents import ODD
from tests.oracles.measures import Score, broken, score
from tests.oracles.scripts import WRITERS, valid

_COLUMNS = "format            cases  valid%  lossless%  verbatim  prefix%  thinking  faults  untouched%"


def main(arguments: list[str]) -> int:
    """Run the card; return 1 if any figure is below its bar."""
    numbers = [int(argument) for argument in arguments if argument.isdigit()]
    cases, seed = [*numbers, 1000, 1][:2] if len(numbers) < 2 else numbers[:2]
    forms = [argument for argument in arguments if argument in WRITERS] or list(WRITERS)
    accidents = {"accidents": ODD} if "odd" in arguments else {}
    print(_COLUMNS)  # noqa: T201 - its purpose
    notes: list[str] = []
    for form in forms:
        print(_row(form, cases, seed, accidents, notes))  # noqa: T201
    for note in notes:
        print(note)  # noqa: T201
    return 1 if notes else 0


def _row(form: str, cases: int, seed: int, accidents: dict[str, Any], notes: list[str]) -> str:
    scores: list[Score] = []
    untouched = 0
    for number in range(cases):
        chance = Random(f"{form}/{seed}/{number}")
        whole, messages, how = broken(form, chance, **accidents)
        made = score(form, messages, midstream.history.operations.repair, whole=whole)
        made.how = [f"case {number}", *how]
        scores.append(made)
        fine = valid(form, Random(f"valid/{form}/{seed}/{number}"))
        untouched += midstream.history.operations.repair_by_name(fine, format=form).messages is fine
    notes += _notes(form, scores)
    good = sum(not made.refused for made in scores)
    whole_count = sum(not made.lost and not made.refused for made in scores)
    verbatim = _ratio([made.verbatim for made in scores])
    prefix = sum(made.prefix for made in scores)
    thinking = _ratio([made.thinking for made in scores])
    faults = sum(bool(made.faults) for made in scores)
    shares = f"{_percent(good, cases)}  {_percent(whole_count, cases):>9}  {verbatim:8.3f}"
    shares += f"  {_percent(prefix, cases):>7}"
    return f"{form:<17} {cases:5}  {shares}  {thinking:8.3f}  {faults:6}  {_percent(untouched, cases):>10}"


def _percent(count: int, total: int) -> str:
    return f"{100 * count / total:6.2f}"


def _ratio(pairs: list[tuple[int, int]]) -> float:
    total = sum(pair[1] for pair in pairs)
    return sum(pair[0] for pair in pairs) / total if total else 1.0


def _notes(form: str, scores: list[Score]) -> list[str]:
    """Return the distinct complaints, each with its smallest case."""
    found: dict[str, Score] = {}
    count: Counter[str] = Counter()
    for made in scores:
        complaints = {refusal.split(" ")[0] for refusal in made.refused} | {
            fault[:70] for fault in made.faults
        }
        complaints |= {"lost"} if made.lost else set()
        complaints |= {"prefix"} if not made.prefix else set()
        for complaint in complaints:
            count[complaint] += 1
            before = found.get(complaint)
            if before is None or len(json.dumps(made.messages, default=str)) < len(
                json.dumps(before.messages, default=str)
            ):
                found[complaint] = made
    return [
        f"{form}: {count[complaint]} x {complaint} (smallest: {', '.join(made.how)})"
        for complaint, made in sorted(found.items())
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
