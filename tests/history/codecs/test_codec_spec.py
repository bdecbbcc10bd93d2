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


def test_anything_may_stand_where_a_name_is_expected() -> None:
    assert (name_of(["x"]), type_of({"type": ["x"]}), role_in({}, ["x"])) == ("", "", "other")


def test_two_texts_stand_on_lines_of_their_own() -> None:
    assert (both_words("a", "b"), both_words("", "b"), both_words("a", "")) == ("a\nb", "b", "a")


def test_half_a_character_spelled_as_an_escape_is_replaced_and_a_whole_one_is_joined() -> None:
    assert object_of('{"path": "a\\ud83d"}') == {"path": "a\ufffd"}
    assert object_of('{"path": "a\\ud83d\\ude00"}') == {"path": "a\U0001f600"}
