"""Anthropic's Messages API over HTTP, without an SDK."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import msgspec

from midstream.environment import World
from midstream.history.rendering import render
from midstream.models.anthropic_stream import MessageReader, render_tools
from midstream.models.http_limits import HttpLimits
from midstream.models.prompt_prefix import anchor, canonical_tools
from midstream.models.provider_http import ProvidedModel, Provider, read_response
from midstream.models.responses import ModelEvent, ModelRequest
from midstream.number_checks import require_count
from midstream.session.model_settings import MESSAGES_GRANTS, MESSAGES_NAMES, messages_fields, select_granted

API_VERSION = "2023-06-01"
"""`anthropic-version` unless `headers` have one; all servers accept it. Version 2026-10-21 has the same events, and
refuses some fields of this one (such as `temperature`)."""
TOKENS_MAX = 8192
"""Default number of tokens of one response: the API requires a number, and every model since 2025 accepts this one."""


class AnthropicMessages(ProvidedModel):
    """A model behind `POST {base_url}/messages`: Anthropic's own, and compatible servers.

    Signed thinking is sent back, byte for byte, to the model that signed it. Calls of the provider's own tools are
    reported as `UpstreamCall`s, and as text in later requests.

    Args:
        base_url: Up to and including the version, such as `https://models.example/v1`.
        model: The model's name at the server.
        api_key: Sent as `x-api-key`; None for no key (put a bearer token into `headers`).
        tokens_max: Tokens of a response (`max_tokens`), thinking included.
        thinking: The API's own object, such as `{"type": "enabled", "budget_tokens": 4096}`. It is turned off for the
            rest of a tool loop whose thinking was lost.
        upstream_tools: Tools that the provider runs itself, in the API's form; they follow those of the request.
        extra: Fields for each request's body (such as `temperature`), which replace defaults; None omits a field.
        headers: More headers for each request, such as `anthropic-beta`.
        is_cached: Whether requests have marks for the provider's cache: at the end of the tools, of the system prompt,
            of the messages, and of the previous request. Marks in `extra` are kept.
        cache_ttl: Lifetime of the cache: "" for the provider's five minutes, or `1h`.
        limits: Time limits for connecting, for the first byte and between bytes.

    Connections are kept between responses. After a cut response (a cancellation, silence, a fault) no later request
    uses any of them, because their state is unknown. Close them with `aclose`, or use the model as an async context.

    Raises:
        UsageError: The address is not an http or https URL, or `tokens_max` is not at least 1.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key: str | None = None,
        *,
        tokens_max: int = TOKENS_MAX,
        thinking: Mapping[str, object] | None = None,
        upstream_tools: Sequence[Mapping[str, object]] = (),
        extra: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
        is_cached: bool = True,
        cache_ttl: str = "",
        limits: HttpLimits | None = None,
        world: World = World(),
    ) -> None:
        self.name = f"anthropic-messages:{model}"
        own = {"anthropic-version": API_VERSION} | ({} if api_key is None else {"x-api-key": api_key})
        given = {name.lower() for name in headers or ()}
        sent = {name: value for name, value in own.items() if name not in given} | dict(headers or {})
        self._provider = Provider(base_url, self.name, headers=sent, limits=limits, world=world)
        self._model = model
        require_count("tokens_max", tokens_max, least=1)
        self._tokens_max = tokens_max
        self._upstream_tools = [dict(tool) for tool in upstream_tools]
        self._extra = ({} if thinking is None else {"thinking": dict(thinking)}) | dict(extra or {})
        self.grants = select_granted(MESSAGES_GRANTS, model, self._extra, MESSAGES_NAMES)
        """Names of the accepted settings; with thinking on, only where to stop."""
        version = next((value for name, value in sent.items() if name.lower() == "anthropic-version"), "")
        if "thinking" in self._extra or version != API_VERSION:
            self.grants &= {"stop"}
        self._is_cached = is_cached
        self._cache_ttl = cache_ttl

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        """Answer `request`. Closing the iterator closes the connection, which stops the server.

        Raises:
            ModelUnavailableError: No connection, 408, 409, 425, 429, 5xx, or an incomplete response.
            ModelStalledError: Silence beyond `limits`.
            ModelRejectedError: The server will never accept this request as it is.
            ModelAccessError: The server refuses the key, the account or the model's name.
            ModelFilteredError: The model refused without any other output.
            ContextOverflowError: The conversation is longer than the model can read, or leaves no room for a response.
        """
        headers = {"Idempotency-Key": request.key} if request.key else {}
        batches = self._provider.events(
            "POST", "/messages", self._body(request), headers=headers, stalls=request.stalls
        )
        async with contextlib.aclosing(read_response(batches, MessageReader())) as events:
            async for event in events:
                yield event

    def _body(self, request: ModelRequest) -> bytes:
        thinking = self._extra.get("thinking")
        is_thinking = thinking.get("type") != "disabled" if isinstance(thinking, dict) else None
        sent = render(
            request.history,
            request.instructions,
            "anthropic",
            form="anthropic",
            model=self._model,
            thinking=is_thinking,
        )
        body: dict[str, Any] = {"model": self._model, "max_tokens": self._tokens_max, "stream": True}
        if tools := [*render_tools(canonical_tools(request.tools)), *self._upstream_tools]:
            body["tools"] = tools
        if sent.system:
            body["system"] = [{"type": "text", "text": sent.system}]
        # The messages come last, so that the body of the next turn begins with the bytes of this one.
        body |= messages_fields(request.settings.only(self.grants))
        body = body | self._extra | {"messages": self._extra.get("messages", sent.messages)}
        if sent.advice.thinking is False and "thinking" in body:
            # The current tool loop began without a thought: the API accepts it only with thinking off.
            body["thinking"] = {"type": "disabled"}
        body = {name: value for name, value in body.items() if value is not None}
        if self._is_cached and not request.is_ephemeral:
            body = anchor(body, ttl=self._cache_ttl)
        return msgspec.json.encode(body)
