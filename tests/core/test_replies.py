"""From what a model says to the reply that comes of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from midstream.core.messages import Call, Finish, Reply, Text, Thinking, Usage
from midstream.core.records import Delta, encode
from midstream.core.replies import (
    DELTA_CHARS_MAX,
    CallRequested,
    Finished,
    ModelEvent,
    ReplyBuilder,
    TextDelta,
    ThinkingDelta,
    merge_deltas,
)

words = st.text(st.characters(exclude_categories=[]), max_size=5)
events = st.lists(
    st.one_of(
        st.builds(TextDelta, words),
        st.builds(ThinkingDelta, words, st.none() | words),
        st.builds(CallRequested, words, words, words),
    ),
    max_size=12,
)


def _built(*said: ModelEvent) -> tuple[list[Delta], Reply | None]:
    builder = ReplyBuilder(1, 2, 3)
    deltas = [delta for event in said for delta in builder.add(event)]
    return deltas, builder.reply()


def test_a_reply_is_made_of_what_was_said_in_order() -> None:
    deltas, reply = _built(
        ThinkingDelta("let me "),
        ThinkingDelta("see", signature="sig"),
        TextDelta("I will "),
        TextDelta("look."),
        CallRequested("a", "read", '{"path": "x"}'),
        Finished(Finish.CALLS, "scripted", Usage(1, 2)),
    )
    assert deltas == [
        Delta(1, 2, 3, 0, "thinking", "let me "),
        Delta(1, 2, 3, 0, "thinking", "see"),
        Delta(1, 2, 3, 1, "text", "I will "),
        Delta(1, 2, 3, 1, "text", "look."),
    ]
    assert reply == Reply(
        (Thinking("let me see", "sig"), Text("I will look."), Call("a", "read", '{"path": "x"}')),
        Finish.CALLS,
        "scripted",
        Usage(1, 2),
    )


def test_a_reply_that_was_not_finished_is_none() -> None:
    assert _built(TextDelta("half a"))[1] is None


def test_a_reply_of_nothing_is_none() -> None:
    assert _built(Finished())[1] is None
    assert _built(TextDelta(" \n"), ThinkingDelta(""), Finished())[1] is None


def test_a_finish_is_noticed() -> None:
    builder = ReplyBuilder(1, 1, 1)
    assert not builder.is_finished
    builder.add(Finished())
    assert builder.is_finished


@given(events)
def test_readers_who_join_the_deltas_read_what_the_reply_says(said: list[ModelEvent]) -> None:
    deltas, reply = _built(*said, Finished())
    texts: dict[int, str] = {}
    for delta in deltas:
        texts[delta.part] = texts.get(delta.part, "") + delta.text
    if reply is not None:
        parts = {
            number: part.text
            for number, part in enumerate(reply.parts)
            if not isinstance(part, Call) and part.text
        }
        assert texts == parts


@given(events)
def test_whatever_a_model_says_can_be_stored(said: list[ModelEvent]) -> None:
    """Providers cut an emoji in two: half of it has no UTF-8 form."""
    deltas, reply = _built(*said, Finished())
    for delta in deltas:
        encode(delta)
    if reply is not None:
        for call in reply.calls:
            assert call.id
            (call.id + call.name + call.arguments).encode()


@given(events)
def test_merging_deltas_changes_no_word_and_never_crosses_parts(said: list[ModelEvent]) -> None:
    deltas, _ = _built(*said)
    merged = merge_deltas(deltas)
    for part in {delta.part for delta in deltas}:
        assert "".join(d.text for d in merged if d.part == part) == "".join(
            d.text for d in deltas if d.part == part
        )
    assert [delta.part for delta in merged] == sorted({delta.part for delta in deltas})


def test_no_delta_outgrows_a_frame() -> None:
    deltas, _ = _built(TextDelta("x" * (2 * DELTA_CHARS_MAX + 1)))
    assert [len(delta.text) for delta in deltas] == [DELTA_CHARS_MAX, DELTA_CHARS_MAX, 1]
    assert [len(delta.text) for delta in merge_deltas(deltas)] == [DELTA_CHARS_MAX, DELTA_CHARS_MAX, 1]
