"""Messages that cannot be invalid."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.errors import InvalidHistoryError
from midstream.history.messages import (
    History,
    Outcome,
    Response,
    Step,
    Text,
    TextJoiner,
    Thinking,
    ToolCall,
    ToolResult,
    UpstreamCall,
    UserMessage,
    storable,
    with_distinct_ids,
)
from tests.spec import spec

TWO_CALLS = Response((Text("let me look"), ToolCall("a", "read"), ToolCall("b", "read")))


def test_a_step_is_a_response_with_the_results_of_all_its_calls_in_order() -> None:
    step = Step(TWO_CALLS, (ToolResult("a", "1"), ToolResult("b", "2")))
    assert [result.content for result in step.results] == ["1", "2"]


@spec("TURN-6")
@pytest.mark.parametrize(
    "ids", [(), ("a",), ("b", "a"), ("a", "b", "c"), ("a", "a"), ("a", "x")], ids="-".join
)
def test_a_step_with_other_results_than_its_calls_cannot_exist(ids: tuple[str, ...]) -> None:
    with pytest.raises(InvalidHistoryError):
        Step(TWO_CALLS, tuple(ToolResult(call_id, "") for call_id in ids))


def test_an_invalid_step_cannot_be_decoded_from_json() -> None:
    body = b'{"response":{"parts":[{"type":"call","id":"a","name":"read"}]},"results":[],"type":"step"}'
    with pytest.raises((InvalidHistoryError, msgspec.ValidationError)):
        msgspec.json.decode(body, type=Step)


@pytest.mark.parametrize("ids", [("a", "a"), ("",), ("a", "")])
def test_the_calls_of_a_response_have_distinct_ids(ids: tuple[str, ...]) -> None:
    with pytest.raises(InvalidHistoryError):
        Response(tuple(ToolCall(call_id, "read") for call_id in ids))


def test_the_text_of_a_response_excludes_thinking_and_calls() -> None:
    response = Response((Thinking("hm"), Text("yes"), ToolCall("a", "read"), Text(", and no")))
    assert response.text == "yes, and no"
    assert response.calls == (ToolCall("a", "read"),)


def test_history_grows_by_copies() -> None:
    empty = History()
    assert empty.then(UserMessage.of("hi")).entries == (UserMessage.of("hi"),)
    assert empty.entries == ()


def test_missing_and_repeated_ids_are_derived_from_their_position_and_keep_the_original() -> None:
    parts = with_distinct_ids(
        (ToolCall("", "x"), Text("and"), ToolCall("k", "y"), ToolCall("k", "z")), response_no=4
    )
    assert parts == (
        ToolCall("call-4-0", "x", provider_id=""),
        Text("and"),
        ToolCall("k", "y"),
        ToolCall("call-4-3", "z", provider_id="k"),
    )


@given(st.lists(st.sampled_from(["", "a", "b", "call-1-0", "call-1-1", "call-1-2"]), max_size=5))
def test_any_ids_become_distinct_and_stay_so(ids: list[str]) -> None:
    parts = with_distinct_ids(tuple(ToolCall(call_id, "x") for call_id in ids), response_no=1)
    response = Response(parts)
    assert len(response.calls) == len(ids)
    assert with_distinct_ids(parts, response_no=1) == parts


@given(st.text(st.characters(exclude_categories=[])))
def test_any_text_can_be_stored(text: str) -> None:
    stored = storable(text)
    assert msgspec.json.decode(msgspec.json.encode(stored)) == stored
    if text.isprintable():
        assert stored == text


def test_surrogates_are_joined_or_replaced() -> None:
    assert storable("a\ud83d") == "a\ufffd"
    assert storable("a\ude00\ud83d") == "a\ufffd\ufffd"
    assert storable("a\ud83d\ude00") == "a\U0001f600"


@given(st.text(st.characters(exclude_categories=[])), st.integers(1, 3))
def test_pieces_of_a_text_give_the_same_text_wherever_it_is_cut(text: str, units: int) -> None:
    whole = text.encode("utf-16-le", "surrogatepass")
    cuts = range(0, len(whole), 2 * units)
    pieces = [whole[at : at + 2 * units].decode("utf-16-le", "surrogatepass") for at in cuts]
    joiner = TextJoiner()
    joined = [joiner.add(piece) for piece in pieces]
    assert "".join([*joined, joiner.end()]) == storable(text)
    assert joiner.end() == ""
    for piece in joined:
        assert storable(piece) == piece


def test_history_contains_no_running_upstream_call() -> None:
    Response((UpstreamCall("u", "grep"),))  # A response in progress may.

    with pytest.raises(InvalidHistoryError):
        Step(Response((UpstreamCall("u", "grep"),)))
    assert Step(Response((UpstreamCall("u", "grep", outcome=Outcome.OK),))).response.calls == ()
