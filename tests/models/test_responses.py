"""From the events of a model to its response."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.errors import ModelForgotError
from midstream.history.messages import (
    UPSTREAM_CUT,
    Finish,
    Outcome,
    Response,
    Text,
    Thinking,
    ToolCall,
    UpstreamCall,
    Usage,
)
from midstream.history.upstream_calls import Words
from midstream.models.responses import (
    DELTA_CHARS_MAX,
    Finished,
    ModelEvent,
    ResponseBuilder,
    TextDelta,
    ThinkingDelta,
    ToolCallRequested,
    UpstreamCallEnded,
    UpstreamCallStarted,
    Working,
    merge_deltas,
)
from midstream.session.call_references import AttemptRef
from midstream.session.records import Delta, encode
from tests.spec import spec

words = st.text(st.characters(exclude_categories=[]), max_size=5)
events = st.lists(
    st.one_of(
        st.builds(TextDelta, words),
        st.builds(ThinkingDelta, words, st.none() | words),
        st.builds(ThinkingDelta, st.just(""), words, st.just(True)),  # noqa: FBT003 - a strategy
        st.builds(ToolCallRequested, words, words, words),
        st.builds(UpstreamCallStarted, st.sampled_from("ab"), words, words),
        st.builds(UpstreamCallEnded, st.sampled_from("abc"), words),
    ),
    max_size=12,
)


def _built(*events: ModelEvent) -> tuple[list[Delta], Response | None]:
    builder = ResponseBuilder(AttemptRef(1, 2, 3))
    deltas = [delta for event in events for delta in builder.add(event)]
    return deltas, builder.response()


def test_redacted_thinking_is_a_part_of_its_own() -> None:
    sealed = ThinkingDelta("", "c2VhbGVk", is_redacted=True)
    deltas, response = _built(ThinkingDelta("hm"), sealed, sealed, TextDelta("yes"), Finished())
    assert [delta.text for delta in deltas] == ["hm", "yes"]
    assert response is not None
    withheld = Thinking("", "c2VhbGVk", is_redacted=True)
    assert response.parts == (Thinking("hm"), withheld, withheld, Text("yes"))


def test_a_response_consists_of_its_events_in_order() -> None:
    deltas, response = _built(
        ThinkingDelta("let me "),
        ThinkingDelta("see", signature="sig"),
        TextDelta("I will "),
        TextDelta("look."),
        ToolCallRequested("a", "read", '{"path": "x"}'),
        Finished(Finish.CALLS, "scripted", Usage(1, 2)),
    )
    assert deltas == [
        Delta(1, 2, 3, 0, "thinking", "let me "),
        Delta(1, 2, 3, 0, "thinking", "see"),
        Delta(1, 2, 3, 1, "text", "I will "),
        Delta(1, 2, 3, 1, "text", "look."),
    ]
    assert response == Response(
        (Thinking("let me see", "sig"), Text("I will look."), ToolCall("a", "read", '{"path": "x"}')),
        Finish.CALLS,
        "scripted",
        Usage(1, 2),
    )


HIGH, LOW, EMOJI, LOST = "\ud83d", "\ude00", "\U0001f600", "\ufffd"


@pytest.mark.parametrize("delta", [TextDelta, ThinkingDelta])
def test_a_character_cut_between_two_deltas_arrives_whole(
    delta: type[TextDelta | ThinkingDelta],
) -> None:
    deltas, response = _built(
        delta("a" + HIGH), Working("x"), delta(""), delta(LOW + "b"), TextDelta("."), Finished()
    )
    assert "".join(each.text for each in deltas) == f"a{EMOJI}b."
    assert response is not None
    assert "".join(part.text for part in response.parts if isinstance(part, Text | Thinking)) == f"a{EMOJI}b."


def test_half_a_character_stays_in_its_part() -> None:
    deltas, response = _built(
        ThinkingDelta("a" + HIGH),
        TextDelta(LOW + "b" + HIGH),
        ToolCallRequested("1", "look", '{"q":"' + HIGH + LOW + '"}'),
        ThinkingDelta("c" + HIGH, "signed"),
        TextDelta("d" + HIGH),
        Finished(model="m" + HIGH),
    )
    assert response == Response(
        (
            Thinking("a" + LOST),
            Text(LOST + "b" + LOST),
            ToolCall("1", "look", f'{{"q":"{EMOJI}"}}'),
            Thinking("c" + LOST, "signed"),
            Text("d" + LOST),
        ),
        model="m" + LOST,
    )
    words = [(delta.part, delta.text) for delta in deltas if delta.text]
    assert words == [
        (0, "a"), (0, LOST), (1, LOST + "b"), (1, LOST), (3, "c"), (3, LOST), (4, "d"), (4, LOST),
    ]  # fmt: skip


def test_half_a_character_waits_during_an_upstream_call() -> None:
    deltas, _ = _built(
        UpstreamCallStarted("1", "grep", "{}"),
        TextDelta(HIGH),
        UpstreamCallEnded("1", "found"),
        TextDelta(LOW),
        Finished(),
    )
    assert "".join(delta.text for delta in deltas) == EMOJI


def test_an_unfinished_response_is_none() -> None:
    assert _built(TextDelta("half a"))[1] is None


def test_an_empty_response_is_none() -> None:
    assert _built(Finished())[1] is None
    assert _built(TextDelta(" \n"), ThinkingDelta(""), Finished())[1] is None


def test_a_finish_is_recorded() -> None:
    builder = ResponseBuilder(AttemptRef(1, 1, 1))
    assert not builder.is_finished
    builder.add(Finished())
    assert builder.is_finished


@given(events)
def test_joined_deltas_equal_the_response(sent: list[ModelEvent]) -> None:
    deltas, response = _built(*sent, Finished())
    texts: dict[int, str] = {}
    for delta in deltas:
        texts[delta.part] = texts.get(delta.part, "") + delta.text
    if response is not None:
        parts = {
            number: part.text
            for number, part in enumerate(response.parts)
            if isinstance(part, Text | Thinking) and part.text
        }
        assert {number: text for number, text in texts.items() if text} == parts
        calls = {delta.part: delta.call for delta in deltas if delta.call is not None}
        assert calls == {n: part for n, part in enumerate(response.parts) if isinstance(part, UpstreamCall)}


@given(events)
def test_any_output_of_a_model_can_be_stored(sent: list[ModelEvent]) -> None:
    """Providers split an emoji in two: half of it has no UTF-8 form."""
    deltas, response = _built(*sent, Finished())
    for delta in deltas:
        encode(delta)
    if response is not None:
        for call in response.calls:
            assert call.id
            (call.id + call.name + call.arguments).encode()


@given(events)
def test_merging_deltas_changes_no_text_and_never_crosses_parts(sent: list[ModelEvent]) -> None:
    deltas, _ = _built(*sent)
    merged = merge_deltas(deltas)
    for part in {delta.part for delta in deltas}:
        assert "".join(d.text for d in merged if d.part == part) == "".join(
            d.text for d in deltas if d.part == part
        )
    assert [d.call for d in merged if d.call] == [d.call for d in deltas if d.call]
    for one, following in itertools.pairwise(merged):
        assert one.part != following.part or one.call is not None or following.call is not None


def test_no_delta_exceeds_a_frame() -> None:
    deltas, _ = _built(TextDelta("x" * (2 * DELTA_CHARS_MAX + 1)))
    assert [len(delta.text) for delta in deltas] == [DELTA_CHARS_MAX, DELTA_CHARS_MAX, 1]
    assert [len(delta.text) for delta in merge_deltas(deltas)] == [DELTA_CHARS_MAX, DELTA_CHARS_MAX, 1]


START = UpstreamCallStarted("u", "grep", '{"for":"x"}')
END = UpstreamCallEnded("u", "line 1", Outcome.OK)
RUNS = UpstreamCall("u", "grep", '{"for":"x"}')
ENDED_CALL = UpstreamCall("u", "grep", '{"for":"x"}', "line 1", Outcome.OK)


@spec("REUSE-54")
def test_an_upstream_call_is_reported_at_its_start_and_its_end() -> None:
    deltas, response = _built(TextDelta("I look"), START, TextDelta("found"), END, Finished())

    assert deltas == [
        Delta(1, 2, 3, 0, "text", "I look"),
        Delta(1, 2, 3, 1, "thinking", "", RUNS),
        Delta(1, 2, 3, 2, "text", "found"),
        Delta(1, 2, 3, 1, "thinking", "", ENDED_CALL),
    ]
    assert response == Response((Text("I look"), ENDED_CALL, Text("found")))
    assert response.calls == ()


@spec("REUSE-54")
def test_a_running_call_has_its_newest_arguments() -> None:
    changed = UpstreamCallStarted("u", "grep", '{"for":"y"}')
    deltas, response = _built(START, changed, changed, END, Finished())

    runs = UpstreamCall("u", "grep", '{"for":"y"}')
    ran = UpstreamCall("u", "grep", '{"for":"y"}', "line 1", Outcome.OK)
    assert deltas == [Delta(1, 2, 3, 0, "thinking", "", call) for call in (RUNS, runs, ran)]
    assert response == Response((ran,))


@spec("REUSE-55")
def test_a_call_without_an_end_has_an_unknown_outcome() -> None:
    deltas, response = _built(START, Finished())

    unknown = UpstreamCall("u", "grep", '{"for":"x"}', UPSTREAM_CUT, Outcome.UNKNOWN)
    assert [delta.call for delta in deltas] == [RUNS, unknown]
    assert response == Response((unknown,))


def test_a_call_has_one_start_and_one_end_whatever_the_upstream_repeats() -> None:
    deltas, response = _built(START, START, END, UpstreamCallEnded("u", "again", Outcome.ERROR), Finished())

    assert [delta.call for delta in deltas] == [RUNS, ENDED_CALL]
    assert response == Response((ENDED_CALL,))


def test_an_end_without_a_start_is_kept() -> None:
    assert _built(END, Finished())[1] == Response((UpstreamCall("u", "", "{}", "line 1", Outcome.OK),))


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ({}, [RUNS, ENDED_CALL]),
        ({0: RUNS}, [ENDED_CALL]),
        ({0: ENDED_CALL}, []),
    ],
)
def test_a_resumed_response_emits_only_new_deltas(
    shown: dict[int, Words], expected: list[UpstreamCall]
) -> None:
    builder = ResponseBuilder(AttemptRef(1, 1, 1), shown)
    deltas = [delta for event in (START, END, Finished()) for delta in builder.add(event)]

    assert [delta.call for delta in deltas] == expected
    assert builder.response() == Response((ENDED_CALL,))


@pytest.mark.parametrize(
    ("shown", "events"),
    [
        ({0: ("text", "hi")}, START),
        ({0: RUNS}, TextDelta("hi")),
        ({0: RUNS}, UpstreamCallStarted("v", "grep", "{}")),
        ({0: RUNS}, Finished()),
    ],
)
def test_a_resumed_response_with_other_calls_is_refused(shown: dict[int, Words], events: ModelEvent) -> None:
    with pytest.raises(ModelForgotError):
        ResponseBuilder(AttemptRef(1, 1, 1), shown).add(events)
