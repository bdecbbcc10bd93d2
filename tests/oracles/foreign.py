"""Independent validators: other people's packages, applied to a list.

Each uses one package and returns its objections. `missing` names a package that is not installed, so that a
test can skip with its name.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import functools
import importlib.util
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

from tests.oracles.claude_rules import anthropic
from tests.oracles.openai_rules import chat
from tests.oracles.projection import as_chat
from tests.oracles.verdicts import PROMPTS, with_prompt

Json = dict[str, Any]
Value = Any
Oracle = Callable[[str, list[Any]], list[str]]

PACKAGES = {
    "mistral_common": "mistral_common",
    "mistral_common_v11": "mistral_common",
    "langgraph": "langgraph.prebuilt",
    "anthropic_types": "anthropic",
    "openai_types": "openai",
    "google_types": "google.genai",
    "botocore_shape": "botocore",
    "pydantic_ai_wires": "pydantic_ai",
    "langchain_types": "langchain_core",
}
"""The package of each oracle."""

SPEAKS_FOR = {"mistral_common": "mistral", "mistral_common_v11": "mistral-v3"}
"""Oracles with the rules of one provider, which receive histories repaired for that provider."""

FORMS = {
    "anthropic_types": ("anthropic",),
    "openai_types": ("openai-chat", "openai-responses"),
    "google_types": ("gemini",),
    "botocore_shape": ("bedrock",),
    "pydantic_ai_wires": ("pydantic-ai as chat", "pydantic-ai as anthropic"),
    "langchain_types": ("langchain",),
}
"""The formats that an oracle supports; the others receive every format as chat."""


def missing(oracle: str) -> str:
    """Return the package that an oracle lacks, or nothing."""
    package = PACKAGES[oracle]
    try:
        return "" if importlib.util.find_spec(package) else package
    except ModuleNotFoundError:
        return package


def objections(oracle: str, form: str, messages: list[Any], wire: str = "chat") -> list[str]:
    """Return the objections of an oracle; nothing for formats it does not support.

    `wire` is the model class of pydantic-ai that would send the list.
    """
    if oracle == "pydantic_ai_wires":
        form = f"{form} as {wire}"
    if form not in FORMS.get(oracle, (form,)):
        return []
    ask: Oracle = globals()[f"_{oracle}"]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ask(form, copy.deepcopy(with_prompt(form.partition(" ")[0], messages)))
    except Exception as error:  # noqa: BLE001 - every refusal has another class
        return [f"{oracle}: {type(error).__name__}: {str(error)[:300]}"]


def _mistral_common(form: str, messages: list[Any]) -> list[str]:
    return _mistral(form, messages, "MistralRequestValidatorV13")


def _mistral_common_v11(form: str, messages: list[Any]) -> list[str]:
    return _mistral(form, messages, "MistralRequestValidatorV11")


def _mistral(form: str, messages: list[Any], version: str) -> list[str]:
    requests = import_module("mistral_common.protocol.instruct.request")
    validators = import_module("mistral_common.protocol.instruct.validator")
    shown = {"messages": as_chat(form, messages), "model": "any"}
    request = requests.ChatCompletionRequest.model_validate(shown)
    getattr(validators, version)(mode=validators.ValidationMode.serving).validate_request(request)
    return []


def _langgraph(form: str, messages: list[Any]) -> list[str]:
    shown = import_module("langchain_core.messages").convert_to_messages(as_chat(form, messages))
    import_module("langgraph.prebuilt.chat_agent_executor")._validate_chat_history(shown)
    return []


_TYPES = {
    "anthropic": ("anthropic.types", "MessageParam"),
    "chat": ("openai.types.chat", "ChatCompletionMessageParam"),
    "responses": ("openai.types.responses", "ResponseInputItemParam"),
    "pydantic-ai": ("pydantic_ai.messages", "ModelMessage"),
}
"""The place of the type of one message in each package."""


@functools.cache
def _adapter(kind: str) -> Value:
    module, name = _TYPES[kind]
    message: Value = getattr(import_module(module), name)
    return import_module("pydantic").TypeAdapter(list.__class_getitem__(message))


def _anthropic_types(form: str, messages: list[Any]) -> list[str]:
    del form
    known = [{"role": m["role"], "content": _typed_blocks(m["content"])} for m in messages]
    _read_all(_adapter("anthropic").validate_python(known))
    return []


def _typed_blocks(content: Value) -> Value:
    """Return the message without the blocks that the installed version has no type for."""
    if isinstance(content, str):
        return content
    unknown = ("container_upload", "mcp_tool_use", "mcp_tool_result", "fancy")
    return [block for block in content if block.get("type") not in unknown]


def _openai_types(form: str, messages: list[Any]) -> list[str]:
    if form == "openai-chat":
        kept = [{key: value for key, value in m.items() if key != "reasoning_content"} for m in messages]
        _read_all(_adapter("chat").validate_python(kept))
    else:
        _read_all(_adapter("responses").validate_python(messages))
    return []


def _read_all(value: Value) -> None:
    """Read iterables completely: pydantic validates them only when they are iterated."""
    if isinstance(value, dict):
        for item in value.values():
            _read_all(item)
    elif not isinstance(value, str | bytes | int | float | bool | None):
        for item in value:
            _read_all(item)


def _google_types(form: str, messages: list[Any]) -> list[str]:
    del form

    contents = [import_module("google.genai.types").Content.model_validate(message) for message in messages]
    curated = import_module("google.genai.chats")._extract_curated_history(contents)
    return [] if len(curated) == len(contents) else ["google_types: curation drops a content"]


@functools.cache
def _converse() -> Value:
    model = import_module("botocore.session").Session().get_service_model("bedrock-runtime")
    shape = model.operation_model("Converse").input_shape
    assert shape is not None
    return shape.members["messages"]


def _botocore_shape(form: str, messages: list[Any]) -> list[str]:
    del form

    report = import_module("botocore.validate").ParamValidator().validate(_with_bytes(messages), _converse())
    return [f"botocore_shape: {report.generate_report()}"] if report.has_errors() else []


def _with_bytes(value: Value) -> Value:
    """Convert base64 to bytes: JSON has none, and Converse needs them."""
    if isinstance(value, dict):
        return {
            key: base64.b64decode(item) if key == "bytes" and isinstance(item, str) else _with_bytes(item)
            for key, item in value.items()
        }
    return [_with_bytes(item) for item in value] if isinstance(value, list) else value


def _langchain_types(form: str, messages: list[Any]) -> list[str]:
    del form

    import_module("langchain_core.messages").messages_from_dict(messages)
    return []


def _pydantic_ai_wires(form: str, messages: list[Any]) -> list[str]:
    """Return its own mapping to a wire, and the refusals there."""
    sent = _adapter("pydantic-ai").validate_python(messages)
    wires = asyncio.run(_mapped(sent))
    faults = chat(wires["chat"], "stored") if form.endswith("chat") else anthropic(wires["anthropic"])
    return [f"{form}: {fault}" for fault in faults]


async def _mapped(sent: Value) -> dict[str, Any]:

    parameters = import_module("pydantic_ai.models").ModelRequestParameters()
    claude = import_module("pydantic_ai.models.anthropic").AnthropicModel(
        "claude-sonnet-4-5",
        provider=import_module("pydantic_ai.providers.anthropic").AnthropicProvider(api_key="none"),
    )
    gpt = import_module("pydantic_ai.models.openai").OpenAIChatModel(
        "gpt-4o", provider=import_module("pydantic_ai.providers.openai").OpenAIProvider(api_key="none")
    )
    _, to_anthropic = await claude._map_message(sent, parameters, {})
    to_chat = await gpt._map_messages(sent, parameters)
    return {"anthropic": to_anthropic, "chat": to_chat}


__all__ = ["FORMS", "PACKAGES", "PROMPTS", "SPEAKS_FOR", "missing", "objections"]
