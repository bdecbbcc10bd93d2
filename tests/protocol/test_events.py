"""Events for an application, of records in its session and in those of sub-agents."""

from __future__ import annotations

import msgspec
import pytest

from midstream.errors import ConnectionLostError, RecordUndecodableError, StoreDamagedError, TurnFailedError
from midstream.history.messages import Outcome, UpstreamCall
from midstream.protocol.answer_text import AnswerText
from midstream.protocol.events import Event, EventReader, PlaybackLost, completed_text
from midstream.protocol.frames import SnapshotFrame
from midstream.session.calls import QuestionKind
from midstream.session.records import (
    ChildDelta,
    Delta,
    MessageWithdrawn,
    QuestionAsked,
    Record,
    TurnEnded,
    TurnStatus,
    encode,
)
from tests.spec import spec

WORD = Delta(1, 1, 1, 0, "text", "hello")
QUESTION = QuestionAsked(1, 1, "c1", QuestionKind.APPROVAL, "digest", 5.0)


def child_delta(child: str, record: Record) -> ChildDelta:
    return ChildDelta(1, 1, "c1", child, 7, msgspec.Raw(encode(record)))


def events_of(*records: Record) -> list[Event]:
    reading = EventReader()
    return [reading.event(f"1-{number}", record) for number, record in enumerate(records, start=1)]


def test_only_text_deltas_are_text() -> None:
    thought = Delta(1, 1, 1, 0, "thinking", "hm")
    events = events_of(WORD, thought, child_delta("s::1.1.0", WORD))
    assert [event.text for event in events] == ["hello", "", ""]
    assert [event.transcript for event in events] == ["hello"] * 3


def test_two_events_are_equal_by_position_and_record() -> None:
    (event,) = events_of(WORD)
    assert (event, hash(event)) == (Event("1-1", WORD), hash(Event("1-1", WORD)))
    assert event != Event("1-2", WORD)


def test_text_read_by_an_earlier_process_is_delivered_with_the_first_event() -> None:
    answer = AnswerText()
    answer.take(WORD)
    reading = EventReader(answer)
    events = [reading.event(f"1-{number}", WORD) for number in (5, 6)]
    assert [(event.replaces, event.text) for event in events] == [(True, "hello"), (False, "hello")]
    assert events[-1].transcript == "hello" * 3


def test_only_a_completed_turn_has_a_complete_answer() -> None:
    *_, last = events_of(WORD, TurnEnded(1, TurnStatus.COMPLETED, 9.0))
    assert completed_text("s", last) == "hello"
    *_, last = events_of(WORD, TurnEnded(3, TurnStatus.FAILED, 9.0, "model_rejected", "no such key"))
    with pytest.raises(
        TurnFailedError, match=r"turn 3 of session 's'.*failed.*no such key.*model_rejected"
    ) as why:
        completed_text("s", last)
    assert (why.value.status, why.value.cause, why.value.transcript) == ("failed", "model_rejected", "hello")
    with pytest.raises(TurnFailedError, match="message 2"):
        completed_text("s", *events_of(MessageWithdrawn(2, 9.0)))
    for left in (None, *events_of(WORD)):
        with pytest.raises(ConnectionLostError):
            completed_text("s", left)


def test_a_snapshot_at_the_end_of_a_turn_counts_too() -> None:
    shown = [
        msgspec.Raw(b'{"turns":1,"last":"%s","history":[]}' % last) for last in (b"completed", b"cancelled")
    ]
    well, badly = (EventReader().event("1-9", SnapshotFrame("1-9", each, is_over=True)) for each in shown)
    assert completed_text("s", well) == ""
    with pytest.raises(TurnFailedError, match="cancelled"):
        completed_text("s", badly)


def test_a_message_that_was_never_sent_has_no_answer() -> None:
    event = EventReader().event(
        "1-9", PlaybackLost("a damaged row", msgspec.Raw(b'{"turns":1,"history":[]}'))
    )
    with pytest.raises(StoreDamagedError, match="a damaged row"):
        completed_text("s", event)


@spec("REUSE-54")
def test_an_upstream_call_is_distinct_from_thinking() -> None:
    ran = UpstreamCall("u", "grep", "{}", "line 1", Outcome.OK)
    event = Event("1-4", Delta(1, 1, 1, 1, "thinking", "", ran))
    assert (event.upstream_call, event.text) == (ran, "")
    assert Event("1-4", WORD).upstream_call is None


def test_only_the_sessions_own_turn_ends_it() -> None:
    ended = TurnEnded(1, TurnStatus.COMPLETED, 9.0)
    assert [Event("1-4", record).is_end for record in (ended, child_delta("s::1.1.0", ended))] == [
        True,
        False,
    ]


def test_the_sessions_own_question_is_answered_in_the_session() -> None:
    event = Event("1-4", QUESTION)
    assert (event.path, event.innermost, event.question) == ((), QUESTION, QUESTION)


def test_a_question_is_found_through_nested_sub_agents() -> None:
    event = Event("1-4", child_delta("s::1.1.0", child_delta("s::1.1.0::1.2.0", QUESTION)))
    assert (event.path, event.question) == (("s::1.1.0", "s::1.1.0::1.2.0"), QUESTION)
    assert Event("1-4", WORD).question is None


@spec("STREAM-34")
def test_a_sub_agents_record_of_an_unknown_type_stays_within_its_reporting_record() -> None:
    record = ChildDelta(1, 1, "c1", "s::1.1.0", 7, msgspec.Raw(b'{"type":"of_a_later_version"}'))
    event = Event("1-4", record)
    assert (event.innermost, event.path, event.question) == (record, ("s::1.1.0",), None)


def test_an_undecodable_record_of_a_sub_agent_of_a_known_type_raises() -> None:
    event = Event("1-4", ChildDelta(1, 1, "c1", "s::1.1.0", 7, msgspec.Raw(b'{"type":"delta","turn":"x"}')))
    with pytest.raises(RecordUndecodableError):
        _ = event.innermost
