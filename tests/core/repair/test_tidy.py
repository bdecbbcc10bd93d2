from __future__ import annotations

from typing import Any

from midstream.core.repair.tidy import tidy_turns
from midstream.core.repair.words import INTERRUPTED, UNKNOWN
from tests.core.repair.makers import codes, task_for, turns_for
from tests.core.repair.reported import FOUND, SEARCH, reply, text, thought, use, user


def tidied(messages: list[Any], profile: str | None = None) -> tuple[list[Any], list[str]]:
    task = task_for(profile=profile)
    turns = tidy_turns(turns_for(task, messages), task)
    return [task.form.build(turn) if turn.is_changed else turn.source for turn in turns], codes(task)


def test_thinking_of_a_cut_reply_stays_with_a_word_after_it() -> None:
    done, told = tidied([user("q"), reply(thought())])
    assert done[1]["content"] == [thought(), text(INTERRUPTED)]
    assert told == ["thinking-last"]


def test_a_reply_stored_in_pieces_is_one_again() -> None:
    done, told = tidied([user("q"), reply(thought()), reply(text("a"), use("c"))])
    assert done[1:] == [reply(thought(), text("a"), use("c"))]
    assert told == ["split-reply"]


def test_thinking_of_two_responses_is_taken_apart() -> None:
    second = thought("so", "sig2.EqQB")
    done, told = tidied([user("q"), reply(thought(), use("a"), second, use("b"))])
    assert done[1:] == [reply(thought(), use("a")), reply(second, use("b"))]
    assert told == ["spliced-thinking"]


def test_a_hosted_call_that_was_cut_is_closed() -> None:
    done, _ = tidied([user("q"), reply(SEARCH, text("a"))])
    error = {"type": "web_search_tool_result_error", "error_code": "unavailable"}
    closed = {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": error}
    assert done[1]["content"] == [SEARCH, closed, text("a")]


def test_an_unknown_hosted_call_becomes_words() -> None:
    odd = SEARCH | {"name": "new_tool"}
    done, _ = tidied([user("q"), reply(odd, text("a"))])
    assert done[1]["content"][0]["text"].endswith('new_tool {"query": "m3x"}')
    assert UNKNOWN not in str(done)


def test_a_hosted_pair_is_left_alone() -> None:
    history = [user("q"), reply(SEARCH, FOUND, text("a"))]
    assert tidied(history) == (history, [])


def test_broken_arguments_keep_their_text() -> None:
    done, told = tidied([user("q"), reply(use("a", '{"path": "x')), user("w")])
    assert done[1]["content"][0]["input"] == {"_raw": '{"path": "x'}
    assert told == ["broken-arguments"]
