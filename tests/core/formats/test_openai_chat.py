"""A history as the messages of a chat completion."""

from __future__ import annotations

import pytest

from midstream.core.formats.openai_chat import render, render_tools
from midstream.core.messages import (
    Call,
    Exchange,
    File,
    History,
    Outcome,
    Reply,
    Result,
    Text,
    Thinking,
    ToolSpec,
    UserMessage,
)

HI = UserMessage.of("hi")


def test_instructions_come_first_and_only_where_there_are_any() -> None:
    said = {"role": "user", "content": "hi"}
    assert render(History((HI,)), "Be brief.") == [{"role": "system", "content": "Be brief."}, said]
    assert render(History((HI,)), "") == [said]


def test_an_exchange_is_a_reply_and_its_results_in_order() -> None:
    calls = (Call("a", "read", '{"path": "x"}'), Call("b", "list", ""))
    results = (Result("a", "one"), Result("b", "no such folder", Outcome.ERROR))
    history = History((HI, Exchange(Reply((Text("I will look."), *calls)), results)))
    assert render(history, "")[1:] == [
        {
            "role": "assistant",
            "content": "I will look.",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "read", "arguments": '{"path": "x"}'}},
                {"id": "b", "type": "function", "function": {"name": "list", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "one"},
        {"role": "tool", "tool_call_id": "b", "content": "no such folder"},
    ]


def test_a_reply_of_calls_alone_has_null_for_its_words() -> None:
    exchange = Exchange(Reply((Call("a", "list"),)), (Result("a", ""),))
    assert render(History((exchange,)), "")[0]["content"] is None


def test_thinking_is_not_sent_back_and_a_reply_of_nothing_else_is_left_out() -> None:
    thought = Exchange(Reply((Thinking("hm"),)))
    spoken = Exchange(Reply((Thinking("hm"), Text("yes"))))
    assert render(History((HI, thought)), "") == [{"role": "user", "content": "hi"}]
    assert render(History((HI, spoken)), "")[1:] == [{"role": "assistant", "content": "yes"}]


@pytest.mark.parametrize("broken", ['{"path": "x', "[1]", "null"])
def test_broken_arguments_travel_inside_valid_json(broken: str) -> None:
    exchange = Exchange(Reply((Call("a", "read", broken),)), (Result("a", "not JSON"),))
    sent = render(History((exchange,)), "")[0]["tool_calls"][0]["function"]["arguments"]
    assert '"invalid_arguments"' in sent
    assert render(History((exchange,)), "")[1]["content"] == "not JSON"


def test_files_take_the_form_their_kind_has() -> None:
    message = UserMessage(
        (
            Text("look"),
            File("image/png", data="AAAA"),
            File("image/png", url="https://example.org/a.png"),
            File("audio/wav", data="BBBB"),
            File("application/pdf", data="CCCC"),
            File("application/pdf", url="https://example.org/a.pdf", name="a.pdf"),
        )
    )
    assert render(History((message,)), "")[0]["content"] == [
        {"type": "text", "text": "look"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
        {"type": "input_audio", "input_audio": {"data": "BBBB", "format": "wav"}},
        {
            "type": "file",
            "file": {"filename": "attachment.pdf", "file_data": "data:application/pdf;base64,CCCC"},
        },
        {"type": "text", "text": "[attached file: a.pdf at https://example.org/a.pdf]"},
    ]


def test_tools_carry_their_schema_and_one_without_takes_nothing() -> None:
    schema = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    rendered = render_tools([ToolSpec("read", "Read a file.", schema), ToolSpec("now")])
    assert [each["function"] for each in rendered] == [
        {"name": "read", "description": "Read a file.", "parameters": schema},
        {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}},
    ]
