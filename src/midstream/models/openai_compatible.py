"""Servers with OpenAI's chat completions over HTTP, without an SDK."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import msgspec

from midstream.environment import World
from midstream.history.profiles import find_profile
from midstream.history.rendering import render
from midstream.models import openai_chat_tools
from midstream.models.http_limits import HttpLimits
from midstream.models.openai_stream import ChatStreamReader
from midstream.models.prompt_prefix import anchor_chat, cache_key_of, canonical_tools, takes_cache_key
from midstream.models.provider_http import OpenAIServerModel, Provider, read_response
from midstream.models.responses import ModelEvent, ModelRequest
from midstream.session.model_settings import CHAT_GRANTS, CHAT_NAMES, chat_fields, select_granted


class OpenAICompatible(OpenAIServerModel):
    """A model behind `POST {base_url}/chat/completions`: OpenAI, vLLM, llama.cpp, Ollama, OpenRouter, and so on.

    Args:
        base_url: Up to and including the version, such as `http://127.0.0.1:11434/v1`.
        model: The model's name at the server.
        api_key: Sent as a bearer token; None for none.
        extra: Fields for the body of each request (such as `temperature`), which replace default ones; a field with the
            value None is omitted, for servers that refuse `stream_options`.
        headers: More headers for each request.
        has_cache_key: Whether requests of a session have `prompt_cache_key`, which routes them to a machine with their
            beginning in its cache. None: only for servers known to accept it.
        has_cache_marks: Whether requests have Anthropic's cache marks, for servers that pass them on to it (OpenRouter,
            LiteLLM). Others may refuse them.
        cache_ttl: Lifetime of the cache: "" for the provider's five minutes, or `1h`.
        profile: The rules for the messages (`midstream.history.profiles.PROFILES`): `openai-chat`, `deepseek`, `kimi`,
            `minimax`, `mistral`; `strict-template` for a model's chat template, `portable` for all servers.
        limits: Time limits for connecting, for the first byte and between bytes.

    Connections are kept between responses. After a cut response (a cancellation, silence, a fault) no later request
    uses any of them, because their state is unknown. Close them with `aclose`, or use the model as an async context.

    Raises:
        UsageError: The address is not an http or https URL, or the profile does not exist.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key: str | None = None,
        *,
        extra: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
        has_cache_key: bool | None = None,
        has_cache_marks: bool = False,
        cache_ttl: str = "",
        profile: str = "openai-chat",
        limits: HttpLimits | None = None,
        world: World = World(),
    ) -> None:
        self.name = f"openai-compatible:{model}"
        self._provider = Provider(base_url, self.name, api_key, headers, limits=limits, world=world)
        self._model = model
        self._profile = find_profile(profile).name
        self._extra = dict(extra or {})
        self._has_cache_marks = has_cache_marks
        self._cache_ttl = cache_ttl
        self._has_cache_key = takes_cache_key(self._provider.host) if has_cache_key is None else has_cache_key
        # OpenAI's newer models refuse the older name, and other servers do not have the newer one.
        self._limit = "max_completion_tokens" if takes_cache_key(self._provider.host) else "max_tokens"
        self.grants = select_granted(
            CHAT_GRANTS, model, self._extra, {"tokens_max": self._limit, **CHAT_NAMES}
        )
        """Names of the accepted settings."""

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        """Answer `request`. Closing the iterator closes the connection, which stops the server.

        Raises:
            ModelUnavailableError: No connection, 408, 409, 425, 429, 5xx, or an incomplete response.
            ModelStalledError: Silence beyond `limits`.
            ModelRejectedError: The server will never accept this request as it is.
            ModelAccessError: The server refuses the key, the account or the model's name.
            ModelFilteredError: The content filter withheld the whole response.
            ContextOverflowError: The conversation is longer than the model can read.
        """
        headers = {"Idempotency-Key": request.key} if request.key else {}
        batches = self._provider.events(
            "POST", "/chat/completions", self._body(request), headers=headers, stalls=request.stalls
        )
        async with contextlib.aclosing(read_response(batches, ChatStreamReader())) as events:
            async for event in events:
                yield event

    def _body(self, request: ModelRequest) -> bytes:
        sent = render(
            request.history, request.instructions, self._profile, form="openai-chat", model=self._model
        )
        body: dict[str, Any] = {
            "model": self._model,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.tools:
            body["tools"] = openai_chat_tools.render_tools(canonical_tools(request.tools))
        if self._has_cache_key and request.session and not request.is_ephemeral:
            body["prompt_cache_key"] = cache_key_of(request.session)
        # The messages come last, so that the body of the next turn begins with the bytes of this one.
        body |= chat_fields(request.settings.only(self.grants), limit=self._limit)
        body = body | self._extra | {"messages": self._extra.get("messages", sent.messages)}
        body = {name: value for name, value in body.items() if value is not None}
        if self._has_cache_marks and not request.is_ephemeral:
            body = anchor_chat(body, ttl=self._cache_ttl)
        return msgspec.json.encode(body)
