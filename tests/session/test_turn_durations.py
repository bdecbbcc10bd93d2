"""Durations are computed from the records and contain no content."""

from __future__ import annotations

from midstream.history.messages import (
    Finish,
    Outcome,
    Response,
    Text,
    ToolCall,
    ToolResult,
    Usage,
    UserMessage,
)
from midstream.session.records import (
    AttemptFailed,
    AttemptStarted,
    CallEnded,
    CallStarted,
    MessageAccepted,
    Record,
    ResponseCompleted,
    TurnEnded,
    TurnStatus,
)
from midstream.session.turn_durations import OPEN_MAX, Interval, IntervalKind, Intervals

RESPONSE = Response(
    (Text("words"), ToolCall("c1", "look", '{"where": "words"}')), Finish.CALLS, "m-1", Usage(7, 3, 2)
)
TURN: list[Record] = [
    MessageAccepted(1, UserMessage.of("words"), 10.0),
    AttemptStarted(1, 1, 1, 11.0),
    AttemptFailed(1, 1, 1, "model_unavailable", "words", 12.0),
    AttemptStarted(1, 1, 2, 13.0),
    ResponseCompleted(1, 1, 2, RESPONSE, 15.0),
    CallStarted(1, 1, "c1", 1, 15.0),
    CallEnded(1, 1, ToolResult("c1", "words", Outcome.OK), 19.0),
    TurnEnded(1, TurnStatus.FAILED, 20.0, "model_access", "words"),
]


def _ended(records: list[Record]) -> list[Interval]:
    intervals = Intervals()
    found = [interval for record in records for interval in intervals.add("s1", record)]
    assert intervals._open == {}
    return [interval for interval in found if not interval.is_open]


def test_each_turn_model_call_and_tool_call_is_one_interval() -> None:
    assert _ended(TURN) == [
        Interval(IntervalKind.MODEL, "s1", 1, 1, 1, "", 11.0, 12.0, outcome="model_unavailable"),
        Interval(
            *(IntervalKind.MODEL, "s1", 1, 1, 2, "", 13.0, 15.0),
            name="m-1",
            outcome="ok",
            usage=Usage(7, 3, 2),
            finish="calls",
        ),
        Interval(IntervalKind.CALL, "s1", 1, 1, 1, "c1", 15.0, 19.0, name="look", outcome="ok"),
        Interval(IntervalKind.TURN, "s1", 1, 0, 0, "", 10.0, 20.0, outcome="failed", code="model_access"),
    ]
    assert "words" not in repr(_ended(TURN))


def test_an_unknown_beginning_gives_no_interval_and_no_duration_is_negative() -> None:
    assert _ended(TURN[5:6] + TURN[6:]) == [
        Interval(IntervalKind.CALL, "s1", 1, 1, 1, "c1", 15.0, 19.0, outcome="ok")
    ]
    assert Interval(IntervalKind.TURN, "s1", 1, 0, 0, "", 10.0, 9.0).seconds == 0.0


def test_intervals_that_never_end_are_dropped() -> None:
    intervals = Intervals()
    for number in range(OPEN_MAX + 10):
        list(intervals.add(f"s{number}", TURN[0]))
    assert len(intervals._open) == OPEN_MAX
