from __future__ import annotations

import pytest

from midstream.history.codecs.codec_spec import (
    both_words,
    name_of,
    object_in_text,
    object_of,
    role_in,
    type_of,
)


@pytest.mark.parametrize(
    ("arguments", "sent"),
    [
        ("", {}),
        (None, {}),
        ('{"a": 1}', {"a": 1}),
        ('"{\\"a\\": 1}"', {"a": 1}),
        ('{"a": ', {"_raw": '{"a": '}),
        ('{"a": 1}{"a": 1}', {"_raw": '{"a": 1}{"a": 1}'}),
        ([1], {"_raw": "[1]"}),
        ({"a": 1}, None),
    ],
)
def test_arguments_that_should_be_an_object(arguments: object, sent: object) -> None:
    assert object_of(arguments) == sent


@pytest.mark.parametrize(
    ("arguments", "sent"),
    [
        ("{}", None),
        ('{"a": NaN}', None),
        ("", {}),
        ("null", {}),
        ("[1]", {"_raw": "[1]"}),
        ({"a": 1}, {"a": 1}),
    ],
)
def test_arguments_that_should_be_the_text_of_an_object(arguments: object, sent: object) -> None:
    assert object_in_text(arguments) == sent


def test_any_value_is_accepted_in_the_place_of_a_name() -> None:
    assert (name_of(["x"]), type_of({"type": ["x"]}), role_in({}, ["x"])) == ("", "", "other")


def test_two_texts_are_joined_on_separate_lines() -> None:
    assert (both_words("a", "b"), both_words("", "b"), both_words("a", "")) == ("a\nb", "b", "a")


def test_an_escaped_lone_surrogate_is_replaced_and_a_pair_is_joined() -> None:
    assert object_of('{"path": "a\\ud83d"}') == {"path": "a\ufffd"}
    assert object_of('{"path": "a\\ud83d\\ude00"}') == {"path": "a\U0001f600"}
