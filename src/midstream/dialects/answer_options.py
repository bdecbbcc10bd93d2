"""Options of an answer, read from a request of each API.

An invalid option does not cause a refusal: the response lists it as ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from msgspec import Struct

from midstream.dialects.request_fields import Fields, field
from midstream.history.codecs.codec_spec import Value
from midstream.history.messages import ToolSpec
from midstream.session.model_settings import ANY_TOOL, DEFAULT_SETTINGS, STRICT, ModelSettings

_UNSAID: Value = object()
"""Result of a reader for a field whose value is the default."""
STRICT_FIELD = "tools.strict"
"""Name of a function's `strict` in the list of ignored fields."""
_ANY = ("required", "any")
_ONE = ("function", "tool", "custom")


class AnswerOptions(Struct, frozen=True):
    """Options of an answer, with the client application's fields that set them."""

    settings: ModelSettings = DEFAULT_SETTINGS
    fields: Mapping[str, str] = {}
    odd: tuple[str, ...] = ()
    """Fields with an unknown value."""

    def find_refused(self, grants: Collection[str]) -> tuple[str, ...]:
        """Return the client application's fields that the model does not support."""
        return tuple(name for wish, name in self.fields.items() if wish not in grants)


def read_options(
    fields: Fields, known: Mapping[str, str | tuple[str, ...]], tools: Collection[ToolSpec]
) -> AnswerOptions:
    """Read the options of a request.

    Args:
        fields: Fields of the request.
        known: The setting, or settings, of each field of the API.
        tools: The available tools.
    """
    settings: dict[str, Any] = {}
    names: dict[str, str] = {}
    odd: list[str] = []
    for name in fields:
        wish = known.get(name)
        if wish is None:
            continue
        value = field(fields, name, object)
        wishes = wish if isinstance(wish, tuple) else (wish,)
        for each in wishes:
            found = _read_tool_choice(value, tools) if each == "forced_tool" else _READERS[each](value)
            if found is None:
                odd.append(name)
            elif found is not _UNSAID and (tools or each != "parallel_calls"):
                settings[each], names[each] = found, name
    if any(tool.strict for tool in tools):
        names[STRICT] = STRICT_FIELD
    return AnswerOptions(ModelSettings(**settings), names, tuple(odd))


def _number(value: Value) -> Value:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _whole_number(value: Value) -> Value:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _texts(value: Value) -> Value:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        return None
    return tuple(texts) or _UNSAID


def _form(value: Value) -> Value:
    """Read `response_format` of chat completions, or `text` of the Responses API, which contains the same object."""
    if not isinstance(value, dict):
        return None
    form = value.get("format", {"type": "text"}) if "type" not in value else value
    if isinstance(form, dict) and "schema" in form and "name" not in form:
        form = {**form, "name": "answer"}  # Anthropic's schemas have no name, and OpenAI's APIs require one
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "text":
        return _UNSAID
    if not isinstance(kind, str):
        return None
    inner = form.get(kind)
    return {"type": kind, **inner} if isinstance(inner, dict) else form


def _false(value: Value) -> Value:
    """Read a field that is true by default."""
    return None if not isinstance(value, bool) else _UNSAID if value else False


def _parallel_calls(value: Value) -> Value:
    """Read `parallel_tool_calls` of OpenAI's APIs, or the `tool_choice` of Anthropic's."""
    if isinstance(value, dict):
        value = value.get("disable_parallel_tool_use") is not True
    return _false(value)


def _effort(value: Value) -> Value:
    """Read `reasoning_effort`, or the same field in `reasoning` or `output_config`."""
    word = value.get("effort") if isinstance(value, dict) else value
    if isinstance(value, dict) and word is None:
        return _UNSAID
    return word if isinstance(word, str) else None


def _read_tool_choice(value: Value, tools: Collection[ToolSpec]) -> Value:
    """Read a `tool_choice` of any API. A choice that forbids calls was already read with the tools."""
    kind = value.get("type") if isinstance(value, dict) else value
    if kind in ("auto", "none"):
        return _UNSAID
    if kind in _ANY:
        return ANY_TOOL if tools else None
    if not (isinstance(value, dict) and kind in _ONE):
        return None
    inner = value.get("function", value.get("custom"))
    name = (inner if isinstance(inner, dict) else value).get("name")
    return name if name in {tool.name for tool in tools} else None


_READERS: Mapping[str, Callable[[Value], Value]] = {
    "temperature": _number,
    "top_p": _number,
    "top_k": _whole_number,
    "seed": _whole_number,
    "frequency_penalty": _number,
    "presence_penalty": _number,
    "tokens_max": _whole_number,
    "stop": _texts,
    "response_format": _form,
    "parallel_calls": _parallel_calls,
    "effort": _effort,
    "store": _false,
}
