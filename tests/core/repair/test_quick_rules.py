from __future__ import annotations

import pytest

from midstream.core.profiles import PROFILES
from midstream.core.repair.quick_rules import ANSWER, DOUBTED, MIXED, SAID, Rules, is_signature, says


def test_white_space_says_nothing() -> None:
    assert [says(words) for words in ("x", " x", "", " \n", None, 7)] == [
        True,
        True,
        False,
        False,
        False,
        False,
    ]


def test_a_signature_is_of_this_provider_and_stands_once() -> None:
    seen: list[str] = []
    assert is_signature("EqQB", seen)
    assert not is_signature("EqQB", seen)
    assert not is_signature("gAAAAABforeign", seen)
    assert not is_signature(None, seen)
    assert seen == ["EqQB"]


def test_words_behind_results_are_a_matter_of_the_profile() -> None:
    rules = Rules("anthropic", PROFILES["anthropic"])
    assert rules.answers([], has_words=True) == SAID
    assert rules.answers(["a"], has_words=False) == (ANSWER, ["a"])
    assert rules.answers(["a"], has_words=True) == (MIXED, ["a"])
    assert Rules("anthropic", PROFILES["minimax"]).answers(["a"], has_words=True) == DOUBTED


def test_thinking_of_another_model_is_foreign_only_to_those_who_sign() -> None:
    rules = Rules("anthropic", PROFILES["anthropic"], "claude-a")
    assert [rules.is_foreign(model) for model in (None, "claude-a", "claude-b", "gpt")] == [
        False,
        False,
        True,
        True,
    ]
    assert not Rules("openai-chat", PROFILES["kimi"], "kimi").is_foreign("gpt")


@pytest.mark.parametrize(
    ("profile", "may_stand"),
    [
        ("pydantic-ai", (True, True, True, True)),
        ("mistral", (True, False, True, False)),
        ("strict-template", (True, False, False, False)),
    ],
)
def test_system_prompts_among_a_users_words_stand_where_the_profile_takes_them(
    profile: str, may_stand: tuple[bool, ...]
) -> None:
    rules = Rules("pydantic-ai", PROFILES[profile])
    first = rules.tells(is_after_words=False, is_after_result=False)
    rules.has_begun = True
    later = rules.tells(is_after_words=False, is_after_result=False)
    behind = [rules.tells(is_after_words=not result, is_after_result=result) for result in (False, True)]
    assert (first, later, *behind) == may_stand
