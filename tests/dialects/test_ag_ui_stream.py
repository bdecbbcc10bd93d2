"""A run of a session as events of AG-UI: from its start for one reader, after any event for others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from midstream.dialects.ag_ui_messages import CONTINUES
from midstream.dialects.ag_ui_stream import (
    AgUiEvents,
    AgUiFold,
    empty_thread_events,
    refusal,
    stream_name,
)
from midstream.dialects.langgraph_runs import BEGINNING, place_of
from midstream.dialects.run_fold import Run
from midstream.history.messages import Finish, Outcome, Response, Text, ToolCall, ToolResult, UpstreamCall
from midstream.session.calls import CallPlan, Site
from midstream.session.records import (
    AttemptStarted,
    CallEnded,
    CallProgressed,
    CallStarted,
    CancelRequested,
    CommandAccepted,
    Delta,
    EpochStarted,
    Record,
    ResponseCompleted,
    StepCommitted,
    StreamOpened,
    TurnEnded,
    TurnStatus,
)
from midstream.session.session import prune_session, restore_session
from tests.dialects.ag_ui_cuts import Event, events_of, findings
from tests.dialects.langgraph_journal import approved, cut, delta, opening, whole

pytest.importorskip("ag_ui_validate")
Json = dict[str, Any]
STREAM = stream_name("r1", "m1")
UPSTREAM = UpstreamCall("u", "search", '{"q": 1}')


def of_ag_ui(records: Sequence[Record]) -> list[Record]:
    """Return a story whose message an AG-UI client sent."""
    return [*opening(STREAM), *records[len(opening()) :]]


def thinking_interrupted() -> list[Record]:
    """Return a turn that thinks, is interrupted in its thoughts, and answers without any."""
    return [
        *opening(STREAM),
        delta("Hm", kind="thinking"),
        EpochStarted(2, "n2", 3.0),
        AttemptStarted(1, 1, 2, 3.0),
        delta("Hello you", attempt=2),
        *whole("Hello you", attempt=2),
    ]


def looked() -> list[Record]:
    """Return a turn with two calls of its client, whose results arrive in one request."""
    asked = tuple(ToolCall(name, "look", "") for name in ("a", "b"))
    plans = tuple(CallPlan(each.id, "dig", site=Site.CLIENT) for each in asked)
    more = stream_name("r2", CONTINUES)
    return [
        *opening(STREAM),
        ResponseCompleted(1, 1, 1, Response(asked, Finish.CALLS), 3.0, plans),
        CallStarted(1, 1, "a", 1, 3.0),
        CallStarted(1, 1, "b", 1, 3.0),
        StreamOpened(more, "digest"),
        CommandAccepted(more, 0, "d"),
        CallEnded(1, 1, ToolResult("a", "sea"), 4.0),
        CallEnded(1, 1, ToolResult("b", "no", Outcome.ERROR), 5.0),
        StepCommitted(1, 1),
        AttemptStarted(1, 2, 1, 5.0),
        delta("Seen", response=2),
        *whole("Seen", response=2),
    ]


def served_upstream() -> list[Record]:
    """Return a turn with a tool that the upstream runs."""
    ended = UpstreamCall("u", "search", '{"q": 1}', "found", Outcome.OK)
    body = Response((Text("I look."), ended, Text("It is there.")))
    return [
        *opening(STREAM),
        delta("I look."),
        Delta(1, 1, 1, 1, "thinking", "", UPSTREAM),
        Delta(1, 1, 1, 1, "thinking", "", ended),
        delta("It is there.", part=2),
        ResponseCompleted(1, 1, 1, body, 3.0),
        *whole("")[1:],
    ]


def read(records: Sequence[Record], run_id: str = "r1", after: str = "-1") -> list[Event]:
    """Return the events of a run after one of them."""
    fold, events = AgUiFold("t"), None
    everything = AgUiFold("t")
    epoch = 0
    for record in records:
        epoch = record.epoch if isinstance(record, EpochStarted) else epoch
        everything.take(record, epoch=epoch)
    run = everything.find(run_id)
    assert run is not None
    events = AgUiEvents(fold, run, place_of(after) or BEGINNING)
    body = b"".join(events.begin())
    epoch = 0
    for record in records:
        epoch = record.epoch if isinstance(record, EpochStarted) else epoch
        body += b"".join(events.take(record, epoch=epoch))
    return events_of(body.decode())


def messages_of(events: Sequence[Event]) -> list[Json]:
    """Return a client's messages from events, by the protocol's rules."""
    messages: dict[str, Json] = {}
    for _, event in events:
        match event["type"]:
            case "MESSAGES_SNAPSHOT":
                kept = {} if any(e["role"] == "reasoning" for e in event["messages"]) else messages
                thoughts = {name: each for name, each in kept.items() if each["role"] == "reasoning"}
                messages = {
                    **thoughts,
                    **{each["id"]: json.loads(json.dumps(each)) for each in event["messages"]},
                }
            case "TEXT_MESSAGE_START" | "REASONING_MESSAGE_START":
                made = {"id": event["messageId"], "role": event["role"], "content": ""}
                messages.setdefault(event["messageId"], made)
            case "TEXT_MESSAGE_CONTENT" | "REASONING_MESSAGE_CONTENT":
                messages[event["messageId"]]["content"] += event["delta"]
            case "TOOL_CALL_START":
                messages[event["parentMessageId"]].setdefault("toolCalls", []).append(event["toolCallId"])
            case "TOOL_CALL_RESULT":
                messages[event["messageId"]] = {"role": "tool", "content": event["content"]}
            case _:
                pass
    return list(messages.values())


STORIES = {
    "approved": (of_ag_ui(approved()), ["r1", ""]),
    "cut": (of_ag_ui(cut()), ["r1"]),
    "thought": (thinking_interrupted(), ["r1"]),
    "looked": (looked(), ["r1", "r2"]),
    "upstream": (served_upstream(), ["r1"]),
}


@pytest.mark.parametrize("name", STORIES)
def test_each_suffix_is_valid_and_leads_to_the_same_messages(name: str) -> None:
    records, run_ids = STORIES[name]
    fold = AgUiFold("t")
    for record in records:
        fold.take(record, epoch=1)
    for run_id in run_ids:
        run_id = run_id or fold.runs[-1].id
        whole_run = read(records, run_id)
        assert findings(whole_run) == []
        assert whole_run[-1][1]["type"] == "RUN_FINISHED"
        assert len({each for each, _ in whole_run}) == len(whole_run)
        for number, (event_id, _) in enumerate(whole_run):
            suffix = read(records, run_id, event_id)
            assert findings(suffix) == [], (event_id, suffix)
            assert [each for each in suffix if each[0]] == (whole_run[number + 1 :] or whole_run[-1:])
            assert [(each["role"], each["content"]) for each in messages_of(suffix)] == [
                (each["role"], each["content"]) for each in messages_of(whole_run)
            ], (event_id, suffix)


def test_the_text_of_an_interrupted_attempt_is_withdrawn() -> None:
    events = read(of_ag_ui(cut()))
    assert [each["content"] for each in messages_of(events)] == ["hi", "Hello you"]
    assert [each["content"] for each in messages_of(read(thinking_interrupted()))] == ["hi", "", "Hello you"]


def test_a_run_that_waits_for_its_client_names_the_calls_and_their_results_start_the_next() -> None:
    first, second = read(looked()), read(looked(), "r2")
    assert first[-1][1]["outcome"] == {"type": "success", "pendingToolCallIds": ["a~ai-1", "b~ai-1"]}
    assert [event["delta"] for _, event in first if event["type"] == "TOOL_CALL_ARGS"] == ["{}", "{}"]
    assert "TOOL_CALL_RESULT" not in [event["type"] for _, event in second]
    results = [each for each in second[1][1]["messages"] if each["role"] == "tool"]
    assert [(each["content"], each.get("error")) for each in results] == [("sea", None), ("no", "no")]


def test_an_interrupt_follows_a_snapshot_and_its_result_is_in_the_next_run() -> None:
    records = of_ag_ui(approved())
    first = [event for _, event in read(records)]
    assert [event["type"] for event in first[-2:]] == ["MESSAGES_SNAPSHOT", "RUN_FINISHED"]
    (asked,) = first[-1]["outcome"]["interrupts"]
    assert (asked["reason"], asked["toolCallId"]) == ("tool_call", "c~ai-1")
    fold = AgUiFold("t")
    for record in records:
        fold.take(record, epoch=1)
    then = [event for _, event in read(records, fold.runs[-1].id)]
    assert [event["content"] for event in then if event["type"] == "TOOL_CALL_RESULT"] == ["ash"]


@pytest.mark.parametrize("status", [TurnStatus.CANCELLED, TurnStatus.FAILED, TurnStatus.INTERRUPTED])
def test_a_failed_run_ends_with_its_error(status: TurnStatus) -> None:
    asked = [CancelRequested(1, 3.0, 9.0)] if status is TurnStatus.CANCELLED else []
    records = [*opening(STREAM), delta("Hel"), *asked, TurnEnded(1, status, 4.0)]
    events = read(records)
    assert events[-2][1]["type"] == "TEXT_MESSAGE_END"
    assert events[-1][1]["type"] == "RUN_ERROR"
    assert events[-1][1]["message"]
    for event_id, _ in events:
        suffix = read(records, after=event_id)
        assert (findings(suffix), suffix[-1]) == ([], events[-1])


def test_progress_of_a_tool_is_a_custom_event() -> None:
    records = of_ag_ui(approved())
    started = next(n for n, each in enumerate(records) if isinstance(each, CallStarted))
    records.insert(started + 1, CallProgressed(1, 1, "c", 1, '{"at": 1}', 5.5))
    fold = AgUiFold("t")
    for record in records:
        fold.take(record, epoch=1)
    (event,) = [e for _, e in read(records, fold.runs[-1].id) if e["type"] == "CUSTOM"]
    assert event["value"] == {"toolCallId": "c~ai-1", "value": {"at": 1}}


def test_a_run_with_pruned_records_consists_of_the_remaining_ones() -> None:
    fold = AgUiFold("t")
    for record in of_ag_ui(cut()):
        fold.take(record, epoch=1)
    restored = AgUiFold("t", restore_session(prune_session(fold.session, at=9.0)))
    run = restored.run
    assert isinstance(run, Run)
    assert run.id == "r1"
    events = events_of(b"".join(AgUiEvents(restored, run, BEGINNING).begin()).decode())
    assert findings(events) == []
    assert [each["content"] for each in messages_of(events)] == ["hi", "Hello you"]


def test_streams_without_a_run_are_valid() -> None:
    for body in (refusal("t", "r", "no", "not so", at=1.0), empty_thread_events("t", "r", at=1.0)):
        assert findings(events_of(b"".join(body).decode())) == []
