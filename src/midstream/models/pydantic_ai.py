"""Models of pydantic-ai with all its providers; its agents are not used."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator
from typing import cast
from urllib.parse import urlsplit

import msgspec

from midstream.errors import (
    ModelError,
    ModelFilteredError,
    ModelMissingError,
    ModelRejectedError,
    ModelStalledError,
    ModelUnavailableError,
    UsageError,
)
from midstream.history.messages import Finish, History, Usage
from midstream.history.profiles import find_profile
from midstream.history.rendering import render
from midstream.history.repair.report import Advice
from midstream.models.prompt_prefix import cache_key_of, canonical_tools, takes_cache_key
from midstream.models.provider_errors import error_of
from midstream.models.responses import (
    Finished,
    KeepAlive,
    ModelEvent,
    ModelRequest,
    TextDelta,
    ThinkingDelta,
    ToolCallRequested,
    Working,
)

INSTALL_HINT = "Install it with: pip install 'midstream[models]'"

try:
    from pydantic_ai import direct, exceptions, messages
    from pydantic_ai.models import Model, ModelRequestParameters, StreamedResponse, infer_model
    from pydantic_ai.settings import ModelSettings
    from pydantic_ai.tools import ToolDefinition
except ImportError as error:
    raise ModelMissingError(f"pydantic-ai is not installed. {INSTALL_HINT}") from error

_PROFILES = {
    "anthropic": "anthropic",
    "azure": "openai-chat",
    "bedrock": "bedrock-claude",
    "deepseek": "deepseek",
    "google": "gemini",
    "google-cloud": "gemini",
    "google-gla": "gemini",
    "google-vertex": "gemini",
    "mistral": "mistral",
    "moonshotai": "kimi",
    "openai": "openai-chat",
}
"""Profiles by pydantic-ai's name of the provider; for others pydantic-ai's own settings decide."""
_FINISHES = {
    "stop": Finish.STOP,
    "tool_call": Finish.CALLS,
    "length": Finish.LENGTH,
    "content_filter": Finish.FILTER,
}
_MARKED = {"anthropic", "bedrock", "openrouter"}
"""Providers that cache only marked prefixes; pydantic-ai drops marks for models without a cache."""
_REDACTED = {"redacted_thinking", "redacted_content"}
"""pydantic-ai's ids of thinking that only Anthropic can read, from its own API and from Bedrock."""


class PydanticAIModel:
    """A model of pydantic-ai.

    Args:
        model: A pydantic-ai `Model`, or a name such as `openai:gpt-5` or `anthropic:claude-sonnet-4-5`; a named one
            takes its key from the environment, as pydantic-ai documents. Set `max_retries=0` on a provider's client if
            possible, because midstream retries itself.
        settings: pydantic-ai's `ModelSettings` for each request.
        profile: The rules for messages (`midstream.history.profiles.PROFILES`); by default those of the provider.
        is_cached: Whether requests have marks for the provider's cache, if it needs them. For Anthropic (also over
            Bedrock and OpenRouter): at the end of the tools, of the system prompt, of the messages and of the turn's
            opening. For OpenAI: `prompt_cache_key`. Your own cache settings are kept.

    Thinking is sent back only to the model that produced it, because other models cannot verify its signature.

    Raises:
        ModelMissingError: The provider's package is not installed.
        UsageError: The model is unknown, or its key is not set.
    """

    def __init__(
        self,
        model: Model | str,
        *,
        settings: ModelSettings | None = None,
        profile: str | None = None,
        is_cached: bool = True,
    ) -> None:
        try:
            self._model = infer_model(model)
        except ImportError as error:
            raise ModelMissingError(f"{model} needs another package: {error}") from error
        except exceptions.UserError as error:
            raise UsageError(f"{model} cannot be used: {error}") from error
        self.name = f"{self._model.system}:{self._model.model_name}"
        self._settings = settings
        sets_cache = any("cache" in name for name in settings or {})
        self._is_cached = is_cached and not sets_cache
        self._profile = find_profile(profile or _profile_of(self._model)).name

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        """Answer `request`; closing the iterator closes the connection.

        Raises:
            ModelUnavailableError, ModelStalledError: Network fault, rate limit, overload, an incomplete response.
            ModelRejectedError: The provider will never accept this request.
            ContextOverflowError: The conversation is longer than the model can read.
        """
        parameters = ModelRequestParameters(
            function_tools=[
                ToolDefinition(
                    name=tool.name,
                    description=tool.description,
                    parameters_json_schema=tool.parameters or {"type": "object", "properties": {}},
                )
                for tool in canonical_tools(request.tools)
            ]
        )
        settings, is_thinking = self._settings, _is_thinking(self._settings)
        sent, advice = render_request(
            request.history, request.instructions, self._model, profile=self._profile, thinking=is_thinking
        )
        if advice.thinking is False:
            # The current tool loop began without a thought: Anthropic accepts it only with thinking off.
            settings = cast("ModelSettings", {**(settings or {}), "anthropic_thinking": {"type": "disabled"}})
        if self._is_cached and not request.is_ephemeral:
            sent, settings = self._mark(sent, settings, request.session)
        try:
            async with direct.model_request_stream(
                self._model, sent, model_settings=settings, model_request_parameters=parameters
            ) as streamed:
                async for event in streamed:
                    yield _event_of(event)
                for ending in _ending(streamed):
                    yield ending
        except (exceptions.AgentRunError, exceptions.UserError) as error:
            raise _model_error_of(error, self.name) from error

    def _mark(
        self, sent: list[messages.ModelMessage], settings: ModelSettings | None, session: str
    ) -> tuple[list[messages.ModelMessage], ModelSettings | None]:
        """Return messages and settings with marks for the provider's cache."""
        if self._model.system in _MARKED:
            return _with_anchor(sent), cast("ModelSettings", {**(settings or {}), "cache": True})
        host = urlsplit(self._model.base_url or "").hostname or ""
        if session and self._model.system == "openai" and takes_cache_key(host):
            key = {"openai_prompt_cache_key": cache_key_of(session)}
            return sent, cast("ModelSettings", {**(settings or {}), **key})
        return sent, settings


def _with_anchor(sent: list[messages.ModelMessage]) -> list[messages.ModelMessage]:
    """Mark the last answered prompt, as a fallback if the mark at the end finds no cache entry."""
    responses = (at for at in range(len(sent) - 1, -1, -1) if isinstance(sent[at], messages.ModelResponse))
    for place in range(next(responses, 0) - 1, -1, -1):
        message = sent[place]
        last = message.parts[-1] if message.parts else None
        if isinstance(message, messages.ModelRequest) and isinstance(last, messages.UserPromptPart):
            words = [last.content] if isinstance(last.content, str) else last.content
            prompt = dataclasses.replace(last, content=[*words, messages.CachePoint()])
            marked = dataclasses.replace(message, parts=[*message.parts[:-1], prompt])
            return [*sent[:place], marked, *sent[place + 1 :]]
    return sent


def _is_thinking(settings: ModelSettings | None) -> bool | None:
    """Whether the settings switch Anthropic's thinking on."""
    thinking = (settings or {}).get("anthropic_thinking")
    return thinking.get("type") != "disabled" if isinstance(thinking, dict) else None


# --- requests -------------------------------------------------------------------------------------------------


def render_request(
    history: History, instructions: str, model: Model, *, profile: str = "", thinking: bool | None = None
) -> tuple[list[messages.ModelMessage], Advice]:
    """Return a history as pydantic-ai's messages for `model`, and advice for the request."""
    found = render(
        history,
        instructions,
        profile or _profile_of(model),
        form="pydantic-ai",
        model=model.model_name,
        thinking=thinking,
    )
    for message in found.messages:
        if message["kind"] == "request":
            message["instructions"] = found.system or None
            continue
        for part in message["parts"]:
            if part["part_kind"] == "thinking" or "provider_details" in part:
                part["provider_name"] = model.system
    sent = messages.ModelMessagesTypeAdapter.validate_json(msgspec.json.encode(found.messages))
    return sent, found.advice


def _profile_of(model: Model) -> str:
    if model.system == "openai" and "Responses" in type(model).__name__:
        return "responses"
    if model.system == "bedrock" and "mistral" in model.model_name:
        return "bedrock-mistral"
    return _PROFILES.get(model.system, "pydantic-ai")


# --- responses ------------------------------------------------------------------------------------------------


def _event_of(event: messages.ModelResponseStreamEvent) -> ModelEvent:
    match event:
        case messages.PartStartEvent(part=messages.TextPart(content=text)) if text:
            return TextDelta(text)
        case messages.PartDeltaEvent(delta=messages.TextPartDelta(content_delta=text)) if text:
            return TextDelta(text)
        case messages.PartStartEvent(part=messages.ThinkingPart() as part):
            return ThinkingDelta(part.content, part.signature, is_redacted=part.id in _REDACTED)
        case messages.PartDeltaEvent(delta=messages.ThinkingPartDelta() as delta):
            text, signature = delta.content_delta or "", delta.signature_delta
            return ThinkingDelta(text, signature)
        case messages.PartStartEvent(part=messages.ToolCallPart(tool_name=name)):
            return Working(name)
        case messages.PartDeltaEvent(delta=messages.ToolCallPartDelta()):
            return Working()
    return KeepAlive()


def _ending(streamed: StreamedResponse) -> list[ModelEvent]:
    """Return the calls, which are complete only now, and the end of the response."""
    response = streamed.get()
    calls = [part for part in response.parts if isinstance(part, messages.ToolCallPart)]
    requested = [
        ToolCallRequested(call.tool_call_id, call.tool_name, _text_of(call.args), _signature_of(call))
        for call in calls
    ]
    if response.finish_reason == "error":
        raise ModelUnavailableError("the provider ended the response with an error")
    finish = _FINISHES.get(response.finish_reason or "stop", Finish.STOP)
    if finish is Finish.FILTER and not response.parts:
        raise ModelFilteredError("the provider's content filter withheld the whole response")
    if calls and finish is Finish.STOP:
        finish = Finish.CALLS
    used = response.usage
    usage = Usage(used.input_tokens, used.output_tokens, used.cache_read_tokens, used.cache_write_tokens)
    return [*requested, Finished(finish, streamed.model_name, usage)]


def _signature_of(call: messages.ToolCallPart) -> str | None:
    """Return Google's thought signature over a call, in base64."""
    signature = (call.provider_details or {}).get("thought_signature")
    return signature if isinstance(signature, str) else None


def _text_of(arguments: object) -> str:
    """Return arguments as the model wrote them; some providers return an object, or nothing."""
    if isinstance(arguments, str):
        return arguments
    return msgspec.json.encode(arguments or {}).decode()


def _model_error_of(error: exceptions.AgentRunError | exceptions.UserError, name: str) -> ModelError:
    if isinstance(error, exceptions.ModelAPIError):
        status = error.status_code if isinstance(error, exceptions.ModelHTTPError) else None
        wait_s = error.retry_after
        if status is not None or error.body is not None:
            body = error.body.get("error", error.body) if isinstance(error.body, dict) else error.body
            return error_of(body, status=status, retry_after_s=wait_s)
        if isinstance(error, exceptions.ModelTimeoutError):
            return ModelStalledError(f"{name} gave no answer in time")
        return ModelUnavailableError(f"the connection to {name} failed", retry_after_s=wait_s)
    if isinstance(error, exceptions.ContentFilterError):
        return ModelFilteredError(f"the content filter of {name} withheld the response: {error}")
    if isinstance(error, exceptions.UserError):
        return ModelRejectedError(f"{name} does not take this request: {error}")
    return ModelUnavailableError(f"{name} sent an invalid response: {type(error).__name__}")
