"""The shape of an answer whose tools ran elsewhere, as client applications can read it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from midstream.agents.answer_shape import FOLDED_CHARS_MAX, Folded, Paired
from midstream.history.messages import UPSTREAM_CUT, Finish, Outcome, Text, Thinking, UpstreamCall
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
from midstream.session.call_references import AttemptRef
from tests.spec import spec

START = UpstreamCallStarted("a", "read", '{"path":"x"}')
END = UpstreamCallEnded("a", "words of x")
_ids = st.sampled_from("abc")
_events = st.lists(
    st.one_of(
        st.builds(UpstreamCallStarted, _ids, st.just("read"), st.just("{}")),
        st.builds(UpstreamCallEnded, _ids, st.just("x"), st.sampled_from(Outcome)),
        st.builds(TextDelta, st.sampled_from(["hi", ""])),
        st.builds(ToolCallRequested, _ids, st.just("ask"), st.just("{}")),
    ),
    max_size=12,
)


def pass_through(shape: Paired | Folded, *events: ModelEvent) -> list[ModelEvent]:
    return [each for event in events for each in shape.take(event)]


def test_a_well_formed_answer_passes_unchanged() -> None:
    events: list[ModelEvent] = [TextDelta("I look"), START, END, TextDelta("done"), Finished()]
    shape = Paired()

    assert pass_through(shape, *events) == events
    assert shape.cut() == ()


@spec("REUSE-57")
def test_a_call_open_at_the_end_gets_an_end_before_it() -> None:
    assert pass_through(Paired(), START, Finished()) == [
        START,
        UpstreamCallEnded("a", UPSTREAM_CUT, Outcome.UNKNOWN),
        Finished(),
    ]


def test_a_call_open_where_the_answer_broke_off_gets_one_end() -> None:
    shape = Paired()
    pass_through(shape, START)

    assert shape.cut() == (UpstreamCallEnded("a", UPSTREAM_CUT, Outcome.UNKNOWN),)
    assert shape.cut() == ()
    assert shape.take(END) == ()


@spec("REUSE-57")
@given(_events)
def test_every_call_starts_once_and_ends_once(events: list[ModelEvent]) -> None:
    shape = Paired()
    shown = [*pass_through(shape, *events), *shape.cut()]

    places: dict[str, list[type]] = {}
    for event in shown:
        if isinstance(event, UpstreamCallStarted | UpstreamCallEnded):
            places.setdefault(event.id, []).append(type(event))
    assert all(kinds == [UpstreamCallStarted, UpstreamCallEnded] for kinds in places.values())
    others = (UpstreamCallStarted, UpstreamCallEnded)
    assert [each for each in shown if not isinstance(each, others)] == [
        each for each in events if not isinstance(each, others)
    ]


@spec("REUSE-57")
def test_a_turn_without_tools_reports_calls_as_thoughts() -> None:
    shape = Folded()
    events = pass_through(shape, TextDelta("I look"), START, END, TextDelta("done"), Finished(Finish.CALLS))

    reported = ThinkingDelta('[ran elsewhere: read {"path":"x"}; it ended well]\nwords of x\n', signature="")
    assert events == [TextDelta("I look"), reported, TextDelta("done"), Finished(Finish.STOP)]


def test_a_folded_call_is_summarized_with_its_outcome() -> None:
    shape = Folded()
    long = "y" * (FOLDED_CHARS_MAX + 5)
    (reported,) = pass_through(shape, START, UpstreamCallEnded("a", long, Outcome.ERROR))
    pass_through(shape, UpstreamCallStarted("b", "run", "{}"))

    assert isinstance(reported, ThinkingDelta)
    assert reported.text.endswith("y\n[+5 characters]\n")
    assert "it failed" in reported.text
    assert shape.cut() == [
        ThinkingDelta(f"[ran elsewhere: run {{}}; nobody knows how it ended]\n{UPSTREAM_CUT}\n", "")
    ]


@spec("REUSE-57")
@given(_events)
def test_folded_answers_have_no_tool_parts(events: list[ModelEvent]) -> None:
    shape = Folded()
    builder = ResponseBuilder(AttemptRef(1, 1, 1))
    for event in [*pass_through(shape, *events, Finished(Finish.CALLS)), *shape.cut()]:
        builder.add(event)

    response = builder.response()
    assert response is None or {type(part) for part in response.parts} <= {Text, Thinking}


@spec("REUSE-54")
def test_text_after_a_call_is_a_separate_part() -> None:
    builder = ResponseBuilder(AttemptRef(1, 1, 1))
    for event in (TextDelta("I look"), START, TextDelta("while it runs"), END, TextDelta(", on"), Finished()):
        builder.add(event)

    response = builder.response()
    assert response is not None
    assert response.parts == (
        Text("I look"),
        UpstreamCall("a", "read", '{"path":"x"}', "words of x", Outcome.OK),
        Text("while it runs, on"),
    )
