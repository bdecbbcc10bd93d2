"""Calls that the upstream ran itself."""

from __future__ import annotations

from midstream.history.messages import UPSTREAM_CHARS_MAX, UPSTREAM_CUT, Outcome, UpstreamCall
from midstream.history.upstream_calls import close_call, end_call, start_call, words_of

CALL = start_call("a", "read", '{"path":"x"}')


def test_a_call_starts_and_ends() -> None:
    assert start_call("a", "read", '{"path":"x"}') == UpstreamCall("a", "read", '{"path":"x"}')
    assert end_call(CALL, "words", Outcome.ERROR) == UpstreamCall(
        "a", "read", '{"path":"x"}', "words", Outcome.ERROR
    )


def test_a_call_without_an_end_has_an_unknown_outcome() -> None:
    assert close_call(CALL) == end_call(CALL, UPSTREAM_CUT, Outcome.UNKNOWN)
    assert close_call(end_call(CALL, "words", Outcome.OK)) == end_call(CALL, "words", Outcome.OK)


def test_a_long_text_is_cut_with_a_mark() -> None:
    long = "x" * (UPSTREAM_CHARS_MAX + 7)
    call = end_call(start_call("a", "write", long), long, Outcome.OK)

    cut = "x" * UPSTREAM_CHARS_MAX + "\n[+7 characters]"
    assert (call.arguments, call.content) == (cut, cut)


def test_lone_surrogates_are_replaced() -> None:
    assert end_call(start_call("\ud800", "\ud800", "\ud800"), "\ud800", Outcome.OK) == UpstreamCall(
        "\ufffd", "\ufffd", "\ufffd", "\ufffd", Outcome.OK
    )


def test_an_upstream_call_is_described_in_text() -> None:
    assert words_of(CALL) == '[ran elsewhere: read {"path":"x"}; it runs]'
    assert words_of(end_call(start_call("a", "", ""), "gone", Outcome.UNKNOWN)) == (
        "[ran elsewhere: a tool {}; nobody knows how it ended]\ngone"
    )
