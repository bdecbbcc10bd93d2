"""Tool names: what is taken, and the nearest name that all take."""

from __future__ import annotations

import pytest

from midstream.history.codecs.format_registry import find_format
from midstream.history.profiles import PROFILES
from midstream.history.repair.tool_names import names_of, nearest_name, takes_name


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("functions.read", "functions_read"),
        (" read file ", "read_file"),
        ("x" * 140, "x" * 64),
        ("1st", "_1st"),
    ],
)
def test_the_nearest_name_is_taken_everywhere(name: str, nearest: str) -> None:
    assert nearest_name(name) == nearest
    for form in ("anthropic", "openai-chat", "gemini", "bedrock"):
        assert takes_name(nearest, find_format(form).spec.names)


def test_gemini_takes_dots_and_the_others_do_not() -> None:
    assert takes_name("functions.read", find_format("gemini").spec.names)
    assert not takes_name("functions.read", find_format("openai-chat").spec.names)
    assert not takes_name(None, find_format("anthropic").spec.names)


def test_only_those_who_speak_a_format_take_its_dotted_names() -> None:
    gemini = find_format("gemini")
    taken = [
        takes_name("functions.read", names_of(gemini, PROFILES[name])) for name in ("gemini-3", "portable")
    ]
    assert taken == [True, False]
