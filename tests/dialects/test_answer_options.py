"""The client application's options are read from each API's fields; invalid ones are named, and refuse nothing."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from midstream.dialects.answer_options import AnswerOptions
from midstream.dialects.anthropic import read_messages
from midstream.dialects.dialect import Asked
from midstream.dialects.openai_chat import read_chat
from midstream.dialects.openai_responses_api import read_responses
from midstream.dialects.request_fields import fields_of
from midstream.session.model_settings import (
    ANY_TOOL,
    ModelSettings,
    chat_fields,
    messages_fields,
    responses_fields,
)

Json = dict[str, Any]

SCHEMA: Json = {"type": "object"}
TOOLS: list[Json] = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
FORM: Json = {"type": "json_schema", "name": "answer", "schema": SCHEMA}
ALL = ModelSettings(
    0.5, 0.9, 3, 7, 0.1, 0.2, 99, ("a", "b"), FORM, "look", parallel_calls=False, effort="low"
)


def chat(**fields: Any) -> Asked:  # noqa: ANN401 - any JSON of a body
    return read_chat(
        fields_of(msgspec.json.encode({"messages": [{"role": "user", "content": "a"}], **fields}))
    )


def responses(**fields: Any) -> Asked:  # noqa: ANN401 - any JSON of a body
    return read_responses(fields_of(msgspec.json.encode({"input": "a", **fields})))


def messages(**fields: Any) -> Asked:  # noqa: ANN401 - any JSON of a body
    return read_messages(
        fields_of(msgspec.json.encode({"messages": [{"role": "user", "content": "a"}], **fields}))
    )


def test_options_written_for_an_api_are_read_back() -> None:
    for read, fields in (
        (chat, chat_fields(ALL)),
        (responses, responses_fields(ALL)),
        (messages, messages_fields(ALL)),
    ):
        wished = read(tools=TOOLS, **fields).wished
        assert wished.settings == ALL.only(wished.fields)
        assert (set(wished.fields.values()), wished.odd) == (set(fields), ())


def test_an_unsupported_option_is_reported_by_its_field() -> None:
    wished = chat(temperature=1, max_completion_tokens=5, stop="END").wished
    assert wished == AnswerOptions(
        ModelSettings(temperature=1, tokens_max=5, stop=("END",)),
        {"temperature": "temperature", "tokens_max": "max_completion_tokens", "stop": "stop"},
    )
    assert wished.find_refused({"stop"}) == ("temperature", "max_completion_tokens")


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "auto"},
        {"tool_choice": "none"},
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        {"response_format": {"type": "text"}},
        {"stop": []},
        {"temperature": None},
    ],
)
def test_a_request_for_the_default_is_not_an_option(fields: Json) -> None:
    asked = chat(tools=TOOLS, **fields)
    assert (asked.wished, asked.ignored) == (AnswerOptions(), ())
    assert responses(text={"format": {"type": "text"}}).wished == AnswerOptions()
    assert responses(text={"verbosity": "low"}).wished == AnswerOptions()


@pytest.mark.parametrize("choice", ["required", "any", {"type": "any"}, {"type": "required"}])
def test_a_call_of_any_tool_can_be_required(choice: object) -> None:
    assert chat(tools=TOOLS, tool_choice=choice).wished.settings == ModelSettings(forced_tool=ANY_TOOL)
    assert chat(tool_choice=choice).ignored == ("tool_choice",)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": "hot"},
        {"temperature": True},
        {"max_tokens": 1.5},
        {"stop": [1]},
        {"response_format": "json"},
        {"response_format": {"type": 7}},
        {"tool_choice": {"type": "function", "function": {"name": "other"}}},
        {"tool_choice": {"type": "allowed_tools", "tools": []}},
        {"tool_choice": 7},
    ],
)
def test_invalid_options_are_named_and_refuse_nothing(fields: Json) -> None:
    asked = chat(tools=TOOLS, **fields)
    assert (asked.wished.settings, asked.ignored) == (ModelSettings(), tuple(fields))


def test_an_unknown_field_is_named() -> None:
    assert chat(service_tier="flex", logit_bias={"1": 2}, model="m").ignored == ("logit_bias", "service_tier")
    assert responses(include=["x"], client_metadata={"a": "b"}).ignored == ("include",)
    assert messages(context_management={}, max_tokens=5).ignored == ("context_management",)


def test_the_request_not_to_store_is_an_option() -> None:
    assert chat(store=False).wished.settings.store is False
    assert responses(store=False).wished.settings.store is False
    assert chat(store=True).wished.fields == chat().wished.fields == {}


def test_parallel_calls_are_forbidden_in_each_api() -> None:
    read = [
        chat(parallel_tool_calls=False, tools=TOOLS),
        responses(parallel_tool_calls=False, tools=TOOLS),
        messages(tool_choice={"type": "auto", "disable_parallel_tool_use": True}, tools=TOOLS),
    ]
    assert [each.wished.settings.parallel_calls for each in read] == [False] * 3
    assert chat(parallel_tool_calls=False).wished.settings.parallel_calls is None  # no tool can be called
