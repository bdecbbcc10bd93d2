"""Calls that the upstream ran itself."""

from __future__ import annotations

from midstream.history.messages import UPSTREAM_CHARS_MAX, UPSTREAM_CUT, Outcome, UpstreamCall
from midstream.history.upstream_calls import closed, ended, started, words_of

CALL = started("a", "read", '{"path":"x"}')


def test_a_call_starts_and_ends() -> None:
    assert started("a", "read", '{"path":"x"}') == UpstreamCall("a", "read", '{"path":"x"}')
    assert ended(CALL, "words", Outcome.ERROR) == UpstreamCall(
        "a", "read", '{"path":"x"}', "words", Outcome.ERROR
    )


def test_one_that_never_ended_says_so() -> None:
    assert closed(CALL) == ended(CALL, UPSTREAM_CUT, Outcome.UNKNOWN)
    assert closed(ended(CALL, "words", Outcome.OK)) == ended(CALL, "words", Outcome.OK)


def test_what_is_long_is_cut_with_a_mark() -> None:
    long = "x" * (UPSTREAM_CHARS_MAX + 7)
    call = ended(started("a", "write", long), long, Outcome.OK)

    cut = "x" * UPSTREAM_CHARS_MAX + "\n[+7 characters]"
    assert (call.arguments, call.content) == (cut, cut)


def test_half_a_character_can_be_kept() -> None:
    assert ended(started("\ud800", "\ud800", "\ud800"), "\ud800", Outcome.OK) == UpstreamCall(
        "?", "?", "?", "?", Outcome.OK
    )


def test_it_is_told_in_words() -> None:
    assert words_of(CALL) == '[ran elsewhere: read {"path":"x"}; it runs]'
    assert words_of(ended(started("a", "", ""), "gone", Outcome.UNKNOWN)) == (
        "[ran elsewhere: a tool {}; nobody knows how it ended]\ngone"
    )
