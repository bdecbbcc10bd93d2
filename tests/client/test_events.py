"""What an application is told of a record, also of one that a sub-agent made."""

from __future__ import annotations

import msgspec
import pytest

from midstream.client import Event
from midstream.client.events import event_of
from midstream.core.calls import QuestionKind
from midstream.core.client_stream import Applied, Forget
from midstream.core.frames import EventId, Gone
from midstream.core.messages import Outcome, UpstreamCall
from midstream.core.records import ChildSaid, Delta, QuestionAsked, Record, TurnEnded, TurnStatus, encode
from midstream.errors import RecordUndecodableError
from tests.spec import spec

WORD = Delta(1, 1, 1, 0, "text", "hello")
ASKED = QuestionAsked(1, 1, "c1", QuestionKind.APPROVAL, "digest", 5.0)


def said_by(child: str, record: Record) -> ChildSaid:
    return ChildSaid(1, 1, "c1", child, 7, msgspec.Raw(encode(record)))


def test_an_event_has_its_place_and_its_record() -> None:
    assert event_of(Applied(EventId(1, 4), WORD)) == Event("1-4", WORD)
    assert event_of(Forget(EventId(1, 4), "a power cut")) == Event("1-4", Gone("1-4", "a power cut"))


def test_only_words_for_the_reader_are_text() -> None:
    thought = Delta(1, 1, 1, 0, "thinking", "hm")
    events = [Event("1-4", record) for record in (WORD, thought, said_by("s::1.1.0", WORD))]
    assert [event.text for event in events] == ["hello", "", ""]


@spec("REUSE-54")
def test_a_tool_that_the_upstream_runs_is_told_apart_from_thoughts() -> None:
    ran = UpstreamCall("u", "grep", "{}", "line 1", Outcome.OK)
    event = Event("1-4", Delta(1, 1, 1, 1, "thinking", "", ran))
    assert (event.upstream_call, event.text) == (ran, "")
    assert Event("1-4", WORD).upstream_call is None


def test_only_the_sessions_own_turn_ends_it() -> None:
    ended = TurnEnded(1, TurnStatus.COMPLETED, 9.0)
    assert [Event("1-4", record).is_end for record in (ended, said_by("s::1.1.0", ended))] == [True, False]


def test_an_own_question_is_answered_in_the_session() -> None:
    event = Event("1-4", ASKED)
    assert (event.path, event.innermost, event.question) == ((), ASKED, ASKED)


def test_a_question_is_found_through_sub_agents_of_sub_agents() -> None:
    event = Event("1-4", said_by("s::1.1.0", said_by("s::1.1.0::1.2.0", ASKED)))
    assert (event.path, event.question) == (("s::1.1.0", "s::1.1.0::1.2.0"), ASKED)
    assert Event("1-4", WORD).question is None


def test_a_sub_agents_record_of_a_later_version_is_told() -> None:
    event = Event("1-4", ChildSaid(1, 1, "c1", "s::1.1.0", 7, msgspec.Raw(b'{"type":"unheard_of"}')))
    with pytest.raises(RecordUndecodableError):
        _ = event.innermost
