"""Model settings, independent of a dialect, and in the fields of each API."""

from __future__ import annotations

from typing import Any

import pytest

from midstream.session.model_settings import (
    ANY_TOOL,
    CHAT_GRANTS,
    CHAT_NAMES,
    DEFAULT_SETTINGS,
    MESSAGES_GRANTS,
    MESSAGES_NAMES,
    RESPONSES_GRANTS,
    RESPONSES_NAMES,
    ModelSettings,
    chat_fields,
    messages_fields,
    responses_fields,
    select_granted,
)

FORM = {"type": "json_schema", "name": "place", "schema": {"type": "object"}, "strict": True}
ALL = ModelSettings(
    temperature=0.0,
    top_p=0.5,
    top_k=3,
    seed=0,
    frequency_penalty=0.1,
    presence_penalty=0.2,
    tokens_max=9,
    stop=("END",),
    response_format=FORM,
    forced_tool="look",
    parallel_calls=False,
    effort="low",
    store=False,
)


def test_each_api_receives_the_settings_it_has_a_field_for() -> None:
    nested = {"name": "place", "schema": {"type": "object"}, "strict": True}
    assert chat_fields(ALL.only(CHAT_GRANTS)) == {
        "temperature": 0.0,
        "top_p": 0.5,
        "seed": 0,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.2,
        "max_tokens": 9,
        "stop": ["END"],
        "response_format": {"type": "json_schema", "json_schema": nested},
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        "parallel_tool_calls": False,
        "reasoning_effort": "low",
    }
    assert responses_fields(ALL.only(RESPONSES_GRANTS)) == {
        "temperature": 0.0,
        "top_p": 0.5,
        "max_output_tokens": 9,
        "text": {"format": FORM},
        "tool_choice": {"type": "function", "name": "look"},
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low"},
    }
    assert messages_fields(ALL.only(MESSAGES_GRANTS)) == {
        "temperature": 0.0,
        "top_p": 0.5,
        "top_k": 3,
        "max_tokens": 9,
        "stop_sequences": ["END"],
        "tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True},
        "output_config": {
            "effort": "low",
            "format": {"type": "json_schema", "schema": {"type": "object"}},
        },
    }


def test_default_settings_add_nothing() -> None:
    assert [
        chat_fields(DEFAULT_SETTINGS),
        responses_fields(DEFAULT_SETTINGS),
        messages_fields(DEFAULT_SETTINGS),
    ] == [{}, {}, {}]
    assert ALL.only(()) == DEFAULT_SETTINGS


def test_any_tool_and_any_json() -> None:
    settings = ModelSettings(forced_tool=ANY_TOOL, response_format={"type": "json_object"}, tokens_max=9)
    assert chat_fields(settings, limit="max_completion_tokens") == {
        "max_completion_tokens": 9,
        "response_format": {"type": "json_object"},
        "tool_choice": "required",
    }
    assert responses_fields(settings)["tool_choice"] == "required"
    assert messages_fields(settings)["tool_choice"] == {"type": "any"}


@pytest.mark.parametrize(
    ("model", "extra", "missing"),
    [
        ("qwen3", {}, {"effort"}),
        ("qwen3", {"temperature": 1, "response_format": None}, {"temperature", "response_format", "effort"}),
        ("gpt-4o", {}, {"effort"}),
        ("gpt-5-chat-latest", {}, {"effort"}),
        ("openai/gpt-oss-120b", {}, set()),
        ("gpt-5-mini", {}, {"temperature", "top_p", "frequency_penalty", "presence_penalty", "stop"}),
        ("openai/o3", {}, {"temperature", "top_p", "frequency_penalty", "presence_penalty", "stop"}),
    ],
)
def test_settings_fixed_by_configuration_or_refused_by_reasoning_models_are_not_supported(
    model: str, extra: dict[str, Any], missing: set[str]
) -> None:
    assert CHAT_GRANTS - select_granted(CHAT_GRANTS, model, extra, CHAT_NAMES) == missing


def test_a_setting_is_recognised_under_a_configured_field_name() -> None:
    extra = {"max_output_tokens": 5, "text": {}}
    assert RESPONSES_GRANTS - select_granted(RESPONSES_GRANTS, "m", extra, RESPONSES_NAMES) == {
        "tokens_max",
        "response_format",
        "effort",
    }


@pytest.mark.parametrize(
    ("model", "missing"),
    [
        ("claude-3-5-sonnet-latest", {"effort", "response_format", "strict"}),
        ("claude-sonnet-4-5", {"effort"}),
        ("claude-opus-4-6", set()),
        ("claude-sonnet-5", set()),
        ("agent", {"effort"}),
    ],
)
def test_an_anthropic_model_receives_a_schema_and_an_effort_only_where_it_supports_them(
    model: str, missing: set[str]
) -> None:
    assert MESSAGES_GRANTS - select_granted(MESSAGES_GRANTS, model, {}, MESSAGES_NAMES) == missing
