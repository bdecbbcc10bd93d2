"""Conversion between pydantic-ai's messages and the journal's records: prompts, responses, results and turns."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from msgspec import Struct

from midstream.extras import extra
from midstream.history.messages import (
    File,
    Finish,
    Outcome,
    Response,
    ResponsePart,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
    Usage,
    UserMessage,
    UserPart,
    storable,
    with_distinct_ids,
)
from midstream.models.stream_json import encode_json
from midstream.session.records import CallEnded, MessageAccepted, Record, ResponseCompleted
from midstream.tools.function_tools import RESULT_CHARS_MAX

with extra("pydantic-ai"):
    from pydantic import TypeAdapter
    from pydantic_ai.exceptions import ModelRetry, ToolFailed
    from pydantic_ai.messages import (
        AudioUrl,
        BinaryContent,
        DocumentUrl,
        FileUrl,
        ImageUrl,
        ModelMessage,
        ModelMessagesTypeAdapter,
        ModelRequest,
        ModelResponse,
        RetryPromptPart,
        TextContent,
        TextPart,
        ThinkingPart,
        ToolCallPart,
        ToolReturn,
        ToolReturnPart,
        UserContent,
        UserPromptPart,
        VideoUrl,
    )
    from pydantic_core import PydanticSerializationError

_FINISHES = {
    "stop": Finish.STOP,
    "tool_call": Finish.CALLS,
    "length": Finish.LENGTH,
    "content_filter": Finish.FILTER,
}
_NO_JSON = "This tool finished, but its answer has no JSON form and was lost when the process died."
_tool_returns: TypeAdapter[ToolReturn[Any]] = TypeAdapter(ToolReturn)


class _Native(Struct, frozen=True, omit_defaults=True):
    """Outcome of a tool that text alone cannot represent."""

    kind: Literal["value", "return", "retry", "failed"]
    value: msgspec.Raw = msgspec.Raw(b"null")
    """A `ToolReturn` in pydantic-ai's JSON."""


def success_of(call_id: str, name: str, value: object) -> tuple[ToolResult, str]:
    """Return a tool's value as a result for readers, and in its native form; text needs no native form."""
    if isinstance(value, str) and value == storable(value):
        return ToolResult(call_id, value), ""
    returned = value if isinstance(value, ToolReturn) else ToolReturn(return_value=value)
    try:
        part = ToolReturnPart(name, returned.return_value, call_id)
        content = storable(part.model_response_str())
        raw = msgspec.Raw(_tool_returns.dump_json(returned))
    except (TypeError, ValueError, RecursionError):
        return ToolResult(call_id, _NO_JSON, Outcome.ERROR), ""
    if len(content) > RESULT_CHARS_MAX:
        content = f"{content[:RESULT_CHARS_MAX]}\n[+{len(content) - RESULT_CHARS_MAX} characters]"
    native = _Native("return" if value is returned else "value", raw)
    return ToolResult(call_id, content), msgspec.json.encode(native).decode()


def failure_of(call_id: str, error: Exception) -> tuple[ToolResult, str]:
    """Return the outcome of a failed tool. Its exception ends this run; in a replay, it is a result for the model."""
    if isinstance(error, ModelRetry | ToolFailed):
        native = _Native("retry" if isinstance(error, ModelRetry) else "failed")
        content = storable(error.message)
        return ToolResult(call_id, content, Outcome.ERROR), msgspec.json.encode(native).decode()
    return ToolResult(call_id, storable(f"{type(error).__name__}: {error}"), Outcome.ERROR), ""


def value_of(ended: CallEnded) -> object:
    """Return a tool's value, or raise its exception."""
    result = ended.result
    if not ended.native:
        if result.outcome is Outcome.OK:
            return result.content
        raise ToolFailed(result.content)
    native = msgspec.json.decode(ended.native, type=_Native)
    match native.kind:
        case "retry":
            raise ModelRetry(result.content)
        case "failed":
            raise ToolFailed(result.content)
        case "value":
            return _tool_returns.validate_json(bytes(native.value)).return_value
        case "return":
            return _tool_returns.validate_json(bytes(native.value))


def message_of(
    prompt: str | Sequence[UserContent] | None, messages: Sequence[ModelMessage]
) -> UserMessage | None:
    """Return the user's message: the prompt, or else the end of the history."""
    if prompt is None:
        last = messages[-1] if messages else None
        parts = last.parts if isinstance(last, ModelRequest) else ()
        contents = [part.content for part in parts if isinstance(part, UserPromptPart)]
        if not contents:
            return None
        prompt = contents[-1]
    if isinstance(prompt, str):
        return UserMessage.of(storable(prompt))
    return UserMessage(tuple(_part_of(each) for each in prompt))


def prompt_in(message: UserMessage) -> str | list[UserContent]:
    """Return the prompt of a user's message; `message_of` returns an equal message for it."""
    content = [_content_of(part) for part in message.parts]
    return content[0] if len(content) == 1 and isinstance(content[0], str) else content


def _part_of(content: UserContent) -> UserPart:
    match content:
        case str():
            return Text(storable(content))
        case TextContent(content=text):
            return Text(storable(text))
        case BinaryContent():
            return File(content.media_type, data=content.base64)
        case FileUrl():
            return File(content.media_type, url=content.url)
        case _:
            return Text(f"[{type(content).__name__}]")


def our_response_of(response: ModelResponse, number: int) -> Response:
    """Convert a response for the journal; `number` is its place in the turn."""
    parts: list[ResponsePart] = []
    for part in response.parts:
        match part:
            case TextPart():
                parts.append(Text(storable(part.content)))
            case ThinkingPart():
                parts.append(Thinking(storable(part.content), part.signature))
            case ToolCallPart():
                arguments = storable(part.args_as_json_str())
                parts.append(ToolCall(storable(part.tool_call_id), storable(part.tool_name), arguments))
            case _:
                pass  # only in the native form
    used = response.usage
    usage = Usage(used.input_tokens, used.output_tokens, used.cache_read_tokens, used.cache_write_tokens)
    distinct = with_distinct_ids(tuple(parts), response_no=number)
    finish = _FINISHES.get(response.finish_reason or "", Finish.STOP)
    if finish is Finish.STOP and any(isinstance(part, ToolCall) for part in distinct):
        finish = Finish.CALLS
    return Response(distinct, finish, response.model_name or "", usage)


def native_of(response: ModelResponse) -> str:
    """Return the native form of a response; a character that was cut between two pieces is joined."""
    try:
        return ModelMessagesTypeAdapter.dump_json([response]).decode()
    except PydanticSerializationError:
        return encode_json(ModelMessagesTypeAdapter.dump_python([response], mode="json"))


def response_of(native: str) -> ModelResponse:
    """Decode a response from its native form in the journal."""
    (response,) = ModelMessagesTypeAdapter.validate_json(native)
    assert isinstance(response, ModelResponse)
    return response


def answers_in(messages: Sequence[ModelMessage]) -> dict[str, ToolResult]:
    """Return the results of calls in the last requests of a history, by call id."""
    answers: dict[str, ToolResult] = {}
    for message in reversed(messages):
        if isinstance(message, ModelResponse):
            break
        for part in message.parts:
            if isinstance(part, ToolReturnPart):
                outcome = Outcome.OK if part.outcome == "success" else Outcome.ERROR
                content = storable(part.model_response_str())
                answers[part.tool_call_id] = ToolResult(part.tool_call_id, content, outcome)
            elif isinstance(part, RetryPromptPart):
                content = storable(part.model_response())
                answers[part.tool_call_id] = ToolResult(part.tool_call_id, content, Outcome.ERROR)
    return answers


# --- finished parts of turns ------------------------------------------------------------------------------


def finished_messages(records: Sequence[Record]) -> list[ModelMessage]:
    """Return the messages of ended turns: prompts, responses, and a result for each call."""
    messages: list[ModelMessage] = []
    answers: dict[tuple[int, int, str], CallEnded] = {
        (each.turn, each.response, each.result.call_id): each
        for each in records
        if isinstance(each, CallEnded)
    }
    for record in records:
        if isinstance(record, MessageAccepted):
            at = datetime.fromtimestamp(record.at, UTC)
            prompt = UserPromptPart(prompt_in(record.message), timestamp=at)
            messages.append(ModelRequest([prompt], timestamp=at))
        elif isinstance(record, ResponseCompleted):
            messages.append(_recorded_response(record))
            calls = record.body.calls
            ended = ((call, answers.get((record.turn, record.response, call.id))) for call in calls)
            parts = [_return_of(call, each) for call, each in ended if each is not None]
            if parts:
                messages.append(ModelRequest(parts, timestamp=parts[-1].timestamp))
    return messages


def _content_of(part: UserPart) -> UserContent:
    if isinstance(part, Text):
        return part.text
    if part.data:
        return BinaryContent(base64.b64decode(part.data), media_type=part.media_type)
    match part.media_type.partition("/")[0]:
        case "image":
            return ImageUrl(part.url or "", media_type=part.media_type)
        case "audio":
            return AudioUrl(part.url or "", media_type=part.media_type)
        case "video":
            return VideoUrl(part.url or "", media_type=part.media_type)
        case _:
            return DocumentUrl(part.url or "", media_type=part.media_type)


def _recorded_response(record: ResponseCompleted) -> ModelResponse:
    """Return a complete response in its native form, or the text of an interrupted one."""
    if record.native:
        return response_of(record.native)
    parts: list[Any] = [TextPart(part.text) for part in record.body.parts if isinstance(part, Text)]
    return ModelResponse(parts, timestamp=datetime.fromtimestamp(record.at, UTC))


def _return_of(call: ToolCall, ended: CallEnded) -> ToolReturnPart:
    """Return the result of a call; a failure is in its text and its outcome."""
    try:
        value = value_of(ended)
    except (ModelRetry, ToolFailed) as error:
        value = error.message
    content = value.return_value if isinstance(value, ToolReturn) else value
    return ToolReturnPart(
        call.name,
        content,
        call.provider_id or call.id,
        timestamp=datetime.fromtimestamp(ended.at, UTC),
        outcome="success" if ended.result.outcome is Outcome.OK else "failed",
    )
