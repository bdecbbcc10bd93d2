from __future__ import annotations

from typing import Any

import pytest

from midstream.dialects import dialect_registry
from midstream.dialects.conversation_index import (
    KEY_CHARS_MAX,
    SIDE_CALLS,
    ConversationIndex,
    is_ephemeral,
    newest_words,
    place_of,
    read_session_name,
    scope_of,
)
from midstream.dialects.dialect import Asked
from midstream.history.messages import (
    File,
    History,
    Response,
    Step,
    Text,
    ToolCall,
    ToolResult,
    ToolSpec,
    UserMessage,
)
from tests.spec import spec


def empty_request(**fields: Any) -> Asked:  # noqa: ANN401 - the fields of the struct
    return Asked(dialect=dialect_registry.CHAT, model="m", messages=[], **fields)


def history_of(*words: str) -> History:
    """Return a history of alternating user messages and responses."""
    return History(
        tuple(
            Step(Response((Text(each),))) if number % 2 else UserMessage.of(each)
            for number, each in enumerate(words)
        )
    )


def newest(text: str) -> str:
    """Return the start of the newest message with this text."""
    found = newest_words(history_of("earlier", "well", text).entries)
    assert found is not None
    return found


@spec("REUSE-73")
def test_the_first_header_takes_precedence_then_the_metadata() -> None:
    notes = empty_request(metadata={"session_id": "n"})
    both = {"x-session-affinity": "b", "x-midstream-session": "a"}
    assert [read_session_name(headers, notes) for headers in (both, {"session_id": "c"}, {})] == [
        "h:a",
        "h:c",
        "m:n",
    ]
    assert read_session_name({}, empty_request(user="u", cache_key="k")) == ""


def test_a_long_name_is_stored_as_its_digest() -> None:
    first, second = (read_session_name({"session-id": "x" * 5000 + end}, empty_request()) for end in "ab")
    assert first != second
    assert len(first) < KEY_CHARS_MAX


@spec("REUSE-73")
def test_a_conversation_continues_after_its_newest_response() -> None:
    openings = ConversationIndex()
    first = place_of("m", history_of("hi"))
    assert openings.look_up(first) == ""
    openings.add_response("s1", first, Response((Text("ho"),)))
    second = place_of("m", history_of("hi", " h o\n", "more"))
    assert openings.look_up(second) == "s1"
    assert openings.look_up(place_of("other", history_of("hi", "ho", "more"))) == ""
    openings.add_response("s1", second, Response((Text("end"),)))
    assert (
        openings.look_up(second) == ""
    )  # it has continued from there: another request at that place is another conversation
    assert openings.look_up(place_of("m", history_of("hi", "ho", "more", "end", "again"))) == "s1"
    assert len(openings) == 1


@spec("REUSE-73")
def test_results_belong_to_the_conversation_whose_response_made_the_calls() -> None:
    openings = ConversationIndex()
    openings.add_response("s1", place_of("m", history_of("hi")), Response((ToolCall("c1", "look"),)))
    asks = Step(Response((ToolCall("c1", "look"),)), (ToolResult("c1", "a tree"),))
    other = Step(Response((ToolCall("c2", "look"),)), (ToolResult("c2", "a tree"),))
    assert openings.look_up(place_of("m", History((UserMessage.of("hi"), asks)))) == "s1"
    assert openings.look_up(place_of("m", History((UserMessage.of("hi"), other)))) == ""


def test_files_are_compared_by_their_content() -> None:
    one, other = (History((UserMessage((File("image/png", data=data),)),)) for data in ("aa", "ab"))
    assert place_of("m", one) != place_of("m", other)


def test_the_least_recently_used_conversation_is_evicted_first() -> None:
    openings = ConversationIndex(limit=2)
    for number in range(3):
        openings.add_response(f"s{number}", place_of("m", history_of(f"{number}")), Response((Text("x"),)))
    found = [openings.look_up(place_of("m", history_of(f"{number}", "x", "y"))) for number in range(3)]
    assert found == ["", "s1", "s2"]


@spec("REUSE-74")
@pytest.mark.parametrize("words", SIDE_CALLS)
def test_side_calls_are_recognized_by_their_words_unless_tools_are_declared(words: str) -> None:
    for instructions, text in ((words.upper(), "hi"), ("", f"Please: {words}")):
        assert is_ephemeral({}, empty_request(), instructions, newest(text))
        assert not is_ephemeral({}, empty_request(tools=(ToolSpec("look"),)), instructions, newest(text))
    assert not is_ephemeral({}, empty_request(), "Be brief.", newest("hi"))


@spec("REUSE-74")
def test_a_mark_takes_precedence_over_words() -> None:
    marked = {"x-midstream-ephemeral": "1"}
    assert is_ephemeral(marked, empty_request(tools=(ToolSpec("look"),)), "", newest("hi"))
    assert is_ephemeral({}, empty_request(metadata={"ephemeral": "yes"}), "", newest("hi"))
    assert not is_ephemeral({"x-midstream-ephemeral": "false"}, empty_request(), SIDE_CALLS[0], newest("hi"))


def test_a_scope_is_the_model_the_user_and_the_cache_key() -> None:
    scopes = [
        scope_of(each) for each in (empty_request(), empty_request(user="a"), empty_request(cache_key="a"))
    ]
    assert len(set(scopes)) == 3
