"""A turn as chunks of the AI SDK: from its records alone, the same each time, with each word once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from midstream.dialects.ui_message_stream import UiMessageStream, approval_id_of
from midstream.history.messages import (
    Finish,
    Outcome,
    Response,
    ResponsePart,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
    ToolSpec,
    UpstreamCall,
    Usage,
    UserMessage,
)
from midstream.session.calls import CallPlan, Choice, QuestionKind, Site
from midstream.session.records import (
    AnswerUsed,
    AttemptFailed,
    AttemptStarted,
    CallEnded,
    CallProgressed,
    CallStarted,
    ChildDelta,
    ClientTool,
    Delta,
    MessageAccepted,
    QuestionAnswered,
    QuestionAsked,
    Record,
    ResponseCompleted,
    StepCommitted,
    TurnEnded,
    TurnResumed,
    TurnStatus,
    encode,
)
from tests.dialects.test_open_questions import child_approval, child_start, delegating
from tests.dialects.test_open_questions import child_records as below

Json = dict[str, Any]
TURN_START: list[Record] = [MessageAccepted(1, UserMessage.of("hi"), 1.0), AttemptStarted(1, 1, 1, 1.0)]
START: list[Json] = [{"type": "start", "messageId": "c~1"}, {"type": "start-step"}]
CALL = ToolCall("c1", "look", '{"at": "it"}')


def chunks(records: Sequence[Record], run: int | None = 0) -> list[Json]:
    """Return the chunks of records; at the end of the whole turn, those that end it."""
    stream = UiMessageStream("c", 1, run)
    found = [chunk for record in records for chunk in stream.take(record, epoch=1)]
    found += stream.rest()
    return [json.loads(chunk.removeprefix(b"data: ")) for chunk in found]


def text_delta(words: str, *, attempt: int = 1, part: int = 0, kind: Any = "text") -> Delta:  # noqa: ANN401 - a literal
    return Delta(1, 1, attempt, part, kind, words)


def whole(
    *parts: ResponsePart, response: int = 1, plans: tuple[CallPlan, ...] = (), attempt: int = 1
) -> ResponseCompleted:
    finish = Finish.CALLS if any(isinstance(part, ToolCall) for part in parts) else Finish.STOP
    body = Response(tuple(parts), finish, usage=Usage(3, 2))
    return ResponseCompleted(1, response, attempt, body, 2.0, plans)


def ended(status: TurnStatus = TurnStatus.COMPLETED, message: str = "") -> TurnEnded:
    return TurnEnded(1, status, 3.0, "x" if message else "", message)


def plan(site: Site = Site.SERVER, **more: Any) -> CallPlan:  # noqa: ANN401 - fields of a plan
    return CallPlan("c1", "d1", site, **more)


USAGE = {"usage": {"inputTokens": 3, "outputTokens": 2, "totalTokens": 5}}
FINISH = {"type": "finish", "finishReason": "stop", "messageMetadata": USAGE}
CLOSE = [{"type": "finish-step"}, FINISH]


def text(words: str, part: str = "1.1.1.0") -> list[Json]:
    return [
        {"type": "text-start", "id": part},
        {"type": "text-delta", "id": part, "delta": words},
        {"type": "text-end", "id": part},
    ]


def test_reasoning_and_text_are_parts_of_one_step() -> None:
    records = [
        *TURN_START,
        text_delta("hm", kind="thinking"),
        text_delta("Hel", part=1),
        text_delta("lo", part=1),
    ]
    records += [whole(Thinking("hm"), Text("Hello")), ended()]
    reasoning = [{**each, "type": each["type"].replace("text", "reasoning")} for each in text("hm")]
    begun, delta, end = text("Hel", "1.1.1.1")
    assert chunks(records) == [*START, *reasoning, begun, delta, {**delta, "delta": "lo"}, end, *CLOSE]


def test_a_chunk_has_the_same_number_for_any_length_of_the_turn() -> None:
    records = [
        *TURN_START,
        text_delta("a"),
        AttemptFailed(1, 1, 1, "x", "x", 1.0),
        AttemptStarted(1, 1, 2, 1.0),
    ]
    records += [text_delta("b", attempt=2), whole(Text("b"), CALL, plans=(plan(),), attempt=2)]
    records += [
        CallStarted(1, 1, "c1", 1, 1.0),
        CallEnded(1, 1, ToolResult("c1", "x"), 1.0),
        StepCommitted(1, 1),
    ]
    records += [AttemptStarted(1, 2, 1, 1.0), whole(Text("end"), response=2), ended()]
    all_of_them = chunks(records)
    for count in range(len(records)):
        begun = chunks(records[:count])
        assert all_of_them[: len(begun)] == begun


def test_the_text_of_a_void_attempt_is_withdrawn() -> None:
    records = [
        *TURN_START,
        text_delta("wrong"),
        AttemptFailed(1, 1, 1, "x", "x", 1.0),
        AttemptStarted(1, 1, 2, 1.0),
    ]
    records += [text_delta("right", attempt=2), whole(Text("right"), attempt=2), ended()]
    assert chunks(records) == [
        *START,
        *text("wrong"),
        {"type": "reset-step"},
        *text("right", "1.1.2.0"),
        *CLOSE,
    ]


def test_an_attempt_without_shown_text_is_not_withdrawn() -> None:
    records = [*TURN_START, AttemptFailed(1, 1, 1, "x", "x", 1.0), AttemptStarted(1, 1, 2, 1.0)]
    records += [text_delta("right", attempt=2), whole(Text("right"), attempt=2), ended()]
    assert chunks(records) == [*START, *text("right", "1.1.2.0"), *CLOSE]


@pytest.mark.parametrize("shown", ["", "Hel", "Hello"])
def test_the_unshown_part_of_a_response_follows_once_it_is_whole(shown: str) -> None:
    deltas = [text_delta(shown)] if shown else []
    found = chunks([*TURN_START, *deltas, whole(Text("Hello")), ended()])
    assert "".join(chunk.get("delta", "") for chunk in found) == "Hello"
    assert [chunk["type"] for chunk in found].count("text-start") == 1


def test_a_response_that_differs_from_its_shown_part_replaces_it() -> None:
    found = chunks([*TURN_START, text_delta("Hallo"), whole(Thinking("hm"), Text("Hello")), ended()])
    at = found.index({"type": "reset-step"})
    assert "".join(chunk.get("delta", "") for chunk in found[at:]) == "hmHello"


CALLED: list[Json] = [
    {"type": "tool-input-start", "toolCallId": "c1", "toolName": "look"},
    {"type": "tool-input-delta", "toolCallId": "c1", "inputTextDelta": '{"at": "it"}'},
]
AVAILABLE = {"type": "tool-input-available", "toolCallId": "c1", "toolName": "look", "input": {"at": "it"}}


@pytest.mark.parametrize(
    ("result", "chunk"),
    [
        (ToolResult("c1", "words"), {"type": "tool-output-available", "output": "words"}),
        (ToolResult("c1", '{"a": [1]}'), {"type": "tool-output-available", "output": {"a": [1]}}),
        (ToolResult("c1", "bad", Outcome.ERROR), {"type": "tool-output-error", "errorText": "bad"}),
        (ToolResult("c1", "?", Outcome.UNKNOWN), {"type": "tool-output-error", "errorText": "?"}),
    ],
)
def test_a_tool_of_the_server_has_input_and_output(result: ToolResult, chunk: Json) -> None:
    records = [
        *TURN_START,
        whole(CALL, plans=(plan(),)),
        CallStarted(1, 1, "c1", 1, 1.0),
        CallEnded(1, 1, result, 1.0),
    ]
    assert chunks(records) == [*START, *CALLED, AVAILABLE, {**chunk, "toolCallId": "c1"}]


@pytest.mark.parametrize(
    ("report", "chunk"),
    [
        ("half", {"type": "data-progress", "id": "c1", "data": {"toolCallId": "c1", "text": "half"}}),
        ('{"type": "data-map", "id": "m", "data": 1}', {"type": "data-map", "id": "m", "data": 1}),
        (
            '{"type": "file", "url": "https://x.example/a.png", "mediaType": "image/png"}',
            {"type": "file", "url": "https://x.example/a.png", "mediaType": "image/png"},
        ),
        (
            '{"type": "finish"}',
            {"type": "data-progress", "id": "c1", "data": {"toolCallId": "c1", "text": '{"type": "finish"}'}},
        ),
    ],
)
def test_a_running_tool_reports_parts_and_nothing_else(report: str, chunk: Json) -> None:
    records = [*TURN_START, whole(CALL, plans=(plan(),)), CallStarted(1, 1, "c1", 1, 1.0)]
    assert chunks([*records, CallProgressed(1, 1, "c1", 1, report, 1.0)])[-1] == chunk


def test_a_tool_of_the_client_is_shown_when_it_may_start_and_ends_the_run() -> None:
    tool = ClientTool(ToolSpec("look"))
    begun: list[Record] = [MessageAccepted(1, UserMessage.of("hi"), 1.0, (tool,)), *TURN_START[1:]]
    asked: list[Record] = [*begun, whole(CALL, plans=(plan(Site.CLIENT),))]
    assert chunks(asked) == START
    started: list[Record] = [*asked, CallStarted(1, 1, "c1", 1, 1.0)]
    resting = {"type": "finish", "finishReason": "tool-calls", "messageMetadata": USAGE}
    first = [*START, *CALLED, AVAILABLE, {"type": "finish-step"}]
    assert chunks(started) == [*first, resting]
    assert chunks(started, None) == [*first, resting]
    answered: list[Record] = [*started, CallEnded(1, 1, ToolResult("c1", "seen"), 1.0), StepCommitted(1, 1)]
    answered += [AttemptStarted(1, 2, 1, 1.0), whole(Text("end"), response=2), ended()]
    output = {"type": "tool-output-available", "toolCallId": "c1", "output": "seen"}
    finish = {
        **FINISH,
        "messageMetadata": {"usage": {"inputTokens": 6, "outputTokens": 4, "totalTokens": 10}},
    }
    rest = [output, START[1], *text("end", "1.2.1.0"), {"type": "finish-step"}, finish]
    assert chunks(answered) == [*first, resting]
    assert chunks(answered, 1) == [START[0], *rest]
    assert chunks(answered, None) == [*first, *rest]
    assert chunks(answered, 7) == [finish]  # there is no such run, and there will be none


@pytest.mark.parametrize("choice", [Choice.ALLOW, Choice.DENY])
def test_an_approval_ends_the_run_and_its_answer_starts_the_next(choice: Choice) -> None:
    asked: list[Record] = [*TURN_START, whole(CALL, plans=(plan(needs_approval=True),))]
    asked.append(QuestionAsked(1, 1, "c1", QuestionKind.APPROVAL, "d1", 1.0, "why"))
    name = approval_id_of(1, 1, "d1", "c1")
    request = {"type": "tool-approval-request", "approvalId": name, "toolCallId": "c1", "reason": "why"}
    assert chunks(asked)[-3:-1] == [request, {"type": "finish-step"}]
    answered = [*asked, QuestionAnswered(1, 1, "c1", QuestionKind.APPROVAL, "d1", choice, 1.0)]
    response = {"type": "tool-approval-response", "approvalId": name, "approved": choice is Choice.ALLOW}
    assert chunks(answered, 1) == [START[0], response]
    if choice is Choice.DENY:
        denied = CallEnded(1, 1, ToolResult("c1", "no", Outcome.DENIED), 1.0)
        assert chunks([*answered, denied], 1)[-1] == {"type": "tool-output-denied", "toolCallId": "c1"}


def test_a_call_that_never_started_is_an_error_that_no_client_runs() -> None:
    records = [*TURN_START, whole(CALL, plans=(plan(Site.CLIENT),))]
    closed = CallEnded(1, 1, ToolResult("c1", "stopped", Outcome.CANCELLED), 1.0)
    failed = {**AVAILABLE, "type": "tool-input-error", "errorText": "stopped"}
    assert chunks([*records, closed]) == [*START, failed]


def test_a_tool_of_the_upstream_is_not_run_by_clients() -> None:
    call = UpstreamCall("u1", "bash", '{"c": 1}')
    done = UpstreamCall("u1", "bash", '{"c": 1}', "ok", Outcome.OK)
    records = [*TURN_START, Delta(1, 1, 1, 0, "thinking", "", call), Delta(1, 1, 1, 0, "thinking", "", done)]
    shown = chunks(records)[2:]
    assert {chunk["providerExecuted"] for chunk in shown} == {True}
    assert shown[-1]["output"] == "ok"


def test_the_text_of_a_sub_agent_is_transient() -> None:
    inner = Delta(1, 1, 1, 0, "text", "child")
    records = [*TURN_START, whole(CALL, plans=(plan(Site.CHILD),)), CallStarted(1, 1, "c1", 1, 1.0)]
    import msgspec

    spoke = ChildDelta(1, 1, "c1", "s.child", 1, msgspec.Raw(encode(inner)))
    data = {"toolCallId": "c1", "text": "child"}
    assert chunks([*records, spoke])[-1] == {"type": "data-agent", "data": data, "transient": True}


@pytest.mark.parametrize(
    ("end", "last"),
    [
        (ended(TurnStatus.FAILED, "broken"), [{"type": "error", "errorText": "broken"}]),
        (ended(TurnStatus.CANCELLED), [{"type": "abort", "reason": "stopped"}]),
    ],
)
def test_an_unsuccessful_turn_has_its_error_before_its_finish(end: TurnEnded, last: list[Json]) -> None:
    found = chunks([*TURN_START, text_delta("a"), end])
    assert found[-3:-1] == [{"type": "finish-step"}, *last]
    assert found[-1]["type"] == "finish"


def test_a_resumed_turn_continues_in_the_same_message() -> None:
    failed: list[Record] = [*TURN_START, text_delta("a"), ended(TurnStatus.FAILED, "broken")]
    resumed = [
        *failed,
        TurnResumed(1, 1, 4.0),
        AttemptStarted(1, 1, 1, 4.0),
        text_delta("b"),
        whole(Text("b")),
        ended(),
    ]
    types = [chunk["type"] for chunk in chunks(resumed, None)]
    assert "error" not in types
    assert types[-1] == "finish"


def test_a_later_turn_ends_the_previous_one() -> None:
    later = MessageAccepted(2, UserMessage.of("more"), 5.0)
    assert chunks([*TURN_START, whole(Text("a")), ended(), later], None)[-1] == FINISH


def test_a_question_of_a_sub_agent_is_after_the_calls_of_all_sub_agents_and_ends_with_them() -> None:
    records: list[Record] = [*TURN_START, *delegating("a"), *below("a", "c::0", *child_approval("c", "a"))]
    found = chunks(records)
    kinds = [each["type"] for each in found]
    assert kinds[-5:] == [
        *("start-step", "tool-input-available", "tool-approval-request", "finish-step", "finish"),
    ]
    asked = next(each for each in found if "toolMetadata" in each)
    assert asked["toolMetadata"] == {"midstream": {"agents": ["worker"]}}
    records += [CallEnded(1, 1, ToolResult("a", "stopped"), 7.0), StepCommitted(1, 1)]
    (closed,) = [each for each in chunks(records, 1) if each["type"] == "tool-output-error"]
    assert closed["toolCallId"] == asked["toolCallId"]


def test_calls_that_need_a_person_are_in_the_step_after_the_calls_of_sub_agents() -> None:
    own, works = ToolCall("c1", "burn", "{}"), ToolCall("c2", "clerk", "{}")
    plans = (plan(needs_approval=True), CallPlan("c2", "d2", Site.CHILD))
    asked = QuestionAsked(1, 1, "c1", QuestionKind.APPROVAL, "d1", 1.0)
    found = chunks(
        [*TURN_START, whole(own, works, plans=plans), CallStarted(1, 1, "c2", 1, 1.0), asked], None
    )
    names = [each.get("toolName") or each["type"] for each in found if each["type"] != "tool-input-delta"]
    assert names == [
        *("start", "start-step", "clerk", "clerk", "finish-step"),
        *("start-step", "burn", "burn", "tool-approval-request"),
    ]


@pytest.mark.parametrize(
    ("choice", "outcome", "kind"),
    [
        (Choice.ALLOW, Outcome.OK, "tool-output-available"),
        (Choice.ALLOW, Outcome.ERROR, "tool-output-error"),
        (Choice.DENY, Outcome.DENIED, "tool-output-denied"),
    ],
)
def test_a_decision_about_a_sub_agents_call_starts_a_run_that_shows_its_outcome_once(
    choice: Choice, outcome: Outcome, kind: str
) -> None:
    answered = QuestionAnswered(1, 1, "q", QuestionKind.APPROVAL, "d", choice, 6.0)
    ended_there = CallEnded(1, 1, ToolResult("q", "done", outcome), 7.0)
    records: list[Record] = [*TURN_START, *delegating("a"), *below("a", "c::0", *child_approval("c", "a"))]
    found = chunks([*records, *below("a", "c::0", answered, ended_there)], 1)
    assert [each["type"] for each in found] == ["start", "tool-approval-response", kind]


def test_a_permission_request_of_a_sub_agents_upstream_is_a_part_until_its_answer_is_used() -> None:
    kind = QuestionKind.APPROVAL
    asked = QuestionAsked(1, 1, "p", kind, "d", 5.0, attempt=1, name="Bash", arguments='{"command": "ls"}')
    answers = QuestionAnswered(1, 1, "p", kind, "d", Choice.ALLOW, 6.0), AnswerUsed(1, 1, 1, "p", 6.0)
    records: list[Record] = [
        *TURN_START,
        *delegating("a"),
        *below("a", "c::0", *child_start("c", "a"), asked),
    ]
    (part,) = [each for each in chunks(records) if each.get("toolName") == "Bash"]
    assert part["input"] == {"command": "ls"}
    found = chunks([*records, *below("a", "c::0", *answers)], 1)
    assert [each["type"] for each in found] == ["start", "tool-approval-response", "tool-output-available"]
