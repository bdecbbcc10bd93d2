from __future__ import annotations

from collections.abc import Sequence

from midstream.core.dialects.telling import Telling
from midstream.core.messages import Finish, Outcome
from midstream.core.replies import (
    CallRequested,
    Finished,
    ModelEvent,
    TextDelta,
    ThinkingDelta,
    UpstreamCallEnded,
    UpstreamCallStarted,
    Working,
)
from tests.spec import spec


def told(*events: ModelEvent, has_tools: bool = False, shows: bool = True) -> Sequence[ModelEvent | None]:
    telling = Telling(has_tools=has_tools, shows_upstream_calls=shows)
    return [telling.told(event) for event in events]


RAN = (UpstreamCallStarted("u1", "Bash", "{}"), UpstreamCallEnded("u1", "x" * 3000, Outcome.ERROR))


@spec("REUSE-67")
def test_a_tool_of_the_upstream_is_a_thought_and_a_short_one() -> None:
    for has_tools in (False, True):
        started, ended = told(*RAN, has_tools=has_tools)
        assert started == ThinkingDelta("\n[Bash {}]\n")
        assert ended == ThinkingDelta(f"\n[Bash (error): {'x' * 2000} (+1000 characters)]\n")
    assert told(*RAN, shows=False) == [None, None]


@spec("REUSE-67")
def test_a_call_for_a_host_without_tools_is_a_thought_too() -> None:
    assert told(CallRequested("c1", "look", "{}"), Finished(Finish.CALLS)) == [
        ThinkingDelta("\n[look {}]\n"),
        Finished(Finish.STOP),
    ]


def test_each_call_has_an_id_of_its_own() -> None:
    calls = [CallRequested(given, "look", "") for given in ("", "c", "c", "call_1")]
    events = told(*calls, Finished(Finish.STOP), has_tools=True)
    assert [event.id for event in events if isinstance(event, CallRequested)] == [
        "call_1",
        "c",
        "c_",
        "call_1_",
    ]
    assert [event.arguments for event in events if isinstance(event, CallRequested)] == ["{}"] * 4
    assert events[-1] == Finished(Finish.CALLS)


def test_half_a_character_is_none() -> None:
    assert told(TextDelta("a\ud83d"), ThinkingDelta("\ud83d", "s"), TextDelta("")) == [
        TextDelta("a?"),
        ThinkingDelta("?", "s"),
        None,
    ]
    assert told(Working("x")) == [Working("x")]
