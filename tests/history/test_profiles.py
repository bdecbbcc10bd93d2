from __future__ import annotations

import pytest

from midstream.errors import UsageError
from midstream.history.codecs.format_registry import find_format
from midstream.history.profiles import PROFILES, both, find_profile, profile_for

NAMES = (
    "anthropic bedrock-claude bedrock-mistral vertex openai-chat responses gemini gemini-3 mistral mistral-v3 "
    "deepseek kimi minimax strict-template portable"
)


def test_every_provider_has_its_profile() -> None:
    assert set(NAMES.split()) <= PROFILES.keys()
    assert {name: profile.name for name, profile in PROFILES.items()} == {name: name for name in PROFILES}


def test_a_profile_is_found_in_common_spellings() -> None:
    assert find_profile("Bedrock") is PROFILES["bedrock-claude"]
    assert find_profile("gemini_3") is PROFILES["gemini-3"]
    with pytest.raises(UsageError, match="anthropic, bedrock-claude"):
        find_profile("nobody")


def test_two_combined_profiles_accept_only_histories_that_both_accept() -> None:
    together = both(PROFILES["anthropic"], PROFILES["mistral-v3"])
    assert (together.id_size_exact, together.blank, together.ids_are_unique) == (9, "white", "list")
    assert both(PROFILES["anthropic"], PROFILES["anthropic"]) == PROFILES["anthropic"]


def test_the_rules_of_a_format_hold_at_every_provider() -> None:
    assert profile_for(find_format("anthropic"), "minimax").blank == "white"
    assert profile_for(find_format("anthropic"), None) is PROFILES["anthropic"]
    assert profile_for(find_format("bedrock"), "bedrock-mistral") is PROFILES["bedrock-mistral"]
    converse = profile_for(find_format("bedrock"), "strict-template")
    assert (converse.blank, converse.system, converse.alternates) == ("white", "apart", "spoken")


def test_each_profile_accepts_its_own_form_of_ids() -> None:
    assert PROFILES["anthropic"].takes_id("toolu_01-a")
    assert not PROFILES["anthropic"].takes_id("functions.run:0")
    assert not PROFILES["openai-chat"].takes_id("x" * 41)
    assert not PROFILES["mistral"].takes_id("null")
    assert not PROFILES["mistral-v3"].takes_id("call_1234")
    assert not PROFILES["kimi"].takes_id("")
    assert not PROFILES["kimi"].takes_id(None)
