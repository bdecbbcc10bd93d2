"""OpenAI's chat completions: the chunks of a streamed response.

The reader is tolerant, because many servers use this format: calls may have no index or an object as arguments,
thinking has two names, usage comes with the last chunk or after it, and errors may come during a stream.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct, field

from midstream.errors import ModelFilteredError, ModelUnavailableError
from midstream.history.messages import Finish, Usage
from midstream.models.provider_errors import error_of
from midstream.models.responses import (
    Finished,
    ModelEvent,
    TextDelta,
    ThinkingDelta,
    ToolCallRequested,
    Working,
)
from midstream.models.stream_json import decode_event, encode_json

CALLS_MAX = 128
"""Calls of one response (OpenAI's own limit of tools)."""

_FINISHES = {
    "stop": Finish.STOP,
    "tool_calls": Finish.CALLS,
    "function_call": Finish.CALLS,
    "length": Finish.LENGTH,
    "content_filter": Finish.FILTER,
}


class _Function(Struct):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class _CallPiece(Struct):
    index: int | None = None
    id: str | None = None
    function: _Function = field(default_factory=_Function)
    extra_content: Any = None  # Google: `{"google": {"thought_signature": ...}}`


class _Delta(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[_CallPiece] | None = None


class _Choice(Struct):
    index: int = 0
    delta: _Delta | None = None
    finish_reason: str | None = None
    stop_reason: Any = None  # vLLM: the stop sequence, or the number of a token


class _PromptDetails(Struct):
    cached_tokens: int | None = None
    cache_write_tokens: int | None = None


class _CompletionDetails(Struct):
    reasoning_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _CompletionDetails | None = None


class CompletionChunk(Struct):
    """The used fields of one chunk."""

    choices: list[_Choice] | None = None
    model: str | None = None
    usage: _Usage | None = None
    error: Any = None  # an object by specification, a string or a number at some servers


_DECODER = msgspec.json.Decoder(CompletionChunk, strict=False)


class _Call(Struct):
    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)
    signature: str | None = None


class ChatStreamReader:
    """Converts the chunks of one response. Pass each chunk to `read`, then call `end`."""

    def __init__(self) -> None:
        self._calls: dict[int, _Call] = {}
        self._finish: Finish | None = None
        self._stop_sequence = ""
        self._model = ""
        self._usage: Usage | None = None
        self._has_output = False

    def read_json(self, data: bytes) -> list[ModelEvent]:
        """Process one chunk as JSON text, or the marker `[DONE]`. Raises like `read`."""
        if data.strip() == b"[DONE]":
            self._finish = self._finish or Finish.STOP
            return []
        return self.read(decode_event(data, _DECODER, "a chat completion chunk"))

    def read(self, chunk: CompletionChunk) -> list[ModelEvent]:
        """Process one chunk; return the new model events.

        Raises:
            ModelUnavailableError: The server failed during the response, or sent an invalid chunk.
            ModelRejectedError: It refuses the request permanently; `ContextOverflowError` for its length.
        """
        if chunk.error is not None:
            raise error_of(chunk.error)
        self._model = chunk.model or self._model
        if chunk.usage is not None:
            self._usage = _usage_of(chunk.usage)
        events: list[ModelEvent] = []
        for choice in chunk.choices or ():
            if choice.index == 0:
                events.extend(self._read_choice(choice))
        self._has_output = self._has_output or bool(events)
        return events

    def end(self) -> list[ModelEvent]:
        """Return the calls and the end of the response, after the last chunk.

        Raises:
            ModelUnavailableError: The stream ended early.
            ModelFilteredError: The content filter withheld the whole response.
        """
        if self._finish is None:
            raise ModelUnavailableError("the server's response broke off in the middle")
        if self._finish is Finish.FILTER and not self._has_output and not self._calls:
            raise ModelFilteredError("the server's content filter withheld the whole response")
        finish = Finish.CALLS if self._calls and self._finish is Finish.STOP else self._finish
        requested = [
            ToolCallRequested(call.id, call.name, "".join(call.arguments), call.signature)
            for _, call in sorted(self._calls.items())
        ]
        return [*requested, Finished(finish, self._model, self._usage, self._stop_sequence)]

    def _read_choice(self, choice: _Choice) -> list[ModelEvent]:
        if choice.finish_reason is not None:
            self._finish = _FINISHES.get(choice.finish_reason, Finish.STOP)
        if isinstance(choice.stop_reason, str):
            self._stop_sequence = choice.stop_reason
        delta = choice.delta
        if delta is None:
            return []
        events: list[ModelEvent] = []
        for piece in delta.tool_calls or ():
            self._read_call(piece)
            events.append(Working(piece.function.name or ""))
        if thinking := delta.reasoning_content or delta.reasoning:
            events.append(ThinkingDelta(thinking))
        if text := delta.content or delta.refusal:
            events.append(TextDelta(text))
        return events

    def _read_call(self, piece: _CallPiece) -> None:
        index = piece.index
        if index is None:  # then an id begins a call, and a piece without one continues the last call
            last = max(self._calls, default=-1)
            is_new = last < 0 or bool(piece.id and piece.id != self._calls[last].id)
            index = last + 1 if is_new else last
        if not 0 <= index < CALLS_MAX:
            raise ModelUnavailableError(f"the server numbers a call {index}; the limit is {CALLS_MAX}")
        call = self._calls.setdefault(index, _Call())
        call.id = call.id or piece.id or ""
        call.name = call.name or piece.function.name or ""
        call.signature = call.signature or _signature_in(piece.extra_content)
        arguments = piece.function.arguments
        if isinstance(arguments, dict):
            call.arguments.append(encode_json(arguments))
        elif arguments:
            call.arguments.append(arguments)


def _signature_in(extra: object) -> str | None:
    """Return Google's thought signature in the extras of a call, or None."""
    google = extra.get("google") if isinstance(extra, dict) else None
    signature = google.get("thought_signature") if isinstance(google, dict) else None
    return signature if isinstance(signature, str) and signature else None


def _usage_of(usage: _Usage) -> Usage:
    details, thought = usage.prompt_tokens_details, usage.completion_tokens_details
    return Usage(
        usage.prompt_tokens or 0,
        usage.completion_tokens or 0,
        (details.cached_tokens or 0) if details else 0,
        (details.cache_write_tokens or 0) if details else 0,
        (thought.reasoning_tokens or 0) if thought else 0,
    )
