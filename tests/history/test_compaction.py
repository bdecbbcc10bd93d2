"""What a model is shown of a conversation that is too long for it."""

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


def asked(words: str) -> UserMessage:
    return UserMessage.of(words)


def told(words: str) -> Step:
    return Step(Response((Text(words),)))


def read(content: str) -> Step:
    return Step(Response((ToolCall("a", "read"),)), (ToolResult("a", content),))


def history(*entries: Entry) -> History:
    return History(entries)


def opened(*parts: Text | File) -> UserMessage:
    return UserMessage((Text(LEFT_OUT), *parts))


@spec("TURN-26")
def test_the_older_half_goes_and_the_rest_stands_under_a_line_that_says_so() -> None:
    long = history(asked("one"), told("x" * 20), asked("two"), told("y" * 20), asked("three"))
    assert next_cut(long) == 3
    assert cut_history(long, 3) == cut_history(long, 2)
    assert cut_history(long, 3) == history(opened(Text("two")), told("y" * 20), asked("three"))


@spec("TURN-26")
def test_within_a_turn_the_message_it_answers_is_still_shown() -> None:
    long = history(asked("do it"), read("x" * 30), read("y" * 30), read("z" * 30))
    assert cut_history(long, 3) == history(opened(Text("do it")), read("z" * 30))
    assert next_cut(long) == 3


@spec("TURN-26")
def test_the_newest_entry_stays_however_long_it_is() -> None:
    assert next_cut(history(asked("do it"), read("x"), read("y" * 1000))) == 2
    assert next_cut(history(asked("do it"), read("y" * 1000))) is None
    assert next_cut(history(asked("y" * 1000))) is None
    assert next_cut(history()) is None


def test_what_was_too_long_by_itself_goes_with_the_next_prompt() -> None:
    """A turn that failed on one giant result, or one giant message, is not the end of its session."""
    assert next_cut(history(asked("do it"), read("y" * 1000), asked("well?"))) == 2
    assert next_cut(history(asked("y" * 1000), asked("well?"))) == 1


def test_a_cut_goes_on_from_the_last_one() -> None:
    entries = [entry for n in range(8) for entry in (asked(f"q{n}"), told("x" * 20))]
    long = history(*entries, asked("and?"))
    first = next_cut(long)
    assert first is not None
    second = next_cut(long, first)
    assert second is not None
    assert 0 < first < second < len(long.entries)


def test_attachments_count_as_a_model_reads_them() -> None:
    photo = UserMessage((File("image/png", data="A" * 10 * FILE_CHARS_MAX),))
    long = history(asked("x"), told("y" * FILE_CHARS_MAX), photo)
    assert next_cut(long) == 2


def test_nothing_is_left_out_by_no_cut() -> None:
    long = history(asked("one"), told("x"))
    assert cut_history(long, 0) is long


def test_a_history_that_begins_with_a_response_has_nobody_to_show() -> None:
    assert cut_history(history(told("a"), told("b")), 1) == history(opened(), told("b"))


@spec("TURN-26")
@given(histories(10), st.sampled_from(sorted(PROFILES)))
def test_whatever_is_cut_is_shorter_ends_and_is_accepted(drawn: History, profile: str) -> None:
    cut, cuts = next_cut(drawn), 0
    while cut is not None:
        assert cut < len(drawn.entries)
        part = cut_history(drawn, cut)
        assert part.entries[-1] == drawn.entries[-1] or cut == len(drawn.entries) - 1
        rendered = render(part, "", profile)
        form = PROFILES[profile].speaks
        assert check(rendered.messages, profile, format=form, system=rendered.system or None) == []
        further = next_cut(drawn, cut)
        assert further is None or further > cut
        cut, cuts = further, cuts + 1
    assert cuts <= len(drawn.entries)


@given(histories(8), st.integers(1, 5), st.integers(1, 8))
def test_what_comes_later_is_shown_after_what_was_shown(drawn: History, cut: int, kept: int) -> None:
    cut = min(cut, kept)
    shorter = History(drawn.entries[:kept])
    if cut < len(shorter.entries):
        before = cut_history(shorter, cut).entries
        assert cut_history(drawn, cut).entries[: len(before)] == before


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_a_call_is_never_parted_from_its_result(cut: int) -> None:
    long = history(asked("q"), read("1"), read("2"), asked("r"), read("3"))
    for entry in cut_history(long, cut).entries:
        assert isinstance(entry, UserMessage) or entry in long.entries
