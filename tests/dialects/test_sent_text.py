"""Shown text, compared with that of the whole response."""

from __future__ import annotations

import pytest

from midstream.dialects.sent_text import RepeatedWords, Words, merge, part_of, rest_of, words_of
from midstream.history.messages import Response, Text, Thinking, ToolCall


@pytest.mark.parametrize(
    ("shown", "rest"),
    [
        ([], [("thinking", "hm"), ("text", "Hello you")]),
        ([("thinking", "h")], [("thinking", "m"), ("text", "Hello you")]),
        ([("thinking", "hm"), ("text", "Hello ")], [("text", "you")]),
        ([("thinking", "hm"), ("text", "Hello you")], []),
        ([("thinking", "other")], None),
        ([("text", "Hello")], None),
        ([("thinking", "hm"), ("text", "Hello you"), ("text", "!")], None),
    ],
)
def test_the_rest_follows_the_shown_text(shown: list[Words], rest: list[Words] | None) -> None:
    whole = Response((Thinking("hm"), Text("Hello "), ToolCall("c", "look"), Text("you")))
    assert rest_of(merge(words_of(whole)), shown) == rest


def test_shown_text_becomes_parts_again() -> None:
    assert (part_of("thinking", "a"), part_of("text", "b")) == (Thinking("a"), Text("b"))


def test_text_that_a_client_has_is_skipped_until_it_differs() -> None:
    same = RepeatedWords([("thinking", "hm"), ("text", "Hello you")])
    assert [same.take("thinking", "hm"), same.take("text", "Hello ")] == [([], False), ([], False)]
    assert [same.is_over, same.take("text", "you there"), same.is_over] == [
        False,
        ([("text", " there")], False),
        True,
    ]
    other = RepeatedWords([("text", "Hello you")])
    assert other.take("text", "Hello ") == ([], False)
    assert other.take("text", "me") == ([("text", "Hello me")], True)
    assert (other.is_over, merge(other.passed)) == (True, [("text", "Hello me")])
