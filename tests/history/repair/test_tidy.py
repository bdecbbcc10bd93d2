from __future__ import annotations

from typing import Any

from midstream.history.operations import repair
from midstream.history.repair.placeholders import INTERRUPTED, UNKNOWN
from midstream.history.repair.tidy import tidy_turns
from tests.history.repair.makers import codes, task_for, turns_for
from tests.history.repair.reported import FOUND, SEARCH, response, text, thought, use, user


def tidy(messages: list[Any], profile: str | None = None) -> tuple[list[Any], list[str]]:
    task = task_for(profile=profile)
    turns = tidy_turns(turns_for(task, messages), task)
    return [task.form.build(turn) if turn.is_changed else turn.source for turn in turns], codes(task)


def test_trailing_thinking_of_a_cut_response_gets_a_text_after_it() -> None:
    done, edits = tidy([user("q"), response(thought())])
    assert done[1]["content"] == [thought(), text(INTERRUPTED)]
    assert edits == ["thinking-last"]


def test_a_response_stored_in_pieces_is_joined() -> None:
    done, edits = tidy([user("q"), response(thought()), response(text("a"), use("c"))])
    assert done[1:] == [response(thought(), text("a"), use("c"))]
    assert edits == ["split-response"]


def test_a_result_inside_a_response_does_not_split_it() -> None:
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "a tree"}
    spliced = response(use("c1"), thought("hm", "R1.EqQBCkYICxgCKkA"), result)
    once = repair([user("hi"), spliced, response(text("so"))], format="anthropic", profile="openai-chat")
    again = repair(once.messages, format="anthropic", profile="openai-chat")
    assert once.messages[-1]["content"][-1] == text("so")
    assert again.edits == ()


def test_trailing_thinking_after_moved_results_gets_a_text_in_the_same_pass() -> None:
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "a tree"}
    spliced = response(use("c1"), thought("hm", "R1.EqQBCkYICxgCKkA"), result)
    following = response(thought("so", "R2.EqQBCkYICxgCKkA"), text("so"))
    once = repair([user("hi"), spliced, following], format="anthropic", profile="openai-chat")
    assert "thinking-last" in [edit.code for edit in once.edits]
    assert repair(once.messages, format="anthropic", profile="openai-chat").edits == ()


def test_thinking_of_two_responses_is_split() -> None:
    second = thought("so", "sig2.EqQB")
    done, edits = tidy([user("q"), response(thought(), use("a"), second, use("b"))])
    assert done[1:] == [response(thought(), use("a")), response(second, use("b"))]
    assert edits == ["spliced-thinking"]


def test_a_cut_hosted_call_is_closed() -> None:
    done, _ = tidy([user("q"), response(SEARCH, text("a"))])
    error = {"type": "web_search_tool_result_error", "error_code": "unavailable"}
    closed = {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": error}
    assert done[1]["content"] == [SEARCH, closed, text("a")]


def test_an_unknown_hosted_call_becomes_text() -> None:
    odd = SEARCH | {"name": "new_tool"}
    done, _ = tidy([user("q"), response(odd, text("a"))])
    assert done[1]["content"][0]["text"].endswith('new_tool {"query": "m3x"}')
    assert UNKNOWN not in str(done)


def test_a_hosted_pair_is_left_unchanged() -> None:
    history = [user("q"), response(SEARCH, FOUND, text("a"))]
    assert tidy(history) == (history, [])


def test_a_hosted_id_may_be_any_value() -> None:
    """An id that is a list or an object used to raise TypeError; found by the property tests."""
    done, edits = tidy([user("q"), response(SEARCH, FOUND | {"tool_use_id": []}, text("a"))])
    assert [block["type"] for block in done[1]["content"]] == [SEARCH["type"], FOUND["type"], "text", "text"]
    assert edits == ["hosted-result-without-call", "hosted-call-without-result"]


def test_broken_arguments_keep_their_text() -> None:
    done, edits = tidy([user("q"), response(use("a", '{"path": "x')), user("w")])
    assert done[1]["content"][0]["input"] == {"_raw": '{"path": "x'}
    assert edits == ["broken-arguments"]


def test_thinking_after_other_thinking_or_text_belongs_to_another_response() -> None:
    first, second, third = thought("1", "s1"), thought("2", "s2"), thought("3", "s3")
    done, edits = tidy([user("q"), response(first, second, text("a"), third, use("c"))])
    assert done[1:] == [
        response(first, text(INTERRUPTED)),
        user("Please continue."),
        response(second, text("a")),
        user("Please continue."),
        response(third, use("c")),
    ]
    assert edits == ["spliced-thinking", "thinking-last"]


def test_a_response_with_thinking_around_its_hosted_tools_is_one() -> None:
    messages = [
        user("q"),
        response(thought("1", "s1"), SEARCH, FOUND, text("a"), thought("2", "s2"), text("b")),
    ]
    assert tidy(messages) == (messages, [])


def test_redacted_thinking_may_follow_other_thinking() -> None:
    withheld = {"type": "redacted_thinking", "data": "R"}
    messages = [user("q"), response(thought("1", "s1"), withheld, thought("2", "s2"), text("b"))]
    assert tidy(messages) == (messages, [])


def test_repeated_thinking_is_no_second_response() -> None:
    done, edits = tidy([user("q"), response(thought(), thought(), text("b"))])
    assert done[1] == response(thought(), text("b"))
    assert edits == ["repeated-thinking"]


def test_a_text_that_is_no_string_becomes_one() -> None:
    done, edits = tidy([user([{"type": "text", "text": ["w"]}])])
    assert done == [user([text('["w"]')])]
    assert edits == ["content-shape"]


def test_a_copy_of_a_cut_response_is_not_its_continuation() -> None:
    first, second = response(text("a"), thought("1", "s1")), response(text("a"), thought("2", "s2"))
    done, edits = tidy([user("q"), first, second])
    assert done[1:] == [response(*each["content"], text(INTERRUPTED)) for each in (first, second)]
    assert edits == ["thinking-last", "thinking-last"]


def test_a_response_of_pydantic_ai_may_think_several_times() -> None:
    thoughts = [
        {"part_kind": "thinking", "content": "hm", "signature": "c2ln"},
        {"part_kind": "thinking", "content": "", "id": "redacted_thinking", "signature": "c2VhbGVk"},
        {"part_kind": "thinking", "content": "so", "signature": "c2lnMg=="},
    ]
    history = [
        {"kind": "request", "parts": [{"part_kind": "user-prompt", "content": "q"}]},
        {"kind": "response", "parts": [*thoughts, {"part_kind": "text", "content": "a"}]},
    ]
    assert repair(history, format="pydantic-ai", profile="anthropic").messages is history
