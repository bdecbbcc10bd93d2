"""Anthropic's Messages API, by its address, without an SDK."""

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
from midstream.session.model_settings import MESSAGES_GRANTS, MESSAGES_NAMES, messages_fields, select_granted

API_VERSION = "2023-06-01"
"""`anthropic-version` unless `headers` have one; all servers accept it. The events of 2026-10-21 are the same; it
refuses some fields that this one takes (such as `temperature`)."""
TOKENS_MAX = 8192
"""Tokens of one response by default: the API requires a number, and every model since 2025 takes
this."""


class AnthropicMessages(ProvidedModel):
    """A model behind `POST {base_url}/messages`: Anthropic's own, and servers that speak like it.

    Signed thinking goes back, byte for byte, to the model that signed it. Calls of the provider's own tools are
    reported as `UpstreamCall`s, and in words in the requests that follow.

    Args:
        base_url: Up to and including the version, such as `https://models.example/v1`.
        model: The model's name at the server.
        api_key: Sent as `x-api-key`; None sends none (a bearer token goes into `headers`).
        tokens_max: Tokens of a response (`max_tokens`), thinking included.
        thinking: The API's own object, such as `{"type": "enabled", "budget_tokens": 4096}`. It is turned off for the
            rest of a tool loop whose thinking was lost.
        upstream_tools: Tools that the provider runs itself, as the API has them; they follow those of the request.
        extra: More fields for the body of each request (such as `temperature`), over those made here; a field whose
            value is None is left out.
        headers: More headers for each request, such as `anthropic-beta`.
        is_cached: Whether requests are marked for the provider's cache: the end of the tools, of the system prompt,
            of the messages, and where the request before ended. Marks in `extra` are left alone.
        cache_ttl: How long what is marked is kept: "" for the provider's five minutes, or `1h`.
        limits: How long the server may take to connect, to begin and between two pieces of a response.

    Connections are kept between responses. After a response that was cut (a cancel, silence, a fault) no later
    request uses any of them, as their state is unknown. Close them with `aclose`, or use the model as an async context.

    Raises:
        UsageError: The address is no http or https URL.
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
        self._tokens_max = tokens_max
        self._upstream_tools = [dict(tool) for tool in upstream_tools]
        self._extra = ({} if thinking is None else {"thinking": dict(thinking)}) | dict(extra or {})
        self.grants = select_granted(MESSAGES_GRANTS, model, self._extra, MESSAGES_NAMES)
        """Which wishes for the making of an answer are passed on: while it thinks, only where it is to stop."""
        version = next((value for name, value in sent.items() if name.lower() == "anthropic-version"), "")
        if "thinking" in self._extra or version != API_VERSION:
            self.grants &= {"stop"}
        self._is_cached = is_cached
        self._cache_ttl = cache_ttl

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        """Answer `request`; closing the iterator closes the connection, on which servers stop.

        Raises:
            ModelUnavailableError: No connection, 408, 409, 425, 429, 5xx, or a response that broke off.
            ModelStalledError: Silence for longer than `limits` allow.
            ModelRejectedError: The server will never accept this request as it is.
            ModelAccessError: The key, the account or the name of the model is not accepted.
            ModelFilteredError: The model refused without any other output.
            ContextOverflowError: It is longer than the model can read, or leaves no room for a response.
        """
        headers = {"Idempotency-Key": request.key} if request.key else {}
        asked = self._provider.events(
            "POST", "/messages", self._body(request), headers=headers, stalls=request.stalls
        )
        async with contextlib.aclosing(read_response(asked, MessageReader())) as events:
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
        # The messages come last: the body of the next turn begins with the bytes of this one.
        body |= messages_fields(request.settings.only(self.grants))
        body = body | self._extra | {"messages": self._extra.get("messages", sent.messages)}
        if sent.advice.thinking is False and "thinking" in body:
            # The tool loop in progress began without a thought: it is taken with thinking off only.
            body["thinking"] = {"type": "disabled"}
        body = {name: value for name, value in body.items() if value is not None}
        if self._is_cached and not request.is_ephemeral:
            body = anchor(body, ttl=self._cache_ttl)
        return msgspec.json.encode(body)
