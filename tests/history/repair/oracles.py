"""Validators by other authors, each used where it is installed.

Every function returns the validator's complaint about a list of messages, or None. Histories of formats that
a validator does not support are converted literally into chat messages first.
"""

# ruff: noqa: ANN401 - a history may hold anything
from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Callable
from typing import Any

Json = dict[str, Any]
Oracle = Callable[[list[Any]], str | None]


def installed(form: str) -> dict[str, Oracle]:
    """Return the validators installed here for this format, by name."""
    found: dict[str, Oracle] = {}
    for name, (forms, make) in _ORACLES.items():
        if form not in forms:
            continue
        try:
            found[name] = make(form)
        except ImportError:
            continue
    return found


def as_chat(form: str, messages: list[Any]) -> list[Json]:
    """Convert a history to chat messages, message by message, without any repair."""
    return [item for message in messages for item in _READERS[form](message)]


def _call(call_id: Any, name: Any, arguments: Any) -> Json:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def _response(text: str, calls: list[Json]) -> Json:
    message: Json = {"role": "assistant", "content": text or None}
    if calls:
        message["tool_calls"] = calls
    return message


def _of_anthropic(message: Json) -> list[Json]:
    content = message["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if message["role"] == "assistant":
        calls = [_call(b["id"], b["name"], b["input"]) for b in blocks if b["type"] == "tool_use"]
        text = "".join(b.get("text", "") for b in blocks if b["type"] == "text")
        return [_response(text, calls)]
    return _grouped(
        blocks, lambda b: b.get("tool_use_id") if b["type"] == "tool_result" else None, message["role"]
    )


def _of_bedrock(message: Json) -> list[Json]:
    blocks = message["content"]
    if message["role"] == "assistant":
        uses = [b["toolUse"] for b in blocks if "toolUse" in b]
        text = "".join(b.get("text", "") for b in blocks)
        return [_response(text, [_call(u["toolUseId"], u["name"], u["input"]) for u in uses])]
    return _grouped(blocks, lambda b: b.get("toolResult", {}).get("toolUseId"), "user")


def _of_pydantic_ai(message: Json) -> list[Json]:
    parts = message["parts"]
    if message["kind"] == "response":
        calls = [
            _call(p["tool_call_id"], p["tool_name"], p.get("args") or {})
            for p in parts
            if p["part_kind"] == "tool-call"
        ]
        return [_response("".join(p["content"] for p in parts if p["part_kind"] == "text"), calls)]
    return _grouped(
        parts, lambda p: p.get("tool_call_id") if p["part_kind"] == "tool-return" else None, "user"
    )


def _grouped(pieces: list[Any], result_id: Callable[[Any], Any], role: str) -> list[Json]:
    made: list[Json] = []
    for piece in pieces:
        answered = result_id(piece)
        if answered is not None:
            made.append({"role": "tool", "tool_call_id": answered, "content": "x"})
        elif not made or made[-1]["role"] != role:
            made.append({"role": role, "content": "words"})
    return made


def _of_langchain(message: Json) -> list[Json]:
    inner = message["data"]
    role = {"human": "user", "ai": "assistant", "tool": "tool", "system": "system"}[message["type"]]
    if role == "assistant":
        calls = [_call(c["id"], c["name"], c["args"]) for c in inner.get("tool_calls") or []]
        return [_response(inner["content"] if isinstance(inner["content"], str) else "words", calls)]
    made: Json = {"role": role, "content": inner["content"]}
    if role == "tool":
        made["tool_call_id"] = inner["tool_call_id"]
    return [made]


_READERS: dict[str, Callable[[Json], list[Json]]] = {
    "anthropic": _of_anthropic,
    "bedrock": _of_bedrock,
    "pydantic-ai": _of_pydantic_ai,
    "langchain": _of_langchain,
    "openai-chat": lambda message: [message],
    "mistral": lambda message: [message],
}


def _mistral_common(form: str) -> Oracle:
    validator = importlib.import_module("mistral_common.protocol.instruct.validator")
    shapes = importlib.import_module("mistral_common.protocol.instruct.messages")
    pydantic = importlib.import_module("pydantic")
    judge = validator.MistralRequestValidatorV13(mode=validator.ValidationMode.agnostic)
    adapter = pydantic.TypeAdapter(shapes.ChatMessage)

    def oracle(messages: list[Any]) -> str | None:
        chat = as_chat(form, messages)
        kept = ("role", "content", "tool_calls", "tool_call_id")
        plain = [{key: message[key] for key in kept if key in message} for message in chat]
        try:
            sent = [*plain, {"role": "user", "content": "next"}]
            judge.validate_messages([adapter.validate_python(message) for message in sent])
        except Exception as refusal:  # noqa: BLE001 - each error of a validator is its finding
            return f"{type(refusal).__name__}: {refusal}"[:300]
        return None

    return oracle


def _langgraph(form: str) -> Oracle:
    executor = importlib.import_module("langgraph.prebuilt.chat_agent_executor")
    core = importlib.import_module("langchain_core.messages")

    def oracle(messages: list[Any]) -> str | None:
        try:
            if form == "langchain":
                read = core.messages_from_dict(messages)
            else:
                read = core.convert_to_messages(as_chat(form, messages))
            executor._validate_chat_history(read)
        except Exception as refusal:  # noqa: BLE001 - each error of a validator is its finding
            return f"{type(refusal).__name__}: {refusal}"[:300]
        return None

    return oracle


def _typed(module: str, name: str) -> Callable[[str], Oracle]:
    def make(form: str) -> Oracle:
        del form
        pydantic = importlib.import_module("pydantic")
        kind = getattr(importlib.import_module(module), name)
        adapter = pydantic.TypeAdapter(kind)

        def oracle(messages: list[Any]) -> str | None:
            for place, message in enumerate(messages):
                try:
                    json.dumps(adapter.validate_python(message), default=list)
                except Exception as refusal:  # noqa: BLE001 - each error of a validator is its finding
                    return f"{place}: {refusal}"[:400]
            return None

        return oracle

    return make


def _google(form: str) -> Oracle:
    del form
    types = importlib.import_module("google.genai.types")
    chats = importlib.import_module("google.genai.chats")

    def oracle(messages: list[Any]) -> str | None:
        try:
            contents = [types.Content.model_validate(message) for message in messages]
            chats._validate_contents(contents)
            if not all(chats._validate_content(content) for content in contents):
                return "a content without parts, or an empty part"
        except Exception as refusal:  # noqa: BLE001 - each error of a validator is its finding
            return f"{type(refusal).__name__}: {refusal}"[:300]
        return None

    return oracle


def _botocore(form: str) -> Oracle:
    del form
    session = importlib.import_module("botocore.session").get_session()
    validate = importlib.import_module("botocore.validate")
    model = session.get_service_model("bedrock-runtime").operation_model("Converse").input_shape
    judge = validate.ParamValidator()

    def oracle(messages: list[Any]) -> str | None:
        report = judge.validate({"modelId": "m", "messages": messages}, model)
        return str(report.generate_report())[:300] if report.has_errors() else None

    return oracle


def _pydantic_ai(form: str) -> Oracle:
    del form
    shapes = importlib.import_module("pydantic_ai.messages")

    def oracle(messages: list[Any]) -> str | None:
        try:
            shapes.ModelMessagesTypeAdapter.validate_python(messages)
        except Exception as refusal:  # noqa: BLE001 - each error of a validator is its finding
            return f"{type(refusal).__name__}: {refusal}"[:400]
        return None

    return oracle


_CHATTY = ("openai-chat", "mistral", "anthropic", "bedrock", "pydantic-ai", "langchain")
_ORACLES: dict[str, tuple[tuple[str, ...], Callable[[str], Oracle]]] = {
    "mistral-common": (_CHATTY, _mistral_common),
    "langgraph": (_CHATTY, _langgraph),
    "anthropic types": (("anthropic",), _typed("anthropic.types", "MessageParam")),
    "openai types": (("openai-chat",), _typed("openai.types.chat", "ChatCompletionMessageParam")),
    "openai responses types": (
        ("openai-responses",),
        _typed("openai.types.responses.response_input_item_param", "ResponseInputItemParam"),
    ),
    "google-genai": (("gemini",), _google),
    "botocore": (("bedrock",), _botocore),
    "pydantic-ai": (("pydantic-ai",), _pydantic_ai),
}


def pydantic_ai_wires() -> dict[str, Callable[[list[Any]], list[Any]]]:
    """Return pydantic-ai's mapping of its messages for each provider with an installed SDK."""
    found: dict[str, Callable[[list[Any]], list[Any]]] = {}
    for form, name, kind in (
        ("openai-chat", "openai", "OpenAIChat"),
        ("anthropic", "anthropic", "Anthropic"),
    ):
        try:
            found[form] = _pydantic_ai_wire(name, kind)
        except ImportError:
            continue
    return found


def _pydantic_ai_wire(name: str, kind: str) -> Callable[[list[Any]], list[Any]]:
    shapes = importlib.import_module("pydantic_ai.messages")
    asked = importlib.import_module("pydantic_ai.models").ModelRequestParameters
    provider = importlib.import_module(f"pydantic_ai.providers.{name}")
    owner = getattr(provider, f"{kind.removesuffix('Chat')}Provider")(api_key="none")
    model = getattr(importlib.import_module(f"pydantic_ai.models.{name}"), f"{kind}Model")(
        "m", provider=owner
    )

    def wire(messages: list[Any]) -> list[Any]:
        read = shapes.ModelMessagesTypeAdapter.validate_python(messages)
        if name == "openai":
            sent = asyncio.run(model._map_messages(read, asked()))
        else:
            _, sent = asyncio.run(model._map_message(read, asked(), {}))
        plain: list[Any] = json.loads(json.dumps(sent, default=str))
        return plain

    return wire
