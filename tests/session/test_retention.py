"""The beginning of a pruned journal, and the amount pruned."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from midstream.errors import UsageError
from midstream.history.messages import UserMessage
from midstream.session import retention as retention_module
from midstream.session.records import (
    Delta,
    JournalPruned,
    MessageAccepted,
    Record,
    StepCommitted,
    TurnEnded,
    TurnStatus,
    encode,
)
from midstream.session.retention import PruningSurvey, Retention
from tests.spec import spec

FOR_EVER = Retention(events_for_s=None, events_max=None, bytes_max=None)
WORD = Delta(1, 1, 1, 0, "text", "word ")


def _survey(records: Iterable[Record], *, begin: int = 1) -> PruningSurvey:
    survey = PruningSurvey()
    survey.take((number, 3, encode(record)) for number, record in enumerate(records, start=begin))
    return survey


def _turn(number: int, *, at: float, words: int = 3) -> list[Record]:
    """Return a turn of `words` + 3 records."""
    opened = MessageAccepted(number, UserMessage.of("hi"), at)
    text = [Delta(number, 1, 1, 0, "text", "word ")] * words
    ended = TurnEnded(number, TurnStatus.COMPLETED, at)
    return [opened, *text, StepCommitted(number, 1), ended]


@spec("STREAM-62")
def test_expired_records_are_pruned_up_to_the_end_of_their_turn() -> None:
    survey = _survey([*_turn(1, at=10.0), *_turn(2, at=20.0), *_turn(3, at=30.0)])
    kept = Retention(events_for_s=5.0, events_max=None, bytes_max=None)
    assert survey.ripe_at(kept) == 15.0
    assert survey.cut(kept, now=14.9) is None
    assert survey.cut(kept, now=15.0) == (6, 3)
    assert survey.cut(kept, now=25.0) == (12, 3)
    assert survey.cut(kept, now=1e9) == (18, 3)


@spec("STREAM-61")
def test_whole_steps_of_an_open_turn_are_pruned_by_count_and_not_by_age() -> None:
    opened = MessageAccepted(2, UserMessage.of("hi"), 20.0)
    survey = _survey([*_turn(1, at=10.0), opened, StepCommitted(2, 1), *[WORD] * 30])
    old = Retention(events_for_s=1.0, events_max=None, bytes_max=None)
    assert survey.cut(old, now=1e9) == (6, 3)
    assert survey.cut(Retention(events_for_s=None, events_max=20, bytes_max=None), now=20.0) == (8, 3)
    assert survey.cut(Retention(events_for_s=None, events_max=None, bytes_max=200), now=20.0) == (8, 3)


@spec("STREAM-61")
def test_nothing_is_pruned_from_an_open_turn_of_a_foreign_loop() -> None:
    opened = MessageAccepted(1, UserMessage.of("hi"), 20.0, driver="pydantic-ai")
    survey = _survey([opened, StepCommitted(1, 1), *[WORD] * 30])
    assert survey.cut(Retention(events_max=5), now=1e9) is None


@spec("STREAM-62")
@pytest.mark.parametrize(("events_max", "cut"), [(24, None), (23, 17), (13, 18), (6, 23)])
def test_pruning_by_count_leaves_half_of_the_limit(events_max: int, cut: int | None) -> None:
    survey = _survey([each for number in range(1, 5) for each in _turn(number, at=1.0)])
    found = survey.cut(Retention(None, events_max, None), now=1.0)
    assert found == (None if cut is None else (cut, 3))


@spec("STREAM-62")
def test_pruning_by_bytes_leaves_half_of_the_limit() -> None:
    turns = [each for number in range(1, 5) for each in _turn(number, at=1.0)]
    size = sum(len(encode(record)) for record in turns)
    survey = _survey(turns)
    assert survey.bytes == size
    assert survey.cut(Retention(None, None, size), now=1.0) is None
    assert survey.cut(Retention(None, None, size - 1), now=1.0) in [(12, 3), (17, 3)]


def test_the_fold_of_a_pruned_journal_is_no_event() -> None:
    begins = JournalPruned(Raw(b'{"long":"' + b"x" * 10_000 + b'"}'), 1.0)
    survey = _survey([begins, *_turn(2, at=2.0)], begin=6)
    assert (survey.count, survey.bytes < 1000, survey.end) == (6, True, 12)
    assert survey.cut(Retention(None, 6, 1000), now=1e9) is None
    assert survey.cut(Retention(None, 5, None), now=1e9) == (11, 3)
    empty = _survey([begins], begin=6)
    assert (empty.count, empty.ripe_at(Retention()), empty.cut(Retention(), now=1e9)) == (0, math.inf, None)


def test_the_time_of_a_pruning_does_not_count_for_later_records() -> None:
    begins = JournalPruned(Raw(b"{}"), 1e6)
    survey = _survey([begins, *_turn(2, at=20.0)], begin=6)
    assert survey.ripe_at(Retention(5.0)) == 25.0
    assert survey.cut(Retention(5.0, None, None), now=25.0) == (12, 3)


def test_many_records_are_pruned_in_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention_module, "PRUNED_AT_ONCE_MAX", 13)
    turns = [each for number in range(1, 9) for each in _turn(number, at=1.0)]
    assert _survey(turns).cut(Retention(1.0, None, None), now=1e9) == (12, 3)
    monkeypatch.setattr(retention_module, "PRUNED_AT_ONCE_MAX", 3)
    assert _survey(turns).cut(Retention(1.0, None, None), now=1e9) == (5, 3), "the first place at least"


def test_nothing_is_pruned_from_an_unreadable_record_on() -> None:
    survey = _survey(_turn(1, at=1.0))
    survey.take([(7, 3, b"\xff not json")])
    survey.take((number, 3, encode(each)) for number, each in enumerate(_turn(2, at=1.0), start=8))
    assert survey.cut(Retention(1.0, None, None), now=1e9) == (6, 3)


@given(
    st.lists(st.sampled_from(["word", "step", "end"]), max_size=60),
    st.integers(1, 20),
    st.integers(1, 60),
)
def test_the_rest_is_within_the_limit_or_cannot_be_split(
    kinds: list[str], events_max: int, page: int
) -> None:
    made: dict[str, Record] = {
        "word": WORD,
        "step": StepCommitted(1, 1),
        "end": TurnEnded(1, TurnStatus.COMPLETED, 1.0),
    }
    records = [(number, 1, encode(made[kind])) for number, kind in enumerate(kinds, start=1)]
    survey = PruningSurvey()
    for start in range(0, len(records), page):
        survey.take(records[start : start + page])
    cut = survey.cut(Retention(None, events_max, None), now=1.0)
    if len(kinds) <= events_max:
        assert cut is None
        return
    places = [number for number, kind in enumerate(kinds, start=1) if kind != "word"]
    enough = [place for place in places if len(kinds) - place <= events_max // 2]
    assert cut == ((enough[0] if enough else places[-1], 1) if places else None)


@pytest.mark.parametrize("name", ["events_for_s", "events_max", "bytes_max", "sessions_for_s"])
def test_a_limit_must_be_above_zero(name: str) -> None:
    with pytest.raises(UsageError, match=name):
        Retention(**{name: 0})


def test_retention_is_unlimited_only_without_any_limit() -> None:
    assert FOR_EVER.is_endless
    assert not Retention().is_endless
    assert _survey(_turn(1, at=1.0)).cut(FOR_EVER, now=1e12) is None
