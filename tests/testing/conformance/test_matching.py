"""Patterns: matches, and the place of a difference."""

from __future__ import annotations

import pytest

from midstream.testing.conformance.matching import difference, fill


@pytest.mark.parametrize(
    ("pattern", "found", "what"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, None),
        ({"a": 1}, {"a": 2}, "a is 2, not 1"),
        ({"a": {"b": 1}}, {"a": {"b": 2}}, "a.b is 2, not 1"),
        ({"a": {"b": 1}}, {"a": 1}, "a is 1 and no object"),
        ({"a": 1}, {}, "a is missing"),
        ({"a": {"$any": True}}, {}, "a is missing"),
        ({"a": {"$any": True}}, {"a": None}, None),
        ({"a": {"$absent": True}}, {}, None),
        ({"a": {"$absent": True}}, {"a": None}, "a is None and must be absent"),
        ({"a": {"$none": True}}, {}, None),
        ({"a": {"$none": True}}, {"a": None}, None),
        ({"a": {"$none": True}}, {"a": 1}, "a is 1 and must be null or absent"),
        ({"a": {"$one_of": [1, "$x"]}}, {"a": 7}, None),
        ({"a": {"$one_of": [1]}}, {"a": 7}, "a is 7, none of [1]"),
        ({"a": {"$at_least": 3}}, {"a": 3}, None),
        ({"a": {"$at_least": 3}}, {"a": "x"}, "a is 'x', not at least 3"),
        ({"a": {"$event_id": True}}, {"a": "3-17"}, None),
        ({"a": {"$event_id": True}}, {"a": "x"}, "a is 'x' and no event id"),
        ({"a": {"$above": "x"}}, {"a": 8}, None),
        ({"a": {"$above": "x", "$capture": "y"}, "b": "$y"}, {"a": 8, "b": 8}, None),
        ({"a": {"$above": "x"}}, {"a": 7}, "a is 7, not above 7"),
        ({"a": "$x"}, {"a": 8}, "a is 8, not 7"),
    ],
)
def test_the_first_difference_is_named(pattern: object, found: object, what: str | None) -> None:
    assert difference(pattern, found, {"x": 7}) == what


def test_names_are_put_in_everywhere() -> None:
    assert fill({"a": ["$x", {"b": "$x"}], "c": "x"}, {"x": 7}) == {"a": [7, {"b": 7}], "c": "x"}
