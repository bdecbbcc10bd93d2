"""Hooks that repair a history on its way to a provider: for pydantic-ai, LangChain and plain HTTP requests.

None of them imports the package it is for before it is used.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from typing import Any

from midstream.history import repair

Json = dict[str, Any]  # a request's body: anything

# The end of a request's path: the format of its messages and the key they stand under.
_PATHS = (
    ("/v1/messages", "anthropic", "messages"),
    ("/chat/completions", "openai-chat", "messages"),
    ("/responses", "openai-responses", "input"),
    (":generateContent", "gemini", "contents"),
    (":streamGenerateContent", "gemini", "contents"),
    ("/converse", "bedrock", "messages"),
    ("/converse-stream", "bedrock", "messages"),
)
_SYSTEMS = {"anthropic": "system", "gemini": "systemInstruction", "bedrock": "system"}


def pydantic_ai_processor(profile: str | None = None) -> Callable[[list[Any]], list[Any]]:
    """Make a history processor for a pydantic-ai agent: `Agent(..., history_processors=[pydantic_ai_processor()])`.

    It gives back the list it was given where nothing is wrong.
    """

    def repaired(messages: list[Any]) -> list[Any]:
        adapter = importlib.import_module("pydantic_ai.messages").ModelMessagesTypeAdapter
        plain = adapter.dump_python(messages, mode="json")
        done = repair(plain, format="pydantic-ai", profile=profile)
        if not done.is_changed:
            return messages
        read: list[Any] = adapter.validate_python(done.messages)
        return read

    return repaired


def repaired_langchain(messages: list[Any], profile: str | None = None) -> list[Any]:
    """Repair LangChain messages, for a `pre_model_hook` or in front of `model.invoke`.

    It gives back the list it was given where nothing is wrong.
    """
    core = importlib.import_module("langchain_core.messages")
    done = repair(core.messages_to_dict(messages), format="langchain", profile=profile)
    if not done.is_changed:
        return messages
    read: list[Any] = core.messages_from_dict(done.messages)
    return read


def repaired_body(path: str, body: bytes, profile: str | None = None) -> bytes:
    """Repair the messages in the body of a provider request; the same bytes where nothing is wrong.

    For an HTTP client's hook or transport. A path that is no provider's, and a body that is no JSON object, are
    given back as they are: a hook must not break what it does not know.

    Args:
        path: The request's path, such as `/v1/chat/completions`.
        body: The request's content.
        profile: Whose rules hold (default: the format's own provider).
    """
    found = next(((form, key) for end, form, key in _PATHS if path.rstrip("/").endswith(end)), None)
    if found is None:
        return body
    form, key = found
    try:
        request = json.loads(body)
    except ValueError:
        return body
    if not isinstance(request, dict) or not isinstance(request.get(key), list):
        return body
    done = repair(
        request[key],
        format=form,
        profile=profile,
        model=request.get("model") if isinstance(request.get("model"), str) else None,
        thinking=_has_thinking(request) if form == "anthropic" else None,
        system=request.get(_SYSTEMS.get(form, "")),
    )
    if not done.is_changed and done.advice.thinking is None:
        return body
    changed: Json = {**request, key: done.messages}
    if done.system is not None and form in _SYSTEMS:
        changed[_SYSTEMS[form]] = done.system
    if done.advice.thinking is False:
        changed.pop("thinking", None)
    return json.dumps(changed, ensure_ascii=False).encode()


def _has_thinking(request: Json) -> bool:
    thinking = request.get("thinking")
    return isinstance(thinking, dict) and thinking.get("type") in ("enabled", "adaptive")
