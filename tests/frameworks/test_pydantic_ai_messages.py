"""The finished part of a turn, as the messages that a program appends to its history."""

from __future__ import annotations

from midstream.frameworks.pydantic_ai_messages import answers_in, finished_messages, message_of, success_of
from midstream.history.messages import Finish, Outcome, Response, Text, ToolCall, ToolResult, UserMessage
from midstream.session.records import CallEnded, MessageAccepted, Record, ResponseCompleted

ASKS = Response((ToolCall("a", "act"), ToolCall("b", "act")), Finish.CALLS)


def test_an_interrupted_turn_has_its_prompt_its_text_and_a_result_for_each_call() -> None:
    records: list[Record] = [
        MessageAccepted(1, UserMessage.of("go"), 1.0),
        ResponseCompleted(1, 1, 1, ASKS, 2.0, native=""),
        CallEnded(1, 1, ToolResult("a", "one"), 3.0),
        CallEnded(1, 1, ToolResult("b", "no", Outcome.ERROR), 3.0),
        ResponseCompleted(1, 2, 1, Response((Text("so fa"),)), 4.0),
    ]
    prompt, asks, results, words = finished_messages(records)
    assert message_of(None, [prompt]) == UserMessage.of("go")
    assert asks.parts == []  # it was interrupted: only text is restored without the native form
    found = answers_in([results])
    assert [(call_id, each.outcome) for call_id, each in found.items()] == [
        ("a", Outcome.OK),
        ("b", Outcome.ERROR),
    ]
    assert found["a"].content == "one"
    assert "no" in found["b"].content
    assert [part.content for part in words.parts if part.part_kind == "text"] == ["so fa"]


def test_a_value_without_a_json_form_is_lost_with_an_error() -> None:
    result, native = success_of("a", "act", object())
    assert (result.outcome, native) == (Outcome.ERROR, "")
    assert "no JSON form" in result.content
