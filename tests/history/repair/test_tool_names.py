"""Tool names: the valid ones, and the nearest name that every provider accepts."""

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
def test_the_nearest_name_is_accepted_everywhere(name: str, nearest: str) -> None:
    assert nearest_name(name) == nearest
    for form in ("anthropic", "openai-chat", "gemini", "bedrock"):
        assert takes_name(nearest, find_format(form).spec.names)


def test_gemini_accepts_dots_and_the_others_do_not() -> None:
    assert takes_name("functions.read", find_format("gemini").spec.names)
    assert not takes_name("functions.read", find_format("openai-chat").spec.names)
    assert not takes_name(None, find_format("anthropic").spec.names)


def test_dotted_names_are_accepted_only_by_native_profiles_of_the_format() -> None:
    gemini = find_format("gemini")
    taken = [
        takes_name("functions.read", names_of(gemini, PROFILES[name])) for name in ("gemini-3", "portable")
    ]
    assert taken == [True, False]
