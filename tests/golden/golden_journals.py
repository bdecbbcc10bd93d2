"""Read the golden journals: recorded bodies, and their outcomes."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.golden.golden_histories import DATA, digest_of, text_of

Json = dict[str, Any]

SOURCES = ("scripts", "lives", "simulation")
"""Sources of journals: see `record_journals.py`."""
FULL = "scripts"
"""The source whose outcomes are stored in full, as readable JSON; of the others a digest for each record is.
"""


def bodies_path(source: str) -> Path:
    return DATA / "journals" / f"{source}.bodies.xz"


def outcomes_path(source: str) -> Path:
    return DATA / "journals" / (f"{source}.json" if source == FULL else f"{source}.outcomes.xz")


def journals_of(source: str) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    """Yield the name of each journal, and the epoch and body of its records."""
    with lzma.open(bodies_path(source), "rt", encoding="ascii") as lines:
        for line in lines:
            found = json.loads(line)
            yield found["name"], [(epoch, body) for epoch, body in found["records"]]


def outcomes_of(source: str) -> list[Json]:
    if source == FULL:
        found: list[Json] = json.loads(outcomes_path(source).read_text(encoding="ascii"))
        return found
    with lzma.open(outcomes_path(source), "rt", encoding="ascii") as lines:
        return [json.loads(line) for line in lines]


def summary_of(name: str, outcome: Json) -> Json:
    """Return the stored form of an outcome: digests of each step, and the result."""
    return {
        "name": name,
        "steps": [digest_of(step) for step in outcome["steps"]],
        "history": outcome["history"],
        "snapshot": outcome["snapshot"],
        "rendered": {profile: digest_of(done) for profile, done in outcome["rendered"].items()},
    }


def packed(lines: Iterable[Json]) -> bytes:
    """Return lines of JSON, compressed; the same bytes for the same lines."""
    return lzma.compress("".join(f"{text_of(line)}\n" for line in lines).encode("ascii"), preset=9)
