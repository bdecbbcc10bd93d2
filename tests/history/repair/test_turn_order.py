from __future__ import annotations

from typing import Any

from midstream.history.operations import repair
from midstream.history.repair.placeholders import FIRST, GO_ON, INTERRUPTED, NO_RESPONSE
from midstream.history.repair.turn_order import settle_edges
from tests.history.repair.makers import codes, task_for, turns_for
from tests.history.repair.reported import chat_call, chat_response, response, result, text, tool, use, user


def test_a_history_cannot_start_with_a_response() -> None:
    task = task_for()
    turns = settle_edges(turns_for(task, [response(text("hi"))]), task)
    assert [task.form.build(turn) for turn in turns[:1]] == [{"role": "user", "content": FIRST}]
    assert codes(task) == ["starts-with-response"]


def test_neighbours_of_one_role_are_separated_and_neither_is_changed() -> None:
    task = task_for(profile="bedrock-claude")
    messages = [user("a"), user("b"), response(text("c")), response(text("d"))]
    turns = settle_edges(turns_for(task, messages), task)
    assert [turn.source if not turn.is_changed else turn.parts[0].body for turn in turns] == [
        messages[0],
        NO_RESPONSE,
        messages[1],
        messages[2],
        GO_ON,
        messages[3],
    ]


def test_results_and_text_are_separated_where_they_may_not_share_a_message() -> None:
    task = task_for(profile="minimax")
    messages = [user("q"), response(use("a")), user([result("a"), text("b")])]
    turns = settle_edges(turns_for(task, messages), task)
    assert [task.form.build(turn) for turn in turns[2:]] == [user([result("a")]), user([text("b")])]


def test_a_template_receives_results_right_after_their_call_also_where_text_came_with_them() -> None:
    history = [user("q"), response(use("a12345678")), user([result("a12345678"), text("b")])]
    done = repair(history, profile="strict-template")
    assert done.messages == [
        *history[:2],
        user([result("a12345678")]),
        {"role": "assistant", "content": NO_RESPONSE},
        user([text("b")]),
    ]


def test_a_template_receives_each_prompt_of_a_request_as_its_own_turn() -> None:
    prompts = [{"part_kind": "user-prompt", "content": words} for words in ("a", "b")]
    history = [{"kind": "request", "parts": prompts}]
    done = repair(history, format="pydantic-ai", profile="strict-template")
    assert [part["content"] for message in done.messages for part in message["parts"]] == [
        "a",
        NO_RESPONSE,
        "b",
    ]
    assert repair(history, format="pydantic-ai").messages is history


def test_items_of_a_hosted_tool_are_no_turn() -> None:
    history = [
        {"role": "user", "content": "q"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "message", "role": "assistant", "content": "a"},
    ]
    assert repair(history, format="openai-responses", profile="strict-template").messages is history


def test_a_response_of_thoughts_alone_gets_a_text_for_a_template() -> None:
    history: list[Any] = [
        {"role": "user", "parts": [{"text": "q"}]},
        {"role": "model", "parts": [{"text": "hm", "thought": True}]},
    ]
    done = repair(history, format="gemini", profile="strict-template")
    assert done.messages[1]["parts"] == [*history[1]["parts"], {"text": INTERRUPTED}]


def test_a_prefill_does_not_end_in_white_space() -> None:
    history = [user("q"), {"role": "assistant", "content": "The answer is \n"}]
    for form in ("anthropic", "openai-chat"):
        rules: Any = {"format": form, "profile": "claude-proxy" if form == "openai-chat" else None}
        done = repair(history, prefill=True, **rules)
        words = "The answer is" if form == "openai-chat" else [text("The answer is")]
        assert done.messages == [user("q"), {"role": "assistant", "content": words}], form
        assert [(edit.code, edit.at) for edit in done.edits] == [("white-prefill", 1)]
        assert repair(done.messages, prefill=True, **rules).messages is done.messages
        assert repair(history, **rules).messages is history
    assert repair(history, format="openai-chat", prefill=True).messages is history


def test_older_templates_of_mistral_need_a_response_between_a_result_and_a_user() -> None:
    history = [user("q"), chat_response(chat_call("abcdefgh1")), tool("abcdefgh1"), user("and now?")]
    assert repair(history, format="mistral", profile="mistral-v3").messages is history
    done = repair(history, format="mistral", profile="mistral-legacy")
    assert [message["role"] for message in done.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
    ]
    assert [(edit.code, edit.at) for edit in done.edits] == [("user-after-result", 3)]
    assert repair(done.messages, format="mistral", profile="mistral-legacy").messages is done.messages


def test_blank_text_is_removed_for_a_proxy_in_front_of_anthropic() -> None:
    history = [user("q"), chat_response(chat_call("a"), content=" "), tool("a"), user([text(" "), text("w")])]
    assert repair(history, format="openai-chat").messages is history
    asked: Any
    for asked in ({"model": "anthropic/claude-opus-4.5"}, {"profile": "claude-proxy"}):
        done = repair(history, format="openai-chat", **asked)
        assert {edit.code for edit in done.edits} == {"blank-text"}
        assert done.messages[1].get("content") is None
        assert done.messages[3] == user([text("w")])
