"""The part of a conversation that is too long for a model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.history.compaction import FILE_CHARS_MAX, LEFT_OUT, cut_history, next_cut
from midstream.history.messages import (
    Entry,
    File,
    History,
    Response,
    Step,
    Text,
    ToolCall,
    ToolResult,
    UserMessage,
)
from midstream.history.operations import check_by_name as check
from midstream.history.profiles import PROFILES
from midstream.history.rendering import render
from tests.history.histories import histories
from tests.spec import spec


def user_entry(words: str) -> UserMessage:
    return UserMessage.of(words)


def text_step(words: str) -> Step:
    return Step(Response((Text(words),)))


def call_step(content: str) -> Step:
    return Step(Response((ToolCall("a", "read"),)), (ToolResult("a", content),))


def history(*entries: Entry) -> History:
    return History(entries)


def opening_entry(*parts: Text | File) -> UserMessage:
    return UserMessage((Text(LEFT_OUT), *parts))


@spec("TURN-26")
def test_the_older_half_is_replaced_by_a_line_that_states_it() -> None:
    long = history(
        user_entry("one"), text_step("x" * 20), user_entry("two"), text_step("y" * 20), user_entry("three")
    )
    assert next_cut(long) == 3
    assert cut_history(long, 3) == cut_history(long, 2)
    assert cut_history(long, 3) == history(
        opening_entry(Text("two")), text_step("y" * 20), user_entry("three")
    )


@spec("TURN-26")
def test_within_a_turn_the_answered_message_is_still_shown() -> None:
    long = history(user_entry("do it"), call_step("x" * 30), call_step("y" * 30), call_step("z" * 30))
    assert cut_history(long, 3) == history(opening_entry(Text("do it")), call_step("z" * 30))
    assert next_cut(long) == 3


@spec("TURN-26")
def test_the_newest_entry_stays_however_long_it_is() -> None:
    assert next_cut(history(user_entry("do it"), call_step("x"), call_step("y" * 1000))) == 2
    assert next_cut(history(user_entry("do it"), call_step("y" * 1000))) is None
    assert next_cut(history(user_entry("y" * 1000))) is None
    assert next_cut(history()) is None


def test_an_oversized_entry_is_left_out_with_the_next_prompt() -> None:
    """A turn that failed on one oversized result or message must not end its session."""
    assert next_cut(history(user_entry("do it"), call_step("y" * 1000), user_entry("well?"))) == 2
    assert next_cut(history(user_entry("y" * 1000), user_entry("well?"))) == 1


def test_a_cut_continues_from_the_last_one() -> None:
    entries = [entry for n in range(8) for entry in (user_entry(f"q{n}"), text_step("x" * 20))]
    long = history(*entries, user_entry("and?"))
    first = next_cut(long)
    assert first is not None
    second = next_cut(long, first)
    assert second is not None
    assert 0 < first < second < len(long.entries)


def test_attachments_count_with_their_size_for_a_model() -> None:
    photo = UserMessage((File("image/png", data="A" * 10 * FILE_CHARS_MAX),))
    long = history(user_entry("x"), text_step("y" * FILE_CHARS_MAX), photo)
    assert next_cut(long) == 2


def test_a_cut_of_zero_leaves_nothing_out() -> None:
    long = history(user_entry("one"), text_step("x"))
    assert cut_history(long, 0) is long


def test_a_history_that_begins_with_a_response_is_opened_without_a_message() -> None:
    assert cut_history(history(text_step("a"), text_step("b")), 1) == history(opening_entry(), text_step("b"))


@spec("TURN-26")
@given(histories(10), st.sampled_from(sorted(PROFILES)))
def test_every_cut_is_shorter_and_valid_and_cuts_come_to_an_end(drawn: History, profile: str) -> None:
    cut, cuts = next_cut(drawn), 0
    while cut is not None:
        assert cut < len(drawn.entries)
        part = cut_history(drawn, cut)
        assert part.entries[-1] == drawn.entries[-1] or cut == len(drawn.entries) - 1
        rendered = render(part, "", profile)
        form = PROFILES[profile].format
        assert check(rendered.messages, profile, format=form, system=rendered.system or None) == []
        further = next_cut(drawn, cut)
        assert further is None or further > cut
        cut, cuts = further, cuts + 1
    assert cuts <= len(drawn.entries)


@given(histories(8), st.integers(1, 5), st.integers(1, 8))
def test_later_entries_are_shown_after_the_earlier_ones(drawn: History, cut: int, kept: int) -> None:
    cut = min(cut, kept)
    shorter = History(drawn.entries[:kept])
    if cut < len(shorter.entries):
        before = cut_history(shorter, cut).entries
        assert cut_history(drawn, cut).entries[: len(before)] == before


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_a_call_is_never_separated_from_its_result(cut: int) -> None:
    long = history(user_entry("q"), call_step("1"), call_step("2"), user_entry("r"), call_step("3"))
    for entry in cut_history(long, cut).entries:
        assert isinstance(entry, UserMessage) or entry in long.entries
