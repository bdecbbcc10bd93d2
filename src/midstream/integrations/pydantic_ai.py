"""Every provider that pydantic-ai knows, through its model layer; its agents are not used."""

from __future__ import annotations

import base64
import binascii
from collections.abc import AsyncGenerator
from typing import Literal

import msgspec

from midstream.core.formats.openai_chat import arguments_of
from midstream.core.formats.openai_stream import error_of
from midstream.core.messages import (
    Call,
    Exchange,
    File,
    Finish,
    History,
    Outcome,
    Text,
    Thinking,
    Usage,
    UserMessage,
)
from midstream.core.replies import CallRequested, Finished, ModelEvent, ModelRequest, TextDelta, ThinkingDelta
from midstream.errors import (
    ModelError,
    ModelMissingError,
    ModelRejectedError,
    ModelStalledError,
    ModelUnavailableError,
    UsageError,
)

INSTALL_HINT = "Install it with: pip install 'midstream[models]'"

try:
    from pydantic_ai import direct, exceptions, messages
    from pydantic_ai.models import Model, ModelRequestParameters, StreamedResponse, infer_model
    from pydantic_ai.settings import ModelSettings
    from pydantic_ai.tools import ToolDefinition
except ImportError as error:
    raise ModelMissingError(f"pydantic-ai is not installed. {INSTALL_HINT}") from error

_FINISHES = {
    "stop": Finish.STOP,
    "tool_call": Finish.CALLS,
    "length": Finish.LENGTH,
    "content_filter": Finish.FILTER,
}
_OUTCOMES: dict[Outcome, Literal["success", "failed", "interrupted"]] = {
    Outcome.OK: "success",
    Outcome.ERROR: "failed",
    Outcome.CANCELLED: "interrupted",
    Outcome.UNKNOWN: "interrupted",
}
_REDACTED = "redacted_thinking"
"""pydantic-ai's id for thinking that only the provider can read; there is no form for it in a history yet."""


class PydanticAIModel:
    """A model of pydantic-ai.

    Args:
        model: A pydantic-ai `Model`, or a name such as `openai:gpt-5` or `anthropic:claude-sonnet-4-5`; a named one
            takes its key from the environment, as pydantic-ai documents. Give a provider's client `max_retries=0`
            where it has such a setting: midstream asks again by itself.
        settings: pydantic-ai's `ModelSettings` for each request.

    Thinking is sent back only to the model that thought it, because its signature says nothing to others.

    Raises:
        ModelMissingError: The provider's package is not installed.
        UsageError: There is no such model, or its key is not set.
    """

    def __init__(self, model: Model | str, *, settings: ModelSettings | None = None) -> None:
        try:
            self._model = infer_model(model)
        except ImportError as error:
            raise ModelMissingError(f"{model} needs another package: {error}") from error
        except exceptions.UserError as error:
            raise UsageError(f"{model} cannot be used: {error}") from error
        self.name = f"{self._model.system}:{self._model.model_name}"
        self._settings = settings

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        """Answer `request`; closing the iterator closes the connection.

        Raises:
            ModelUnavailableError, ModelStalledError: Network fault, rate limit, overload, a reply that broke off.
            ModelRejectedError: The provider will never accept this request.
        """
        parameters = ModelRequestParameters(
            function_tools=[
                ToolDefinition(
                    name=tool.name,
                    description=tool.description,
                    parameters_json_schema=tool.parameters or {"type": "object", "properties": {}},
                )
                for tool in request.tools
            ]
        )
        sent = rendered(request.history, request.instructions, self._model)
        try:
            async with direct.model_request_stream(
                self._model, sent, model_settings=self._settings, model_request_parameters=parameters
            ) as streamed:
                async for event in streamed:
                    if (said := _said(event)) is not None:
                        yield said
                for ending in _ending(streamed):
                    yield ending
        except (exceptions.AgentRunError, exceptions.UserError) as error:
            raise _typed(error, self.name) from error


# --- what is sent ---------------------------------------------------------------------------------------------


def rendered(history: History, instructions: str, model: Model) -> list[messages.ModelMessage]:
    """Return a history as pydantic-ai's messages for `model`.

    Raises:
        ModelRejectedError: An attachment is no base64.
    """
    sent: list[messages.ModelMessage] = []
    asking: list[messages.ModelRequestPart] = []
    for entry in history.entries:
        if isinstance(entry, UserMessage):
            asking.append(messages.UserPromptPart([_content_of(part) for part in entry.parts]))
            continue
        reply = _reply_of(entry, model)
        if not reply.parts:
            continue  # nothing but thinking: no provider takes such a message
        if asking:
            sent.append(messages.ModelRequest(asking, instructions=instructions or None))
        sent.append(reply)
        asking = _results_of(entry)
    if asking:
        sent.append(messages.ModelRequest(asking, instructions=instructions or None))
    return sent


def _content_of(part: Text | File) -> messages.UserContent:
    if isinstance(part, Text):
        return part.text
    if part.data is not None:
        try:
            return messages.BinaryContent(
                base64.b64decode(part.data, validate=True), media_type=part.media_type
            )
        except binascii.Error as error:
            raise ModelRejectedError(f"an attachment of type {part.media_type!r} is no base64") from error
    url = part.url or ""
    match part.media_type.partition("/")[0]:
        case "image":
            return messages.ImageUrl(url, media_type=part.media_type)
        case "audio":
            return messages.AudioUrl(url, media_type=part.media_type)
        case "video":
            return messages.VideoUrl(url, media_type=part.media_type)
    return messages.DocumentUrl(url, media_type=part.media_type)


def _reply_of(exchange: Exchange, model: Model) -> messages.ModelResponse:
    reply = exchange.reply
    is_own = reply.model == model.model_name
    parts: list[messages.ModelResponsePart] = []
    for part in reply.parts:
        match part:
            case Text() if part.text:
                parts.append(messages.TextPart(part.text))
            case Thinking() if is_own and (reply.text or reply.calls):
                parts.append(
                    messages.ThinkingPart(part.text, signature=part.signature, provider_name=model.system)
                )
            case Call():
                parts.append(messages.ToolCallPart(part.name, arguments_of(part), tool_call_id=part.id))
    return messages.ModelResponse(parts, model_name=reply.model or None)


def _results_of(exchange: Exchange) -> list[messages.ModelRequestPart]:
    names = {call.id: call.name for call in exchange.reply.calls}
    return [
        messages.ToolReturnPart(
            names[result.call_id],
            result.content,
            tool_call_id=result.call_id,
            outcome=_OUTCOMES[result.outcome],
        )
        for result in exchange.results
    ]


# --- what comes back ------------------------------------------------------------------------------------------


def _said(event: messages.ModelResponseStreamEvent) -> ModelEvent | None:
    match event:
        case messages.PartStartEvent(part=messages.TextPart(content=text)) if text:
            return TextDelta(text)
        case messages.PartDeltaEvent(delta=messages.TextPartDelta(content_delta=text)) if text:
            return TextDelta(text)
        case messages.PartStartEvent(part=messages.ThinkingPart() as part) if part.id != _REDACTED:
            return ThinkingDelta(part.content, part.signature) if part.content or part.signature else None
        case messages.PartDeltaEvent(delta=messages.ThinkingPartDelta() as delta):
            text, signature = delta.content_delta or "", delta.signature_delta
            return ThinkingDelta(text, signature) if text or signature else None
    return None


def _ending(streamed: StreamedResponse) -> list[ModelEvent]:
    """Return the calls, which are whole only now, and the end of the reply."""
    reply = streamed.get()
    calls = [part for part in reply.parts if isinstance(part, messages.ToolCallPart)]
    requested = [CallRequested(call.tool_call_id, call.tool_name, _text_of(call.args)) for call in calls]
    if reply.finish_reason == "error":
        raise ModelUnavailableError("the provider ended the reply with an error")
    finish = _FINISHES.get(reply.finish_reason or "stop", Finish.STOP)
    if finish is Finish.FILTER and not reply.parts:
        raise ModelRejectedError("the provider's content filter withheld the whole reply")
    if calls and finish is Finish.STOP:
        finish = Finish.CALLS
    used = reply.usage
    usage = Usage(used.input_tokens, used.output_tokens, used.cache_read_tokens)
    return [*requested, Finished(finish, streamed.model_name, usage)]


def _text_of(arguments: object) -> str:
    """Return arguments as the model wrote them; some providers hand over an object, or nothing."""
    if isinstance(arguments, str):
        return arguments
    return msgspec.json.encode(arguments or {}).decode()


def _typed(error: exceptions.AgentRunError | exceptions.UserError, name: str) -> ModelError:
    if isinstance(error, exceptions.ModelAPIError):
        status = error.status_code if isinstance(error, exceptions.ModelHTTPError) else None
        wait_s = error.retry_after
        if status is not None or error.body is not None:
            body = error.body.get("error", error.body) if isinstance(error.body, dict) else error.body
            return error_of(body, status=status, retry_after_s=wait_s)
        if isinstance(error, exceptions.ModelTimeoutError):
            return ModelStalledError(f"{name} gave no answer in time")
        return ModelUnavailableError(f"the connection to {name} failed", retry_after_s=wait_s)
    if isinstance(error, exceptions.ContentFilterError | exceptions.UserError):
        return ModelRejectedError(f"{name} does not take this request: {error}")
    return ModelUnavailableError(f"{name} sent what no reply can be: {type(error).__name__}")
