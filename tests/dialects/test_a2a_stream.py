"""A turn of a session as a task of A2A: its events add up to its snapshot, after any of its records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from midstream.dialects.a2a_stream import A2aFold, TaskEvents
from midstream.history.messages import Finish, Response, Text, ToolCall, ToolResult
from midstream.session.calls import CallPlan
from midstream.session.records import (
    AttemptStarted,
    CallEnded,
    CallStarted,
    CommandAccepted,
    EpochStarted,
    QuestionAnswered,
    Record,
    ResponseCompleted,
    StepCommitted,
    StreamOpened,
    TurnEnded,
    TurnStatus,
)
from midstream.session.session import prune_session, restore_session
from tests.dialects.langgraph_journal import approved, cut, delta, opening, whole

Json = dict[str, Any]
STREAM = "a2a-m1 0123456789abcdef"


def of_a2a(records: Sequence[Record]) -> list[Record]:
    """Return a story whose message an A2A client sent, and whose answer an A2A client returned."""
    found: list[Record] = [*opening(STREAM)]
    for record in records[len(opening()) :]:
        if isinstance(record, QuestionAnswered):
            found += [StreamOpened("a2a-m2 00", "digest"), CommandAccepted("a2a-m2 00", 0, "d")]
        found.append(record)
    return found


def lost() -> list[Record]:
    """Return a turn whose attempt was interrupted in its text, and which is cancelled before another text."""
    return [
        *opening(STREAM),
        delta("Hello "),
        EpochStarted(2, "n2", 3.0),
        AttemptStarted(1, 1, 2, 3.0),
        TurnEnded(1, TurnStatus.CANCELLED, 4.0),
    ]


def with_artifact() -> list[Record]:
    """Return a turn with a call whose result is an artifact."""
    call = ToolCall("c", "draw", "{}")
    body = Response((Text("I draw."), call), Finish.CALLS)
    result = '{"raw": "AAAA", "mediaType": "image/png", "filename": "a.png"}'
    return [
        *opening(STREAM),
        ResponseCompleted(1, 1, 1, body, 3.0, (CallPlan("c", "dig"),)),
        CallStarted(1, 1, "c", 1, 5.0),
        CallEnded(1, 1, ToolResult("c", result), 6.0),
        StepCommitted(1, 1),
        AttemptStarted(1, 2, 1, 6.0),
        delta("Done.", response=2),
        *whole("Done.", response=2),
    ]


STORIES = {
    "approved": of_a2a(approved()),
    "cut": of_a2a(cut()),
    "lost": lost(),
    "made": with_artifact(),
    "failed": [*opening(STREAM), TurnEnded(1, TurnStatus.FAILED, 4.0, "model_rejected", "no")],
}


def read(records: Sequence[Record], after: int = 0) -> tuple[list[Json], TaskEvents]:
    """Return the events of a reader that starts after this many records, and their task."""
    task, events, epoch = TaskEvents(A2aFold("t"), 1, ("draw",)), list[Json](), 0
    for number, record in enumerate(records, start=1):
        epoch = record.epoch if isinstance(record, EpochStarted) else epoch
        more = task.take(record, epoch=epoch)
        if number > after:
            events += more
        elif number == after and task.state:
            events = [{"task": task.task()}]
    return events, task


def add_up(events: Sequence[Json]) -> Json:
    """Return the task to which the events add up by the rules of the protocol, as the reference SDK applies them."""
    task: Json = {}
    artifacts: dict[str, Json] = {}
    for event in events:
        match event:
            case {"task": found}:
                task = {**found, "history": [*found["history"]]}
                artifacts = {each["artifactId"]: each for each in found.get("artifacts", ())}
            case {"statusUpdate": {"status": status}}:
                if "message" in task["status"]:
                    task["history"].append(task["status"]["message"])
                task["status"] = status
            case {"artifactUpdate": {"artifact": artifact, "append": append}}:
                name = artifact["artifactId"]
                if append:
                    parts = [*artifacts[name]["parts"], *artifact["parts"]]
                    artifacts[name] = {**artifacts[name], "parts": parts}
                else:
                    artifacts[name] = artifact
    return whole_task({**task, **({"artifacts": list(artifacts.values())} if artifacts else {})})


def whole_task(task: Json) -> Json:
    """Return a task with the texts of an artifact as one."""
    for artifact in (shown := [dict(each) for each in task.get("artifacts", ())]):
        if all("text" in part for part in artifact["parts"]):
            artifact["parts"] = [{"text": "".join(part["text"] for part in artifact["parts"])}]
    return {**task, "artifacts": shown}


@pytest.mark.parametrize("name", STORIES)
def test_the_events_after_any_record_add_up_to_the_snapshot(name: str) -> None:
    records = STORIES[name]
    _, task = read(records)
    for after in range(len(records)):
        events, _ = read(records, after)
        if not events:
            continue
        assert "task" in events[0]
        assert not any("task" in each for each in events[1:])
        fold, snapshot = add_up(events), whole_task(task.task())
        answers = [each for each in snapshot["history"] if each["messageId"] == "m2"]
        missing = [each for each in answers if each not in fold["history"]]
        snapshot["history"] = [each for each in snapshot["history"] if each not in missing]
        assert fold == snapshot, after


def test_the_text_of_an_interrupted_attempt_is_replaced() -> None:
    events, task = read(STORIES["cut"])
    updates = [each["artifactUpdate"] for each in events if "artifactUpdate" in each]
    assert [(each["append"], each["artifact"]["parts"][0]["text"]) for each in updates] == [
        (False, "Hello "),
        (False, "Hello "),
        (True, "you"),
        (True, ""),
    ]
    assert [each["lastChunk"] for each in updates] == [False, False, False, True]
    assert task.task()["artifacts"] == [
        {"artifactId": "ai-1", "name": "answer", "parts": [{"text": "Hello you"}]}
    ]


def test_text_without_a_replacement_is_withdrawn() -> None:
    events, task = read(STORIES["lost"])
    assert task.task()["artifacts"][0]["parts"] == [{"text": ""}]
    assert events[-1]["statusUpdate"]["status"]["state"] == "TASK_STATE_CANCELED"


def test_a_result_of_a_tool_is_an_artifact_if_it_is_declared() -> None:
    _, task = read(STORIES["made"])
    found = {each["artifactId"]: each["parts"] for each in task.task()["artifacts"]}
    assert found == {
        "ai-1": [{"text": "I draw."}],
        "ai-1.c": [{"raw": "AAAA", "mediaType": "image/png", "filename": "a.png"}],
        "ai-2": [{"text": "Done."}],
    }


def test_a_question_and_its_answer_are_in_the_history() -> None:
    events, task = read(STORIES["approved"])
    states = [each["statusUpdate"]["status"]["state"] for each in events if "statusUpdate" in each]
    assert states == ["TASK_STATE_INPUT_REQUIRED", "TASK_STATE_WORKING", "TASK_STATE_COMPLETED"]
    user, asked, answer = task.task()["history"]
    assert (user["messageId"], answer["messageId"]) == ("m1", "m2")
    assert asked["parts"][0]["text"] == "May burn run?"
    assert asked["parts"][1]["data"]["questions"][0]["metadata"]["midstream"]["arguments"] == {
        "what": "paper"
    }
    assert answer["parts"] == [{"text": "allow"}]


@pytest.mark.parametrize("name", ["approved", "cut", "made"])
def test_a_pruned_task_consists_of_its_remaining_records(name: str) -> None:
    _, task = read(STORIES[name])
    session = restore_session(prune_session(task.fold.session, at=9.0))
    pruned = TaskEvents(A2aFold("t", session), 1, ("draw",))
    (event,) = pruned.begin()
    assert event["task"]["artifacts"] == task.task()["artifacts"]
    assert event["task"]["history"] == task.task()["history"][:1]
    assert event["task"]["status"]["state"] == "TASK_STATE_COMPLETED"
