"""The events of a run: the same ids for every choice of modes, and each suffix contains exactly the missing events."""

from __future__ import annotations

import json
from typing import Any

import pytest

from midstream.dialects.langgraph_runs import BEGINNING, MODES, RunEvents, place_of
from midstream.dialects.run_fold import RunFold, derived_run_id
from midstream.session.records import EpochStarted, Record
from tests.dialects.langgraph_journal import RUN, approved, cut

Parts = list[tuple[str, str, Any]]


def parts_of(
    records: list[Record], run: str = RUN, modes: tuple[str, ...] = MODES, after: tuple[int, int] = BEGINNING
) -> Parts:
    events = RunEvents(RunFold("t"), run, modes, after, {"graph_id": "agent"})
    epoch, parts = 0, Parts()
    for record in records:
        epoch = record.epoch if isinstance(record, EpochStarted) else epoch
        for event in events.take(record, epoch=epoch):
            fields = dict(line.partition(": ")[::2] for line in event.decode().splitlines() if line)
            parts.append((fields["id"], fields["event"], json.loads(fields["data"])))
    return parts


@pytest.mark.parametrize(
    ("story", "run"), [(approved, RUN), (approved, derived_run_id("t", 1, 1)), (cut, RUN)]
)
def test_a_reconnected_reader_gets_each_event_once(story: Any, run: str) -> None:  # noqa: ANN401 - a function
    whole = parts_of(story(), run)
    assert whole[0][1] == "metadata"
    assert len({name for name, _, _ in whole}) == len(whole)
    for number, (name, _, _) in enumerate(whole):
        place = place_of(name)
        assert place is not None
        assert parts_of(story(), run, after=place) == whole[number + 1 :]


@pytest.mark.parametrize("mode", MODES)
def test_an_event_has_the_same_id_for_every_choice_of_modes(mode: str) -> None:
    whole = {name: data for name, _, data in parts_of(approved())}
    some = parts_of(approved(), modes=(mode,))
    assert all(whole[name] == data for name, _, data in some)


def test_an_interrupt_ends_a_run_as_in_langgraph() -> None:
    kinds = [kind for _, kind, _ in parts_of(approved())]
    assert kinds == ["metadata", "values", *["messages"] * 3, "updates", "values", "updates", "values"]
    *_, update, state = parts_of(approved())
    assert update[2]["__interrupt__"] == state[2]["__interrupt__"]


def test_an_interrupted_attempt_is_another_attempt_of_the_run_with_the_whole_state() -> None:
    parts = parts_of(cut())
    again = [kind for _, kind, _ in parts].index("metadata", 1)
    assert [data["attempt"] for _, kind, data in parts if kind == "metadata"] == [1, 2]
    assert [each["id"] for each in parts[again + 1][2]["messages"]] == ["m1"]
    assert [each["content"] for each in parts[-1][2]["messages"]] == ["hi", "Hello you"]


@pytest.mark.parametrize(
    ("event_id", "place"),
    [
        ("-1", (0, -1)),
        ("", (0, -1)),
        ("12-3", (12, 3)),
        ("x", None),
        ("1", None),
        ("1-", None),
        ("9" * 41, None),
    ],
)
def test_only_our_ids_are_positions(event_id: str, place: tuple[int, int] | None) -> None:
    assert place_of(event_id) == place
