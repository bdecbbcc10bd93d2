"""A call of MCP from the records of a session: its messages after any event, and its task."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from midstream.dialects.langgraph_runs import BEGINNING
from midstream.dialects.mcp_messages import (
    CANCELLED,
    INTERNAL,
    MODERN,
    CallPlace,
    CallStream,
    McpClient,
    McpError,
)
from midstream.dialects.mcp_stream import (
    AGAIN,
    CallEvents,
    McpCall,
    McpFold,
    event_id,
    question_id,
    read_event_id,
    read_question_id,
    stream_name,
)
from midstream.session.records import AttemptStarted, EpochStarted, Record, TurnEnded, TurnStatus
from midstream.session.session import prune_session, restore_session
from tests.dialects.langgraph_journal import approved, delta, opening, whole

Json = dict[str, Any]
PLACE = CallPlace("s", 1)
STREAM = CallStream(PLACE, 7, "2025-11-25", "t", can_elicit=True)
NAME = stream_name("c")


def of_mcp(records: Sequence[Record]) -> list[Record]:
    """Return a story whose message an MCP client sent."""
    return [*opening(NAME), *records[len(opening()) :]]


def cut(first: str, second: str) -> list[Record]:
    """Return a turn whose first attempt was interrupted by the death of its server."""
    more: list[Record] = [EpochStarted(2, "n2", 3.0), AttemptStarted(1, 1, 2, 3.0)]
    pieces = [delta(word, attempt=2) for word in second.split("|")]
    return [*opening(NAME), delta(first), *more, *pieces, *whole(second.replace("|", ""), attempt=2)]


def ended(status: TurnStatus, code: str = "") -> list[Record]:
    return [*opening(NAME), delta("Hel"), TurnEnded(1, status, 4.0, code, "It broke.")]


def read(
    records: Sequence[Record], stream: CallStream = STREAM, after: tuple[int, int] = BEGINNING
) -> list[tuple[str, Json]]:
    """Return the events of a stream: their ids, and their messages."""
    events = CallEvents(McpCall(McpFold("s"), PLACE), stream, after)
    found = events.begin()
    for record in records:
        found += events.take(record, epoch=1)
    fields = [dict(line.split(": ", 1) for line in each.decode().splitlines() if line) for each in found]
    return [(each["id"], json.loads(each["data"])) for each in fields]


def call(records: Sequence[Record]) -> McpCall:
    found = McpCall(McpFold("s"), PLACE)
    for record in records:
        found.take(record, epoch=1)
    return found


def progress_of(events: Sequence[tuple[str, Json]]) -> str:
    params = [each["params"] for _, each in events if each.get("method") == "notifications/progress"]
    progress = [each["progress"] for each in params]
    assert progress == sorted({*progress})
    return "".join(each.get("message", "") for each in params)


def test_a_call_streams_its_words_and_ends_with_its_result() -> None:
    events = read([*opening(NAME), delta("Hello "), delta("you"), *whole("Hello you")])
    assert progress_of(events) == "Hello you"
    response = events[-1][1]
    assert response["id"] == 7
    assert response["result"] == {
        "content": [{"type": "text", "text": "Hello you"}],
        "structuredContent": {"answer": "Hello you", "session": "s"},
        "isError": False,
        "_meta": {"midstream/session": "s"},
    }


@pytest.mark.parametrize(
    "records", [cut("Hello wo", "Hel|lo world"), cut("Hello", "Bye|bye"), of_mcp(approved())]
)
def test_a_reader_continues_after_any_event(records: list[Record]) -> None:
    events = read(records)
    for number, (name, _) in enumerate(events):
        found = read_event_id(name)
        assert found is not None
        stream, after = found
        assert read(records, stream, after) == (events[number + 1 :] or [events[-1]])


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ("Hello wo", "Hel|lo world", "Hello world"),
        ("Hello world", "Hello| world", "Hello world"),
        ("Hello", "Bye|bye", f"Hello{AGAIN}Byebye"),
        ("Hello world", "Hello", f"Hello world{AGAIN}Hello"),
    ],
)
def test_the_text_of_an_interrupted_attempt_is_not_sent_twice(first: str, second: str, words: str) -> None:
    events = read(cut(first, second))
    assert progress_of(events) == words
    assert events[-1][1]["result"]["structuredContent"]["answer"] == second.replace("|", "")


def test_a_question_is_a_form_for_clients_with_forms_and_a_text_for_others() -> None:
    records = of_mcp(approved())
    asked = [each for _, each in read(records) if each.get("method") == "elicitation/create"]
    (form,) = asked
    assert form["params"]["requestedSchema"]["required"] == ["confirm"]
    found = read_question_id(form["id"])
    assert found is not None
    assert found[0] == PLACE
    mute = read(records, CallStream(PLACE, 7, "2025-11-25", None, can_elicit=False))
    assert "burn" in mute[-1][1]["result"]["structuredContent"]["waiting"][0]
    modern = read(records, CallStream(PLACE, 7, MODERN, None, can_elicit=True))
    assert modern[-1][1]["result"]["resultType"] == "input_required"
    assert list(modern[-1][1]["result"]["inputRequests"]) == [found[1]]


def test_a_later_request_does_not_receive_questions_answered_before() -> None:
    records = of_mcp(approved())
    late = CallStream(PLACE, 8, MODERN, "t", can_elicit=True, since=len(records) - 4)
    messages = [each for _, each in read(records, late)]
    assert [each["result"]["resultType"] for each in messages if "result" in each] == ["complete"]
    paused = next(n for n in range(len(records)) if call(records[:n]).questions)
    waiting = CallStream(PLACE, 8, MODERN, "t", can_elicit=True, since=paused)
    (message,) = [each for _, each in read(records[:paused], waiting)]
    assert message["result"]["resultType"] == "input_required"


def test_a_task_has_the_status_of_its_turn() -> None:
    modern, old = McpClient(MODERN), McpClient("2025-11-25")
    going = call(opening(NAME)).task(modern)
    assert (going["status"], going["ttlMs"], going["createdAt"]) == (
        "working",
        None,
        "1970-01-01T00:00:02+00:00",
    )
    records = of_mcp(approved())
    states = [call(records[:n]).status() for n in range(len(opening()), len(records) + 1)]
    assert list(dict.fromkeys(states)) == ["working", "input_required", "completed"]
    done = call(records)
    assert done.detailed_task(modern)["result"]["resultType"] == "complete"
    assert "result" not in done.task(old)


def test_a_failed_turn_is_a_result_and_a_defect_is_an_error() -> None:
    failed = call(ended(TurnStatus.FAILED, "model_rejected"))
    assert (failed.status(), failed.result()["isError"]) == ("completed", True)
    for status, code, expected in (
        (TurnStatus.FAILED, "model", INTERNAL),
        (TurnStatus.INTERRUPTED, "turn_timeout", INTERNAL),
        (TurnStatus.CANCELLED, "", CANCELLED),
    ):
        found = call(ended(status, code))
        with pytest.raises(McpError) as refused:
            found.result()
        assert refused.value.code == expected
        assert found.status() == ("cancelled" if expected == CANCELLED else "failed")
        assert read(ended(status, code))[-1][1]["error"]["code"] == expected
    task = call(ended(TurnStatus.FAILED, "model")).detailed_task(McpClient(MODERN))
    assert (task["error"]["code"], task["statusMessage"]) == (INTERNAL, "It broke.")


def test_a_call_whose_first_records_were_pruned_keeps_its_result() -> None:
    fold = McpFold("s")
    for record in [*opening(NAME), delta("Hello"), *whole("Hello")]:
        fold.take(record, epoch=1)
    pruned = McpFold("s", restore_session(prune_session(fold.session, at=5.0)))
    run = pruned.of_turn(1)
    assert run is not None
    assert McpCall(pruned, PLACE).result()["structuredContent"]["answer"] == "Hello"
    (event,) = CallEvents(McpCall(pruned, PLACE), STREAM).begin()
    assert b'"answer":"Hello"' in event
    with pytest.raises(McpError, match="no longer kept"):
        McpCall(pruned, CallPlace("s", 0))


def test_our_ids_are_read_back_and_others_are_refused() -> None:
    assert read_event_id(event_id(STREAM, BEGINNING)) == (STREAM, BEGINNING)
    assert read_event_id(event_id(STREAM, (4, 2))) == (STREAM, (4, 2))
    question = next(found for n in range(99) if (found := call(of_mcp(approved())[:n]).questions))[0]
    named = read_question_id(question_id(PLACE, question))
    assert named is not None
    assert named[0] == PLACE
    for text in ("", "x", "e30.0", "W10.0-0", "\xff.0"):
        assert read_event_id(text) is None
    for name in (7, "x", "midstream.x.y"):
        assert read_question_id(name) is None
