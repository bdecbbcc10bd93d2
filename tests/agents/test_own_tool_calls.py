"""Insertion of calls that an agent ran itself into a history without them."""

from __future__ import annotations

from midstream.agents.own_tool_calls import (
    KEPT_CHARS_MAX,
    AnswerCalls,
    OwnCalls,
    decode_calls,
    encode_calls,
    place_of,
    with_answer,
    with_own_calls,
)
from midstream.agents.prior_transcript import ARGUMENTS_CHARS_MAX, RESULT_CHARS_MAX, transcript
from midstream.history.messages import (
    UPSTREAM_CUT,
    Finish,
    History,
    Outcome,
    Response,
    Step,
    Text,
    ToolCall,
    ToolResult,
    UpstreamCall,
    UserMessage,
)
from midstream.models.fingerprint import ConversationDigest
from midstream.models.responses import ModelEvent, TextDelta, UpstreamCallEnded, UpstreamCallStarted
from tests.spec import spec

ASKED, MORE = UserMessage.of("pay"), UserMessage.of("and more")
STARTED = UpstreamCallStarted("c", "shell", '{"command": "pay 3"}')
ANSWER: list[ModelEvent] = [TextDelta("I pay. "), STARTED, UpstreamCallEnded("c", "paid"), TextDelta("Paid.")]
CALL = UpstreamCall("c", "shell", '{"command": "pay 3"}', "paid", Outcome.OK)


def _collect(*events: ModelEvent, after: tuple[UserMessage | Step, ...] = (ASKED,)) -> OwnCalls:
    calls = OwnCalls(place_of(ConversationDigest().then(after)))
    for event in events:
        calls.add(event)
    return calls


@spec("REUSE-80")
def test_a_call_is_inserted_where_it_was_made() -> None:
    answer = _collect(*ANSWER).collect(is_whole=True)
    history = History((ASKED, Step(Response((Text("I pay. Paid."),))), MORE))
    restored = with_own_calls(history, decode_calls(encode_calls((answer,))))
    parts = (Text("I pay. "), CALL, Text("Paid."))
    assert restored == History((ASKED, Step(Response(parts)), MORE))
    entries = transcript(restored)
    assert (
        entries.index("I pay.") < entries.index("pay 3") < entries.index("\npaid\n") < entries.index("Paid.")
    )


@spec("REUSE-80")
def test_a_call_after_a_character_that_was_cut_in_two_is_inserted_where_it_was_made() -> None:
    answer = _collect(TextDelta("I pay \ud83d"), TextDelta("\ude00."), *ANSWER[1:])
    assert answer.collect(is_whole=False).text == "I pay \U0001f600.Paid."
    history = History((ASKED, Step(Response((Text("I pay \U0001f600.Paid."),))), MORE))
    restored = with_own_calls(history, decode_calls(encode_calls((answer.collect(is_whole=True),))))
    parts = (Text("I pay \U0001f600."), CALL, Text("Paid."))
    assert restored == History((ASKED, Step(Response(parts)), MORE))


@spec("REUSE-80")
def test_a_call_is_stored_with_its_newest_arguments() -> None:
    calls = _collect(UpstreamCallStarted("c", "shell", "{}"))
    assert calls.add(STARTED)
    assert not calls.add(STARTED)
    assert calls.add(UpstreamCallEnded("c", "paid"))
    assert [own.call for own in calls.collect(is_whole=True).calls] == [CALL]


@spec("REUSE-80")
def test_a_call_is_not_inserted_twice_nor_in_another_conversation() -> None:
    answer = _collect(*ANSWER).collect(is_whole=True)
    whole = History((ASKED, Step(Response((Text("I pay. "), CALL, Text("Paid.")))), MORE))
    other = History((MORE, Step(Response((Text("I pay. Paid."),)))))
    for history in (whole, other, History((ASKED,))):
        assert with_own_calls(history, (answer,)) == history


@spec("REUSE-80")
def test_answers_of_one_turn_are_distinguished_by_the_results_before_them() -> None:
    asks = Step(Response((Text("First."), ToolCall("h", "look")), Finish.CALLS), (ToolResult("h", "seen"),))
    first = _collect(STARTED).collect(is_whole=True)
    second = _collect(TextDelta("Then."), STARTED, after=(ASKED, asks)).collect(is_whole=True)
    restored = with_own_calls(History((ASKED, asks, Step(Response((Text("Then."),))))), (first, second))
    doubtful = UpstreamCall("c", "shell", CALL.arguments, UPSTREAM_CUT, Outcome.UNKNOWN)
    assert [each.response.parts for each in restored.entries if isinstance(each, Step)] == [
        (doubtful, Text("First."), ToolCall("h", "look")),
        (Text("Then."), doubtful),
    ]


@spec("REUSE-79", "REUSE-80")
def test_an_interrupted_answer_ends_the_history() -> None:
    answer = _collect(*ANSWER[:2]).collect(is_whole=False)
    restored = with_own_calls(History((ASKED,)), (answer,))
    doubtful = UpstreamCall("c", "shell", CALL.arguments, UPSTREAM_CUT, Outcome.UNKNOWN)
    assert restored.entries[1:] == (Step(Response((Text("I pay. "), doubtful), Finish.INTERRUPTED)),)


@spec("REUSE-80")
def test_stored_calls_are_limited_in_length_and_number() -> None:
    long = "a word " * 10_000
    calls = _collect(UpstreamCallStarted("c", "read", long), UpstreamCallEnded("c", long))
    answer = calls.collect(is_whole=True)
    (own,) = answer.calls
    assert len(own.call.arguments) <= ARGUMENTS_CHARS_MAX
    assert len(own.call.content) <= RESULT_CHARS_MAX
    assert own.call.content.endswith(" characters]")
    kept: tuple[AnswerCalls, ...] = ()
    for number in range(1000):
        kept = with_answer(kept, AnswerCalls(number.to_bytes(32, "big"), answer.calls))
    assert sum(each.size for each in kept) <= KEPT_CHARS_MAX
    assert kept[-1].place == (999).to_bytes(32, "big")
    assert with_answer(kept, kept[0])[-1] == kept[0]


def test_damaged_calls_decode_to_none() -> None:
    assert decode_calls(b"\xc1nonsense") == ()
