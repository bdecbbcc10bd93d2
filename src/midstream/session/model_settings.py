"""Settings for an answer (sampling, limits, format, a forced tool), independent of dialects.

Settings are not part of a conversation, and do not affect reuse. A model declares the accepted ones (`grants`); the
caller is informed of the others.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
from msgspec import Struct

Json = dict[str, Any]

ANY_TOOL = ""
"""Value of `forced_tool` for any tool."""

_REASONING = re.compile(r"o\d|gpt-[5-9](?!-chat)")
"""Names of OpenAI's models that accept an effort and refuse sampling settings."""
_TAKES_EFFORT = re.compile(
    r"gpt-oss|claude-opus-4-[5-9]|claude-sonnet-4-[6-9]|claude-(opus|sonnet|haiku)-[5-9]"
)
"""Names of other models that accept an effort; most APIs refuse one for any other model."""
_TAKES_SCHEMA = re.compile(
    r"claude-opus-4-[1-9]|claude-(sonnet|haiku)-4-[5-9]|claude-(opus|sonnet|haiku)-[5-9]"
)
"""Names of Anthropic's models that can answer by a schema."""


class ModelSettings(Struct, frozen=True):
    """Settings for an answer; a default value requests nothing.

    Args:
        temperature, top_p, top_k, seed, frequency_penalty, presence_penalty: Sampling settings.
        tokens_max: Greatest number of tokens of the answer.
        stop: Texts before which an answer ends.
        response_format: The form of the answer, as the Responses API has it (`text.format`), such as
            `{"type": "json_schema", "name": "…", "schema": {…}}`.
        forced_tool: The name of a tool that must be called; `ANY_TOOL` for one of them.
        parallel_calls: Whether one response may have several calls.
        effort: The amount of thinking, in the provider's term, such as `low`, `medium` or `high`.
        store: Whether the provider may keep the response.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    tokens_max: int | None = None
    stop: tuple[str, ...] = ()
    response_format: Mapping[str, Any] | None = None
    forced_tool: str | None = None
    parallel_calls: bool | None = None
    effort: str | None = None
    store: bool | None = None

    def only(self, grants: Collection[str]) -> ModelSettings:
        """Return the settings whose names are in `grants`."""
        return ModelSettings(
            **{name: value for name, value in msgspec.structs.asdict(self).items() if name in grants}
        )


DEFAULT_SETTINGS = ModelSettings()
DRAWING = frozenset({"temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty"})
"""The sampling settings."""
STRICT = "strict"
"""Name in `grants` for the `strict` field of a tool (`ToolSpec`), which is not a setting."""
_OF_ALL = frozenset(
    {"temperature", "top_p", "tokens_max", "forced_tool", "parallel_calls", "effort", "store", STRICT}
)
CHAT_GRANTS = _OF_ALL | {"seed", "frequency_penalty", "presence_penalty", "stop", "response_format"}
RESPONSES_GRANTS = _OF_ALL | {"response_format"}
MESSAGES_GRANTS = _OF_ALL | {"top_k", "stop", "response_format"}
"""Settings for which each API has a field."""
CHAT_NAMES = {
    "response_format": "response_format",
    "forced_tool": "tool_choice",
    "parallel_calls": "parallel_tool_calls",
    "effort": "reasoning_effort",
    STRICT: "tools",
}
RESPONSES_NAMES = {
    "tokens_max": "max_output_tokens",
    "response_format": "text",
    "forced_tool": "tool_choice",
    "parallel_calls": "parallel_tool_calls",
    "effort": "reasoning",
    STRICT: "tools",
}
MESSAGES_NAMES = {
    "tokens_max": "max_tokens",
    "stop": "stop_sequences",
    "forced_tool": "tool_choice",
    "parallel_calls": "tool_choice",
    "response_format": "output_config",
    "effort": "output_config",
    STRICT: "tools",
}
"""Fields of the Messages API with another name than the setting."""


def select_granted(
    grants: frozenset[str], model: str, extra: Mapping[str, object], names: Mapping[str, str]
) -> frozenset[str]:
    """Return the names of the settings that a server accepts.

    Args:
        grants: Settings with a field in its API.
        model: Its model; OpenAI's reasoning models refuse some settings.
        extra: Fields of every request, which replace settings.
        names: The fields that have another name than the setting.
    """
    fixed = {wish for wish in grants if names.get(wish, wish) in extra}
    name = model.rpartition("/")[2]
    reasons = _REASONING.match(name) is not None
    refused = DRAWING | {"stop"} if reasons else frozenset[str]()
    if not (reasons or _TAKES_EFFORT.match(name)):
        refused |= {"effort"}
    if name.startswith("claude-") and not _TAKES_SCHEMA.match(name):
        refused |= {"response_format", STRICT}
    return grants - fixed - refused


def chat_fields(settings: ModelSettings, *, limit: str = "max_tokens") -> Json:
    """Return the settings as fields of Chat Completions; `limit` is the server's field for `tokens_max`."""
    fields: Json = {
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "seed": settings.seed,
        "frequency_penalty": settings.frequency_penalty,
        "presence_penalty": settings.presence_penalty,
        limit: settings.tokens_max,
        "stop": list(settings.stop) or None,
        "parallel_tool_calls": settings.parallel_calls,
        "reasoning_effort": settings.effort,
    }
    if settings.response_format is not None:
        form = dict(settings.response_format)
        kind = form.pop("type")
        fields["response_format"] = {"type": kind, kind: form} if form else {"type": kind}
    if settings.forced_tool is not None:
        named = {"type": "function", "function": {"name": settings.forced_tool}}
        fields["tool_choice"] = named if settings.forced_tool else "required"
    return _without_none(fields)


def responses_fields(settings: ModelSettings) -> Json:
    """Return the settings as fields of the Responses API."""
    fields: Json = {
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "max_output_tokens": settings.tokens_max,
        "text": None if settings.response_format is None else {"format": dict(settings.response_format)},
        "parallel_tool_calls": settings.parallel_calls,
        "reasoning": None if settings.effort is None else {"effort": settings.effort},
    }
    if settings.forced_tool is not None:
        named = {"type": "function", "name": settings.forced_tool}
        fields["tool_choice"] = named if settings.forced_tool else "required"
    return _without_none(fields)


def messages_fields(settings: ModelSettings) -> Json:
    """Return the settings as fields of Anthropic's Messages API."""
    fields: Json = {
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": settings.top_k,
        "max_tokens": settings.tokens_max,
        "stop_sequences": list(settings.stop) or None,
    }
    if settings.forced_tool is not None:
        named = {"type": "tool", "name": settings.forced_tool}
        fields["tool_choice"] = named if settings.forced_tool else {"type": "any"}
    if settings.parallel_calls is not None:
        choice = fields.get("tool_choice", {"type": "auto"})
        fields["tool_choice"] = {**choice, "disable_parallel_tool_use": not settings.parallel_calls}
    form = settings.response_format or {}
    schema = {"type": "json_schema", "schema": form["schema"]} if "schema" in form else None
    output = _without_none({"effort": settings.effort, "format": schema})
    fields["output_config"] = output or None
    return _without_none(fields)


def _without_none(fields: Json) -> Json:
    return {name: value for name, value in fields.items() if value is not None}
