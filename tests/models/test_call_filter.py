from __future__ import annotations

from collections.abc import Sequence

from midstream.history.messages import Finish
from midstream.models.call_filter import CallFilter
from midstream.models.responses import (
    Finished,
    ModelEvent,
    TextDelta,
    ThinkingDelta,
    ToolCallRequested,
    Working,
)
from tests.spec import spec


def filter_events(*events: ModelEvent, has_tools: bool = False) -> Sequence[ModelEvent]:
    calls = CallFilter(has_tools=has_tools)
    return [calls.apply(event) for event in events]


@spec("REUSE-67")
def test_a_call_for_an_application_without_tools_becomes_thinking() -> None:
    assert filter_events(ToolCallRequested("c1", "look", "{}"), Finished(Finish.CALLS)) == [
        ThinkingDelta("\n[look {}]\n"),
        Finished(Finish.STOP),
    ]


def test_each_call_has_a_distinct_id() -> None:
    calls = [ToolCallRequested(given, "look", "") for given in ("", "c", "c", "call_1")]
    events = filter_events(*calls, Finished(Finish.STOP), has_tools=True)
    assert [event.id for event in events if isinstance(event, ToolCallRequested)] == [
        "call_1",
        "c",
        "c_",
        "call_1_",
    ]
    assert [event.arguments for event in events if isinstance(event, ToolCallRequested)] == ["{}"] * 4
    assert events[-1] == Finished(Finish.CALLS)


def test_all_other_events_pass_unchanged() -> None:
    assert filter_events(TextDelta("a"), Working("x")) == [TextDelta("a"), Working("x")]
