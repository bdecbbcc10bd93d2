"""The events of a response, from its records: the same for every reader at any time."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from midstream.dialects.dialect import Dialect, Form
from midstream.dialects.dialect_registry import DIALECTS, MESSAGES, RESPONSES
from midstream.dialects.projection import Projection
from midstream.history.messages import Finish, Response, Text, ToolCall, Usage, UserMessage
from midstream.models.responses import (
    Finished,
    ModelEvent,
    ResponseBuilder,
    TextDelta,
    ThinkingDelta,
    ToolCallRequested,
    UpstreamCallEnded,
    UpstreamCallStarted,
)
from midstream.session.applications import ApplicationResponse
from midstream.session.call_references import AttemptRef
from midstream.session.records import (
    AttemptFailed,
    AttemptStarted,
    Delta,
    MessageAccepted,
    Record,
    ResponseCompleted,
    StepCommitted,
    TurnEnded,
    TurnStatus,
)
from tests.spec import spec

RESPONSE = ApplicationResponse(1, "r1", "", turn=2, response=1, position=9, entries=1, at=1.0)
LOOK = ToolCall("c1", "look", "{}")


def projection(dialect: Dialect, *, is_background: bool = False) -> Projection:
    form = Form(dialect=dialect.name, id="r1", model="m", created_at=1, is_background=is_background)
    return Projection(dialect, form, RESPONSE)


def records() -> list[Record]:
    """Return a response with a thought, text and a call, as a session journals it."""
    builder = ResponseBuilder(AttemptRef(2, 1, 1), is_announcing=True)
    events: list[ModelEvent] = [
        ThinkingDelta("hm"),
        ThinkingDelta("", "signed"),
        TextDelta("I look."),
        ToolCallRequested("c1", "look", "{}"),
    ]
    deltas = [delta for event in events for delta in builder.add(event)]
    builder.add(Finished(Finish.CALLS, "m-1", Usage(10, 5)))
    response = builder.response()
    assert response is not None
    return [AttemptStarted(2, 1, 1, 1.0), *deltas, ResponseCompleted(2, 1, 1, response, 2.0)]


@spec("REUSE-70")
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_every_reader_gets_the_same_events_and_the_same_whole(dialect: Dialect) -> None:
    readers = [projection(dialect) for _ in range(2)]
    sent = [[piece for record in records() for piece in reader.take(record)] for reader in readers]
    assert sent[0] == sent[1]
    assert all(reader.is_over and reader.is_open for reader in readers)
    assert readers[0].whole() == readers[1].whole()
    assert readers[0].model_response == Response((Text("I look."), LOOK))


def test_the_signature_of_a_thought_and_a_call_are_in_the_models_order() -> None:
    form = Form(dialect="messages", id="r1", model="m", created_at=1)
    reader = Projection(MESSAGES, form, RESPONSE)
    for record in records():
        reader.take(record)
    content = msgspec.json.decode(reader.whole())["content"]
    assert [block["type"] for block in content] == ["thinking", "text", "tool_use"]
    assert content[0]["signature"] == "signed"


@spec("REUSE-57")
def test_a_change_of_the_arguments_of_a_running_call_is_not_shown() -> None:
    builder = ResponseBuilder(AttemptRef(2, 1, 1), is_announcing=True)
    events: list[ModelEvent] = [
        UpstreamCallStarted("u", "shell", '{"command":"ls"}'),
        UpstreamCallStarted("u", "shell", '{"command":"ls -l"}'),
        UpstreamCallEnded("u", "a.txt"),
    ]
    reader = projection(RESPONSES)
    shown = b"".join(
        piece for event in events for delta in builder.add(event) for piece in reader.take(delta)
    )
    assert (shown.count(b"[shell {"), shown.count(b"[shell: a.txt]")) == (1, 1)


def test_records_of_other_turns_are_ignored() -> None:
    reader = projection(RESPONSES)
    before: list[Record] = [
        MessageAccepted(1, UserMessage.of("hi"), 1.0),
        Delta(1, 1, 1, 0, "text", "old"),
        TurnEnded(1, TurnStatus.COMPLETED, 1.0),
    ]
    assert [piece for record in before for piece in reader.take(record)] == []
    assert not reader.is_over


@spec("REUSE-70")
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_a_response_continues_after_the_text_of_its_dead_process(dialect: Dialect) -> None:
    reader = projection(dialect)
    cut = Response((Text("one "),), Finish.INTERRUPTED)
    journal: list[Record] = [
        AttemptStarted(2, 1, 1, 1.0),
        Delta(2, 1, 1, 0, "text", "one "),
        ResponseCompleted(2, 1, 1, cut, 2.0),
        StepCommitted(2, 1),
        AttemptStarted(2, 2, 1, 2.0),
        Delta(2, 2, 1, 0, "text", "two"),
        ResponseCompleted(2, 2, 1, Response((Text("two"),), usage=Usage(3, 1)), 3.0),
        StepCommitted(2, 2),
        TurnEnded(2, TurnStatus.COMPLETED, 3.0),
    ]
    for record in journal:
        reader.take(record)
    assert reader.is_over
    assert b'"one two"' in reader.whole()
    assert reader.model_response == Response((Text("one two"),))


@spec("REUSE-68")
@pytest.mark.parametrize(("has_begun", "status", "is_final"), [(False, 429, False), (True, 502, True)])
def test_a_failure_is_final_once_the_upstream_has_sent_output(
    *, has_begun: bool, status: int, is_final: bool
) -> None:
    reader = projection(MESSAGES)
    if has_begun:
        reader.take(Delta(2, 1, 1, 0, "thinking", ""))
    reader.take(AttemptFailed(2, 1, 1, "model_unavailable", "slow down", 2.0, 7.0))
    assert reader.take(TurnEnded(2, TurnStatus.FAILED, 2.0, "model_unavailable", "slow down")) == []
    refusal: Any = reader.refusal
    assert (refusal.status, refusal.is_final, refusal.retry_after_s) == (
        status,
        is_final,
        None if is_final else 7.0,
    )


def test_a_background_response_opens_before_the_upstream_has_sent_output() -> None:
    reader = projection(RESPONSES, is_background=True)
    assert reader.take(AttemptStarted(2, 1, 1, 1.0))
    assert reader.is_open
    reader.take(TurnEnded(2, TurnStatus.CANCELLED, 2.0))
    assert msgspec.json.decode(reader.whole())["status"] == "cancelled"


def test_a_defect_of_the_models_software_is_reported_without_its_message() -> None:
    reader = projection(RESPONSES)
    reader.take(TurnEnded(2, TurnStatus.FAILED, 2.0, "model", "ZeroDivisionError: secret"))
    refusal: Any = reader.refusal
    assert (refusal.status, "secret" in refusal.message) == (500, False)
