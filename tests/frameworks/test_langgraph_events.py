"""A graph's questions as calls, and people's answers in the form that LangGraph reads."""

from __future__ import annotations

import json

import pytest
from langgraph.types import Interrupt

from midstream.frameworks.langgraph_events import InterruptAnswer, answer_of, calls_of, value_of
from midstream.history.messages import Outcome, ToolResult

ACTION = {"name": "pay", "args": {"sum": 3}, "description": "Approve.\n\nTool: pay\nArgs: ..."}
ASKS = {
    "action_requests": [ACTION],
    "review_configs": [{"action_name": "pay", "allowed_decisions": ["approve", "edit", "reject"]}],
}


@pytest.mark.parametrize(
    ("words", "value"),
    [("true", True), ('{"a": 1}', {"a": 1}), ("[1]", [1]), ("42", "42"), ("yes", "yes"), ("null", "null")],
)
def test_an_answer_is_text_unless_it_is_json_that_cannot_be_meant_as_text(words: str, value: object) -> None:
    assert value_of(words) == value


def test_an_interrupt_of_another_form_is_shown_as_json() -> None:
    asked = [json.loads(call.arguments) for each in ("Sure?", {"a": 1}) for call in calls_of("i", each)]
    assert asked == [{"question": "Sure?"}, {"question": '{"a":1}'}]


def test_each_approval_is_a_call_and_becomes_a_decision() -> None:
    (call,) = calls_of("i", ASKS)
    shown = json.loads(call.arguments)
    assert (call.id, shown) == ("i.0", {"tool": "pay", "arguments": {"sum": 3}, "description": "Approve."})
    interrupt = Interrupt(ASKS, id="i")
    assert answer_of(interrupt, {}) is None
    decisions = [
        answer_of(interrupt, {"i.0": ToolResult("i.0", content, outcome)})
        for content, outcome in (
            (json.dumps(shown), Outcome.OK),
            (json.dumps({**shown, "arguments": {"sum": 2}}), Outcome.OK),
            ("too dear", Outcome.DENIED),
        )
    ]
    assert decisions == [
        InterruptAnswer({"decisions": [each]})
        for each in (
            {"type": "approve"},
            {"type": "edit", "edited_action": {"name": "pay", "args": {"sum": 2}}},
            {"type": "reject", "message": "too dear"},
        )
    ]
