"""Requests of the AI SDK: the new part of a chat, and the answers in its last message."""

from __future__ import annotations

import json
from typing import Any

import pytest

from midstream.dialects.ui_message_stream import approval_id_of
from midstream.dialects.ui_messages import (
    ChatChange,
    find_change,
    messages_of,
    next_answer,
    read_chat_request,
)
from midstream.errors import MalformedFrameError
from midstream.history.messages import (
    Entry,
    File,
    History,
    Outcome,
    Response,
    Step,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
    ToolSpec,
    UserMessage,
)
from midstream.session.call_references import CallRef
from midstream.session.calls import CallPlan, CallState, Choice, QuestionKind, Site
from midstream.session.records import ClientTool
from midstream.session.session import CONTINUE, Session
from midstream.session.turn.commands import Answer, CallFinished
from midstream.session.turn.states import RunningCalls

Json = dict[str, Any]
CALL = ToolCall("c1", "look", '{"at":"it"}')
STEPS: list[Entry] = [
    Step(Response((Thinking("hm"), Text("I look."), CALL)), (ToolResult("c1", '{"sees":"a tree"}'),)),
    Step(Response((Text("A tree."),))),
]
HISTORY: list[Entry] = [UserMessage.of("hi"), *STEPS]


def user(words: str, id: str = "m1") -> Json:  # noqa: A002 - the name in the protocol
    return {"id": id, "role": "user", "parts": [{"type": "text", "text": words}]}


def assistant(*parts: Json) -> Json:
    return {"id": "c~1", "role": "assistant", "parts": [*parts]}


def text(words: str) -> Json:
    return {"type": "text", "text": words, "state": "done"}


SHOWN = assistant(
    {"type": "step-start"},
    {"type": "reasoning", "text": "hm"},
    text("I look."),
    {
        "type": "tool-look",
        "toolCallId": "c1",
        "state": "output-available",
        "input": {"at": "it"},
        "output": {"sees": "a tree"},
    },
    {"type": "data-map", "data": 1},
    {"type": "step-start"},
    text("A tree."),
)


def request(**fields: Any) -> bytes:  # noqa: ANN401 - JSON
    return json.dumps({"id": "c", "messages": [user("hi")], "trigger": "submit-message", **fields}).encode()


def test_a_request_has_its_chats_id_and_equal_requests_have_one_digest() -> None:
    asked = read_chat_request(request())
    assert (asked.chat, asked.is_answer, asked.is_regenerated) == ("c", False, False)
    assert read_chat_request(request(extra=1)).digest == asked.digest
    assert read_chat_request(request(messages=[user("hi", "m2")])).digest != asked.digest
    assert read_chat_request(request(trigger="regenerate-message")).digest != asked.digest


def test_a_request_without_an_id_is_identified_by_its_first_message_if_that_id_is_long() -> None:
    assert read_chat_request(request(id=None, messages=[user("hi", "x" * 16)])).chat == "x" * 16
    assert read_chat_request(request(id=None, messages=[user("hi", "1")])).chat == ""


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": []},
        {"messages": 1},
        {"messages": [{"role": "user"}]},
        {"id": 5},
        {"tools": [{"name": 5}]},
    ],
)
def test_an_invalid_request_is_refused(fields: Json) -> None:
    with pytest.raises(MalformedFrameError):
        read_chat_request(request(**fields))


def test_tools_of_the_client_are_read() -> None:
    schema = {"type": "object", "properties": {}}
    given = [{"name": "look", "description": "Look.", "inputSchema": schema, "needsApproval": True}]
    assert read_chat_request(request(tools=given)).tools == (
        ClientTool(ToolSpec("look", "Look.", schema), needs_approval=True),
    )


def test_a_continued_chat_adds_only_its_new_message() -> None:
    assert find_change((), [user("hi")]) == ChatChange(UserMessage.of("hi"))
    assert find_change(HISTORY, [user("hi"), SHOWN, user("more")]) == ChatChange(UserMessage.of("more"))


def test_a_continued_turn_is_one_message() -> None:
    cut: list[Entry] = [
        UserMessage.of("hi"),
        Step(Response((Text("A "),))),
        UserMessage.of(CONTINUE),
        Step(Response((Text("tree."),))),
    ]
    assert find_change(cut, [user("hi"), assistant(text("A tree.")), user("more")]).keep is None


def test_white_space_and_empty_parts_are_not_a_difference() -> None:
    shown = assistant(text("I  look.\n"), *SHOWN["parts"][3:])
    assert find_change(HISTORY, [user("hi"), shown, user("more")]).keep is None


def test_a_regenerated_answer_replaces_the_previous_one() -> None:
    assert find_change(HISTORY, [user("hi")]) == ChatChange(UserMessage.of("hi"), 0)
    later = [*HISTORY, UserMessage.of("more"), Step(Response((Text("more"),)))]
    assert find_change(later, [user("hi"), SHOWN, user("more")]) == ChatChange(UserMessage.of("more"), 3)


def test_messages_changed_by_the_client_replace_the_history() -> None:
    change = find_change(HISTORY, [user("hello"), SHOWN, user("more")])
    assert change == ChatChange(UserMessage.of("more"), 0, (UserMessage.of("hello"), *STEPS))


def test_files_are_attachments() -> None:
    parts = [
        {"type": "file", "mediaType": "image/png", "url": "data:image/png;base64,AAAA", "filename": "a.png"},
        {"type": "file", "mediaType": "application/pdf", "url": "https://x.example/a.pdf"},
    ]
    change = find_change((), [{"role": "user", "parts": parts}])
    image = File("image/png", data="AAAA", name="a.png")
    assert change.message.parts == (image, File("application/pdf", url="https://x.example/a.pdf"))


def test_an_empty_message_is_refused() -> None:
    with pytest.raises(MalformedFrameError):
        find_change((), [user("")])


def test_a_history_is_shown_as_the_client_has_it() -> None:
    messages = messages_of("c", Session(turns=1, history=History(tuple(HISTORY))))
    assert [message["id"] for message in messages] == ["c~u0", "c~1"]
    assert find_change(HISTORY, [*messages, user("more")]).keep is None
    kinds = [part["type"] for part in messages[1]["parts"]]
    assert kinds == ["step-start", "reasoning", "text", "tool-look", "step-start", "text"]


def waiting_state(call: CallState) -> Session:
    return Session(turns=1, turn=RunningCalls(1, 1, Response((CALL,)), (call,)))


def tool_message(state: str, **more: object) -> Json:
    return assistant({"type": "tool-look", "toolCallId": "c1", "state": state, "input": {}, **more})


REF = CallRef(1, 1, "c1")


def test_a_result_of_the_client_ends_the_call_that_was_started_for_it() -> None:
    plan = CallPlan("c1", "d1", Site.CLIENT)
    state = waiting_state(CallState(CALL, plan, runs=1))
    result = ToolResult("c1", '{"a":1}')
    assert next_answer(state, tool_message("output-available", output={"a": 1})) == CallFinished(1, 1, result)
    failed = ToolResult("c1", "bad", Outcome.ERROR)
    assert next_answer(state, tool_message("output-error", errorText="bad")) == CallFinished(1, 1, failed)
    assert next_answer(state, tool_message("input-available")) is None
    assert (
        next_answer(waiting_state(CallState(CALL, plan)), tool_message("output-available", output=1)) is None
    )


@pytest.mark.parametrize(
    ("kind", "approved", "choice"),
    [
        (QuestionKind.APPROVAL, True, Choice.ALLOW),
        (QuestionKind.APPROVAL, False, Choice.DENY),
        (QuestionKind.DOUBT, True, Choice.RERUN),
        (QuestionKind.DOUBT, False, Choice.SKIP),
    ],
)
def test_a_decision_applies_to_the_shown_arguments(
    kind: QuestionKind, *, approved: bool, choice: Choice
) -> None:
    state = waiting_state(CallState(CALL, CallPlan("c1", "d1"), asked=kind))
    approval = {"id": approval_id_of(1, 1, "d1", "c1"), "approved": approved, "reason": "so"}
    message = tool_message("approval-responded", approval=approval)
    assert next_answer(state, message) == Answer(REF, "d1", choice, "so")
    others = tool_message("approval-responded", approval={**approval, "id": approval_id_of(1, 1, "d2", "c1")})
    assert next_answer(state, others) is None


def test_a_question_is_answered_with_text() -> None:
    state = waiting_state(CallState(CALL, CallPlan("c1", "d1", Site.PERSON), asked=QuestionKind.QUESTION))
    assert next_answer(state, tool_message("output-available", output="blue")) == Answer(
        REF, "d1", Choice.RESPOND, "blue"
    )
