"""The text of an answer: each word once, over any number of attempts; a reader that follows the rule has that text."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from midstream.history.messages import (
    Finish,
    Outcome,
    Response,
    Step,
    Text,
    Thinking,
    UpstreamCall,
    UserMessage,
)
from midstream.protocol.answer_text import AnswerText
from midstream.protocol.frames import Gone, SnapshotFrame
from midstream.session.records import (
    AttemptFailed,
    AttemptStarted,
    Delta,
    MessageAccepted,
    Record,
    ResponseCompleted,
    TurnEnded,
    TurnStatus,
)
from tests.spec import spec


class AnswerReader:
    """A program that follows the rule, and one that only concatenates the text."""

    def __init__(self) -> None:
        self.answer = AnswerText()
        self.shown = self.added = self.transcript = ""
        self.replaced = 0

    def take(self, *records: Record | Gone | SnapshotFrame) -> str:
        for record in records:
            so_far = self.answer.take(record)
            self.transcript = so_far.transcript
            self.shown = self.transcript if so_far.replaces else self.shown + so_far.added
            self.added += so_far.added
            self.replaced += so_far.replaces
            if isinstance(record, MessageAccepted):
                self.shown = self.added = ""
            assert self.shown == self.transcript
        return self.transcript


def attempt_started(response: int = 1, attempt: int = 1) -> AttemptStarted:
    return AttemptStarted(1, response, attempt, 1.0)


def text_delta(text: str, response: int = 1, attempt: int = 1) -> Delta:
    return Delta(1, response, attempt, 0, "text", text)


def completed(*parts: Text | Thinking | UpstreamCall, response: int = 1) -> ResponseCompleted:
    return ResponseCompleted(1, response, 1, Response(parts, Finish.STOP), 1.0)


ACCEPTED = MessageAccepted(1, UserMessage.of("hi"), 1.0)
ENDED = TurnEnded(1, TurnStatus.COMPLETED, 2.0)


def test_text_that_a_new_attempt_repeats_is_not_added_again() -> None:
    reader = AnswerReader()
    reader.take(
        ACCEPTED,
        attempt_started(),
        text_delta("one two "),
        attempt_started(attempt=2),
        text_delta("one "),
        text_delta("two three"),
    )
    assert reader.take(completed(Text("one two three")), ENDED) == "one two three"
    assert (reader.added, reader.replaced) == ("one two three", 0)


def test_different_text_of_a_new_attempt_replaces_the_shown_text() -> None:
    reader = AnswerReader()
    reader.take(
        ACCEPTED, attempt_started(), text_delta("one two "), attempt_started(attempt=2), text_delta("one ")
    )
    assert reader.transcript == "one two ", "a reader keeps what may come again"
    assert reader.take(text_delta("tree")) == "one tree"
    assert (reader.replaced, reader.take(completed(Text("one tree")), ENDED)) == (1, "one tree")


def test_only_the_current_response_is_replaced() -> None:
    reader = AnswerReader()
    reader.take(
        ACCEPTED,
        attempt_started(),
        text_delta("I look. "),
        completed(Text("I look. ")),
        attempt_started(2),
        text_delta("The", 2),
    )
    assert reader.take(attempt_started(2, 2), text_delta("No", 2)) == "I look. No"


def test_a_shorter_answer_replaces_a_longer_one_at_its_end() -> None:
    begun = (ACCEPTED, attempt_started(), text_delta("one two"), attempt_started(1, 2), text_delta("one"))
    assert AnswerReader().take(*begun, completed(Text("one"))) == "one"
    assert AnswerReader().take(*begun, TurnEnded(1, TurnStatus.CANCELLED, 2.0)) == "one"


def test_a_failed_attempt_keeps_its_text_until_another_one_has_some() -> None:
    failed = AttemptFailed(1, 1, 1, "model", "it broke", 1.0)
    assert AnswerReader().take(ACCEPTED, attempt_started(), text_delta("half"), failed) == "half"
    assert (
        AnswerReader().take(
            ACCEPTED,
            attempt_started(),
            text_delta("half"),
            failed,
            attempt_started(1, 2),
            text_delta("a whole"),
        )
        == "a whole"
    )


def test_responses_are_paragraphs_and_so_are_the_texts_around_an_upstream_call() -> None:
    ran = UpstreamCall("u", "grep", "{}", "a line", Outcome.OK)
    reader = AnswerReader()
    reader.take(
        ACCEPTED,
        attempt_started(),
        text_delta("I look."),
        Delta(1, 1, 1, 1, "thinking", "", ran),
        text_delta("Found."),
    )
    assert reader.transcript == "I look.\n\nFound."
    assert reader.take(completed(Text("I look."), ran, Text("Found."))) == "I look.\n\nFound."
    assert reader.take(attempt_started(2), text_delta("So.", 2)) == "I look.\n\nFound.\n\nSo."
    assert reader.replaced == 0


def test_a_response_without_seen_deltas_is_delivered_whole() -> None:
    assert AnswerReader().take(ACCEPTED, attempt_started(), completed(Thinking("hm"), Text("all"))) == "all"
    assert AnswerReader().take(text_delta("ence"), completed(Text("a sentence"))) == "a sentence"


def test_a_new_turn_has_a_new_answer() -> None:
    reader = AnswerReader()
    reader.take(ACCEPTED, attempt_started(), completed(Text("all")), ENDED)
    assert reader.take(MessageAccepted(2, UserMessage.of("and?"), 3.0)) == ""


@spec("STREAM-35")
def test_gone_events_drop_the_text_and_a_snapshot_has_the_rest() -> None:
    reader = AnswerReader()
    reader.take(ACCEPTED, attempt_started(), text_delta("half"))
    assert reader.take(Gone("1-1", "pruned", has_snapshot=True)) == ""
    history = [
        UserMessage.of("a"),
        Step(Response((Text("old"),), Finish.STOP)),
        UserMessage.of("b"),
        Step(Response((Text("First."),), Finish.STOP)),
    ]
    running = {"turn": 2, "output": Response((Text("Sec"),), Finish.INTERRUPTED)}
    session = msgspec.json.encode({"turns": 2, "history": history, "running": running})
    assert reader.take(SnapshotFrame("1-9", msgspec.Raw(session))) == "First.\n\nSec"
    of_another = [reader.take(SnapshotFrame("1-9", msgspec.Raw(session), turn=turn)) for turn in (0, 1)]
    assert of_another == ["", ""], "the text of another turn is none of this answer"
    assert reader.take(SnapshotFrame("1-9", msgspec.Raw(session), turn=2)) == "First.\n\nSec"
    assert reader.take(text_delta("ond.", 2), completed(Text("Second."), response=2)) == "First.\n\nSecond."
    assert reader.take(SnapshotFrame("1-9", msgspec.Raw(b'{"history":"of a later version"}'))).endswith(
        "Second."
    )


attempts = st.lists(st.lists(st.sampled_from(["a", "b", " ", "ab"]), max_size=5), min_size=1, max_size=4)


@given(st.lists(attempts, min_size=1, max_size=4))
def test_over_any_attempts_a_reader_has_the_last_attempt_of_each_response(
    responses: list[list[list[str]]],
) -> None:
    reader = AnswerReader()
    reader.take(ACCEPTED)
    expected = ""
    for response, tries in enumerate(responses, start=1):
        for attempt, pieces in enumerate(tries, start=1):
            reader.take(
                attempt_started(response, attempt),
                *(text_delta(piece, response, attempt) for piece in pieces),
            )
        text = "".join(tries[-1])
        is_apart = not expected or not text or expected[-1].isspace() or text[0].isspace()
        expected += ("" if is_apart else "\n\n") + text
        parts = (Text(text),) if text else (Thinking("hm"),)
        assert reader.take(completed(*parts, response=response)) == expected
    assert reader.take(ENDED) == expected


@given(st.lists(st.sampled_from(["a", "b ", "cd"]), min_size=1, max_size=8), st.data())
def test_a_repeating_model_is_concatenated_correctly_by_the_simplest_program(
    pieces: list[str], data: st.DataObject
) -> None:
    reader = AnswerReader()
    cuts = data.draw(st.lists(st.integers(0, len(pieces)), max_size=3).map(sorted))
    for attempt, count in enumerate([*cuts, len(pieces)], start=1):
        reader.take(attempt_started(1, attempt), *(text_delta(piece, 1, attempt) for piece in pieces[:count]))
    reader.take(completed(Text("".join(pieces))), ENDED)
    assert (reader.added, reader.replaced) == ("".join(pieces), 0)
