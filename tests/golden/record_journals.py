"""Record the golden journals: `python -m tests.golden.record_journals [--inputs]`.

Without `--inputs` the committed bodies stay and only their outcomes are recorded again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from importlib import import_module

from hypothesis import HealthCheck, Phase, given, settings

from tests.golden import journal_adapter
from tests.golden.golden_histories import DATA
from tests.golden.golden_journals import (
    FULL,
    SOURCES,
    Json,
    bodies_path,
    journals_of,
    outcomes_path,
    packed,
    summary_of,
)
from tests.golden.journal_adapter import Journal
from tests.search import tried

SEEDS = 60
"""Seeds of the simulation, from 0 on."""
LIVES = 6000
"""Number of drawn lives; those that take a new edge of the machine are kept."""


def source_of(source: str) -> Iterator[tuple[str, Journal]]:
    return {"scripts": _scripted, "lives": draw_lives, "simulation": _simulated}[source]()


def _scripted() -> Iterator[tuple[str, Journal]]:
    from tests.golden.journal_scripts import SCRIPTS

    for name, script in SCRIPTS.items():
        yield name, script().journal


def draw_lives() -> Iterator[tuple[str, Journal]]:
    """Yield random lives of a session: fitting and misplaced commands, over several nodes."""
    from midstream.errors import UsageError
    from midstream.session.records import encode
    from midstream.session.turn.commands import Refused
    from tests.session.edges import MachineEdge, edge_of
    from tests.session.session_lives import SessionLife, lives

    import_module("tests.conftest")  # Fixes how examples are drawn: the same every time.
    refused = Refused(UsageError("whatever it was"))
    taken: set[MachineEdge] = set()
    kept: list[Journal] = []

    @settings(max_examples=tried(LIVES), phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(lives(steps_max=40))
    def take(life: SessionLife) -> None:
        edges = {
            edge_of(step.before, step.command, refused if step.records is None else step.records, step.after)
            for step in life.steps
        }
        if not edges <= taken:
            taken.update(edges)
            kept.append([(epoch, encode(record).decode()) for epoch, record in life.journal])

    take()
    yield from ((f"life {number}", journal) for number, journal in enumerate(kept))


def _simulated() -> Iterator[tuple[str, Journal]]:
    """Yield each session of the simulation's seeds, put together from the appends of the trace."""
    from tests.simulation.simulation_run import run

    for seed in range(SEEDS):
        journals: dict[str, Journal] = {}
        for _, _, *what in run(seed).trace:
            if what[0] == "append" and len(what) > 3:
                _, session, epoch, end, bodies = what
                journal = journals.setdefault(str(session), [])
                journal += [(epoch, body.decode()) for body in bodies]  # type: ignore[attr-defined, misc]  # a trace holds anything
                assert len(journal) == end, f"seed {seed}: the trace misses an append to {session!r}"
        yield from ((f"{seed}/{session}", journal) for session, journal in sorted(journals.items()))


def _record_inputs() -> None:
    from tests.session.edges import explored

    kinds: set[str] = set()
    steps: set[tuple[str, str, str]] = set()
    for source in SOURCES:
        journals = list(source_of(source))
        bodies_path(source).parent.mkdir(parents=True, exist_ok=True)
        bodies_path(source).write_bytes(
            packed({"name": name, "records": list(map(list, journal))} for name, journal in journals)
        )
        for _, journal in journals:
            kinds |= journal_adapter.kinds_of(journal)
            steps.update(journal_adapter.steps_of(journal))
    missing = sorted(journal_adapter.possible_kinds() - kinds)
    assert missing == [], f"no journal has {missing}"
    untaken = sorted(set(map(tuple, explored().steps)) - steps)
    assert untaken == [], f"no journal takes {untaken}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.golden.record_journals")
    parser.add_argument("--inputs", action="store_true", help="make the journals again, too")
    if parser.parse_args().inputs:
        _record_inputs()
    for source in SOURCES:
        records, outcomes = 0, []
        for name, journal in journals_of(source):
            records += len(journal)
            outcomes.append((name, journal_adapter.outcome(journal)))
        if source == FULL:
            full: list[Json] = [{"name": name, **outcome} for name, outcome in outcomes]
            text = json.dumps(full, indent=1, sort_keys=True) + "\n"
            outcomes_path(source).write_text(text, encoding="ascii")
        else:
            outcomes_path(source).write_bytes(packed(summary_of(name, outcome) for name, outcome in outcomes))
        print(f"{source}: {len(outcomes)} journals, {records} records")  # noqa: T201 - for the person at the recording
    size = sum(path.stat().st_size for path in (DATA / "journals").iterdir())
    print(f"{size / 1e6:.2f} MB in journals")  # noqa: T201 - as above


if __name__ == "__main__":
    main()
