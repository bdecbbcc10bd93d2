"""Requests of AG-UI: a thread's messages as a chat, results and answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from midstream.dialects.ag_ui_messages import (
    chat_of,
    interrupts_in,
    read_input,
    resumed_answers,
    snapshot_of,
)
from midstream.dialects.ag_ui_stream import AgUiFold, stream_name
from midstream.dialects.langgraph_messages import interrupt_id_of
from midstream.dialects.ui_messages import find_change
from midstream.errors import AnswerMismatchError, MalformedFrameError, QuestionClosedError
from midstream.history.messages import File, Response, Text, ToolCall, UserMessage
from midstream.session.calls import CallPlan, CallState, Choice, QuestionKind
from midstream.session.records import QuestionAnswered
from midstream.session.session import Session
from midstream.session.turn.states import RunningCalls
from tests.dialects.langgraph_journal import approved, opening

Json = dict[str, Any]
HI: Json = {"id": "m1", "role": "user", "content": "hi"}


def request(**more: object) -> bytes:
    return json.dumps({"threadId": "t", "runId": "r", "messages": [HI], **more}).encode()


def approval_fold(*, to: type | None = None) -> AgUiFold:
    """Return the fold of an approval story, up to a record."""
    fold = AgUiFold("t")
    stream = stream_name("r1", "m1")
    for record in [*opening(stream), *approved()[len(opening()) :]]:
        if to is not None and isinstance(record, to):
            break
        fold.take(record, epoch=1)
    return fold


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        request(threadId="a b"),
        request(runId=""),
        request(runId="a b"),
        request(messages=[{"id": "x", "role": "robot"}]),
        request(messages=[{**HI, "content": json.loads("[" * 200 + "]" * 200)}]),
        request(resume=[{"interruptId": "x", "status": "maybe"}]),
    ],
)
def test_an_invalid_request_is_refused(body: bytes) -> None:
    with pytest.raises(MalformedFrameError):
        read_input(body)


def test_equal_requests_have_equal_digests_and_roles_outside_the_conversation_are_omitted() -> None:
    asked = read_input(request(messages=[{"id": "s", "role": "system", "content": "x"}, HI], context=[1]))
    assert [each.id for each in asked.messages] == ["m1"]
    assert asked.digest == read_input(request(messages=[HI])).digest
    assert asked.digest != read_input(request(runId="r2")).digest
    assert read_input(request(messages=[{**HI, "id": "a b"}])).message_id == ""


def test_a_snapshot_that_a_client_sends_back_is_the_history_of_its_session() -> None:
    fold = approval_fold()
    sent = [*snapshot_of(fold), {"id": "m2", "role": "user", "content": "more"}]
    change = find_change(fold.session.history.entries, chat_of(read_input(request(messages=sent)).messages))
    assert (change.message, change.keep, change.before) == (UserMessage.of("more"), None, ())


def test_a_client_that_omits_the_answer_changes_the_thread() -> None:
    fold = approval_fold()
    sent = [HI, {"id": "m2", "role": "user", "content": "more"}]
    change = find_change(fold.session.history.entries, chat_of(read_input(request(messages=sent)).messages))
    assert change.keep == 1


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({"type": "text", "text": "x"}, Text("x")),
        (
            {"type": "image", "source": {"type": "data", "value": "AA==", "mimeType": "image/png"}},
            File("image/png", data="AA=="),
        ),
        (
            {"type": "audio", "source": {"type": "url", "value": "https://a/b"}},
            File("audio/*", url="https://a/b"),
        ),
        (
            {"type": "binary", "mimeType": "text/csv", "data": "AA==", "filename": "a.csv"},
            File("text/csv", data="AA==", name="a.csv"),
        ),
    ],
)
def test_parts_of_a_message_reach_the_agent(block: Json, expected: Text | File) -> None:
    chat = chat_of(read_input(request(messages=[{**HI, "content": [block]}])).messages)
    assert find_change((), chat).message.parts == (expected,)


def test_an_invalid_part_is_refused() -> None:
    for content in (7, [{"type": "video"}]):
        with pytest.raises(MalformedFrameError):
            chat_of(read_input(request(messages=[{**HI, "content": content}])).messages)


@pytest.mark.parametrize(
    ("given", "choice", "text", "arguments"),
    [
        ({"status": "resolved", "payload": {"approved": True}}, Choice.ALLOW, "", None),
        ({"status": "resolved", "payload": {"approved": False, "reason": "no"}}, Choice.DENY, "no", None),
        (
            {"status": "resolved", "payload": {"approved": True, "editedArgs": {"what": "log"}}},
            Choice.ALLOW,
            "",
            '{"what":"log"}',
        ),
        ({"status": "cancelled"}, Choice.DENY, "cancelled", None),
    ],
)
def test_interrupts_are_answered(given: Json, choice: Choice, text: str, arguments: str | None) -> None:
    fold = approval_fold(to=QuestionAnswered)
    (question,) = fold.questions
    resume = read_input(request(resume=[{"interruptId": interrupt_id_of(question), **given}])).resume
    ((asked, answer),) = resumed_answers(fold.questions, resume, ())
    assert asked == question
    assert (answer.choice, answer.text, answer.arguments) == (choice, text, arguments)
    assert answer.digest == question.digest


@pytest.mark.parametrize(
    ("payload", "choice"),
    [({"approved": True}, Choice.RERUN), ({"approved": False}, Choice.SKIP), ("happened", Choice.HAPPENED)],
)
def test_a_call_in_doubt_is_answered(payload: object, choice: Choice) -> None:
    call = ToolCall("c1", "burn", "{}")
    calls = (CallState(call, CallPlan("c1", "d1"), runs=1, asked=QuestionKind.DOUBT),)
    fold = AgUiFold("t", Session(turns=1, turn=RunningCalls(1, 1, Response((call,)), calls)))
    (question,) = fold.questions
    given = {"interruptId": interrupt_id_of(question), "status": "resolved", "payload": payload}
    ((_, answer),) = resumed_answers(fold.questions, read_input(request(resume=[given])).resume, ())
    assert (answer.choice, answer.digest) == (choice, "d1")
    (asked,) = interrupts_in(fold)
    assert asked["message"].endswith("Approve to run it again, decline to not run it again.")


def test_exactly_the_open_interrupts_must_be_answered() -> None:
    fold = approval_fold(to=QuestionAnswered)
    unknown = read_input(request(resume=[{"interruptId": "0" * 32, "status": "resolved"}])).resume
    with pytest.raises(AnswerMismatchError, match="lacks the answers"):
        resumed_answers(fold.questions, unknown, ())
    with pytest.raises(QuestionClosedError):
        resumed_answers(approval_fold().questions, unknown, ())
