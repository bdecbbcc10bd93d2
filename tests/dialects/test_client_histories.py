"""A client application's transcript as a history: nothing renamed, merged or lost that a history can hold."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.dialects.client_histories import transcript_of
from midstream.history.messages import (
    File,
    History,
    Outcome,
    Response,
    Step,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
    UserMessage,
)
from midstream.history.rendering import render

LONG_ID = "call_" + "x" * 100
PNG = "iVBORw0KGgo="

HISTORY = History(
    (
        UserMessage.of("a"),
        UserMessage.of("b"),
        Step(
            Response((Text("I look."), ToolCall("c1", "look", '{"at": 1}'), ToolCall("c2", "look", "{}"))),
            (ToolResult("c1", "a tree"), ToolResult("c2", "a hill")),
        ),
        Step(Response((Text("Done."),))),
        UserMessage((Text("c"), File("image/png", data=PNG))),
    )
)


@pytest.mark.parametrize("form", ["openai-chat", "openai-responses", "anthropic"])
def test_a_rendered_history_is_read_back_unchanged(form: str) -> None:
    profile = {"openai-responses": "responses"}.get(form, form)
    sent = render(HISTORY, "Be brief.", profile, form=form)
    read = transcript_of(sent.messages, form, sent.system)
    assert read.instructions == "Be brief."
    assert read.history == HISTORY


@pytest.mark.parametrize(
    ("messages", "results"),
    [
        ([{"role": "tool", "tool_call_id": LONG_ID, "content": "a tree"}], [ToolResult(LONG_ID, "a tree")]),
        ([{"role": "tool", "tool_call_id": LONG_ID, "content": None}], [ToolResult(LONG_ID, "(no output)")]),
    ],
)
def test_ids_are_unchanged_however_long(messages: list[Any], results: list[ToolResult]) -> None:
    call = {"id": LONG_ID, "type": "function", "function": {"name": "look", "arguments": "{}"}}
    asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    entry = transcript_of([*asked, *messages], "openai-chat").history.entries[1]
    assert isinstance(entry, Step)
    assert list(entry.results) == results


def test_a_call_without_a_result_gets_one() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [{"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "well?"}]
    entry = transcript_of(messages, "openai-chat").history.entries[0]
    assert isinstance(entry, Step)
    assert [result.call_id for result in entry.results] == ["c1"]


def test_legacy_functions_are_paired_by_name() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": "{}"}},
        {"role": "function", "name": "look", "content": "a tree"},
    ]
    entry = transcript_of(messages, "openai-chat").history.entries[1]
    assert isinstance(entry, Step)
    assert [result.content for result in entry.results] == ["a tree"]


def test_thinking_and_failures_of_anthropic_clients_are_kept() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "tool_use", "id": "t1", "name": "look", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "is_error": True, "content": "no"},
                {"type": "text", "text": "b"},
            ],
        },
    ]
    read = transcript_of(messages, "anthropic", "").history.entries
    assert read == (
        UserMessage.of("a"),
        Step(
            Response((Thinking("hm", "s"), ToolCall("t1", "look", "{}"))),
            (ToolResult("t1", "no", Outcome.ERROR),),
        ),
        UserMessage.of("b"),
    )


def test_items_of_a_response_are_one_response_up_to_their_results() -> None:
    items = [
        {"type": "message", "role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "a tree"},
    ]
    read = transcript_of(items, "openai-responses")
    assert read.instructions == "Be brief."
    assert read.history.entries == (
        UserMessage.of("a"),
        Step(
            Response((Thinking("hm"), Text("I look."), ToolCall("c1", "look", "{}"))),
            (ToolResult("c1", "a tree"),),
        ),
    )


@given(st.lists(st.sampled_from(["user", "assistant", "system", "tool", "nobody"]), max_size=8), st.data())
def test_a_longer_transcript_starts_with_the_shorter_one(roles: list[str], data: st.DataObject) -> None:
    messages = [{"role": role, "content": f"{number}"} for number, role in enumerate(roles)]
    end = data.draw(st.integers(0, len(messages)))
    users = [_users(transcript_of(messages[:upto], "openai-chat").history) for upto in (end, len(messages))]
    assert users[1][: len(users[0])] == users[0]


def _users(history: History) -> list[UserMessage]:
    return [entry for entry in history.entries if isinstance(entry, UserMessage)]


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant"]), st.text(max_size=5)), max_size=6))
def test_a_message_with_one_text_equals_one_with_one_text_part(content: list[tuple[str, str]]) -> None:
    plain = [{"role": role, "content": words} for role, words in content]
    # A name has no meaning here, and makes the message one of those that are read in full.
    full = [{**message, "name": "ann"} for message in plain]
    for form in ("openai-chat", "anthropic"):
        assert transcript_of(list(plain), form) == transcript_of(list(full), form)
