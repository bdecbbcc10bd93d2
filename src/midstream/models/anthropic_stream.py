"""Anthropic Messages: the events of a streamed response, and the tools of a request.

A response has successive blocks, each with a start, deltas and a stop. The reader is tolerant, because other servers
use this format, too: a block without a stop is used as received, token counts may come at the beginning or at the end,
and unknown events and blocks are skipped.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct, field

from midstream.errors import ContextOverflowError, ModelFilteredError, ModelUnavailableError
from midstream.history.codecs.codec_spec import Json
from midstream.history.messages import Finish, Outcome, ToolSpec, Usage
from midstream.models.provider_errors import error_of
from midstream.models.responses import (
    Finished,
    KeepAlive,
    ModelEvent,
    TextDelta,
    ThinkingDelta,
    ToolCallRequested,
    UpstreamCallEnded,
    UpstreamCallStarted,
    Working,
)
from midstream.models.stream_json import decode_event, encode_json

BLOCKS_MAX = 128
"""Blocks of one response that may be open at once (Anthropic opens one)."""

_WINDOW_FULL = "model_context_window_exceeded"
_STOPS = {
    "end_turn": Finish.STOP,
    "stop_sequence": Finish.STOP,
    "tool_use": Finish.CALLS,
    "max_tokens": Finish.LENGTH,
    _WINDOW_FULL: Finish.LENGTH,
    "pause_turn": Finish.LENGTH,  # Anthropic's limit of rounds with its own tools ended the response
    "refusal": Finish.FILTER,
}
_UPSTREAM_CALLS = ("server_tool_use", "mcp_tool_use")
_COUNTS = ("input_tokens", "output_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
_SEALED = "encrypted_"
"""Beginnings of the names of members that only the provider can read."""


class AnthropicEvent(Struct):
    """The used fields of one event."""

    type: str = ""
    index: Any = None
    message: Any = None
    content_block: Any = None
    delta: Any = None
    usage: Any = None
    error: Any = None


_DECODER = msgspec.json.Decoder(AnthropicEvent)


class _Block(Struct):
    """A block that is not closed yet."""

    start: Json
    pieces: list[str] = field(default_factory=list)
    signature: str = ""


class MessageReader:
    """Converts the events of one response. Pass each event to `read_json`, then call `end`."""

    def __init__(self) -> None:
        self._open: dict[int, _Block] = {}
        self._stop_reason = ""
        self._stop_sequence = ""
        self._is_over = False
        self._model = ""
        self._counts: dict[str, int] = {}
        self._has_output = False
        self._has_called = False

    def read_json(self, data: bytes) -> list[ModelEvent]:
        """Process one event as JSON text; return the new model events.

        Raises:
            ModelUnavailableError: The server failed during the response, or sent an invalid event.
            ModelError: Another error of the provider: see `midstream.models.provider_errors`.
        """
        event = decode_event(data, _DECODER, "an event of a message")
        if self._is_over:
            return []
        return self._note(self._read(event))

    def end(self) -> list[ModelEvent]:
        """Return the open blocks and the end of the response, after the last event.

        Raises:
            ModelUnavailableError: The stream ended early.
            ModelFilteredError: The model refused without any other output.
            ContextOverflowError: The conversation left no room for a response.
        """
        if not self._is_over and not self._stop_reason:
            raise ModelUnavailableError("the server's response broke off in the middle")
        left = self._note([event for index in sorted(self._open) for event in self._close_block(index)])
        if not (self._has_output or self._has_called):
            if self._stop_reason == "refusal":
                raise ModelFilteredError("the model refused to answer")
            if self._stop_reason == _WINDOW_FULL:
                raise ContextOverflowError("the conversation leaves no room for a response")
        finish = _STOPS.get(self._stop_reason, Finish.STOP)
        if self._has_called and finish is Finish.STOP:
            finish = Finish.CALLS
        return [*left, Finished(finish, self._model, self._usage(), self._stop_sequence)]

    def _read(self, event: AnthropicEvent) -> list[ModelEvent]:
        kind = event.type
        if kind == "error" or event.error is not None:
            raise error_of(event.error)
        if kind == "content_block_start":
            return self._open_block(_index_of(event), _object(event.content_block))
        if kind == "content_block_delta":
            return self._grow_block(_index_of(event), _object(event.delta))
        if kind == "content_block_stop":
            return self._close_block(_index_of(event))
        if kind == "message_start":
            message = _object(event.message)
            self._model = _text(message.get("model"))
            self._count(message.get("usage"))
        elif kind == "message_delta":
            delta = _object(event.delta)
            self._stop_reason = _text(delta.get("stop_reason")) or self._stop_reason
            self._stop_sequence = _text(delta.get("stop_sequence")) or self._stop_sequence
            self._count(event.usage)
        elif kind == "message_stop":
            self._is_over = True
        return [KeepAlive()]

    def _note(self, events: list[ModelEvent]) -> list[ModelEvent]:
        for event in events:
            match event:
                case ToolCallRequested():
                    self._has_called = True
                case TextDelta(text=text) if text:
                    self._has_output = True
                case UpstreamCallStarted() | UpstreamCallEnded():
                    self._has_output = True
                case _:
                    pass
        return events

    def _open_block(self, index: int, start: Json) -> list[ModelEvent]:
        before = self._close_block(index)
        kind = _text(start.get("type"))
        self._open[index] = _Block(start, signature=_text(start.get("signature")))
        if len(self._open) > BLOCKS_MAX:
            raise ModelUnavailableError(f"the server leaves more than {BLOCKS_MAX} blocks open")
        if kind == "text":
            return [*before, TextDelta(_text(start.get("text")))]
        if kind == "thinking":
            return [*before, ThinkingDelta(_text(start.get("thinking")))]
        if kind == "redacted_thinking":
            return [*before, ThinkingDelta("", _text(start.get("data")), is_redacted=True)]
        if kind.endswith("_tool_result"):
            return [*before, _upstream_end(start)]
        return [*before, Working(_text(start.get("name")))]

    def _grow_block(self, index: int, delta: Json) -> list[ModelEvent]:
        kind = delta.get("type")
        if kind == "text_delta":
            return [TextDelta(_text(delta.get("text")))]
        if kind == "thinking_delta":
            return [ThinkingDelta(_text(delta.get("thinking")))]
        block = self._open.get(index)
        if block is None:
            raise ModelUnavailableError(f"the server continues block {index}, which it never started")
        if kind == "input_json_delta":
            block.pieces.append(_text(delta.get("partial_json")))
        elif kind == "signature_delta":
            block.signature = _text(delta.get("signature"))
        return [Working(_text(block.start.get("name")))]

    def _close_block(self, index: int) -> list[ModelEvent]:
        block = self._open.pop(index, None)
        if block is None:
            return []
        kind, call = block.start.get("type"), _text(block.start.get("id"))
        if kind == "tool_use":
            # Missing arguments stay "", which identifies a call that was cut before it had any.
            return [ToolCallRequested(call, _text(block.start.get("name")), _arguments_of(block))]
        if kind in _UPSTREAM_CALLS:
            return [UpstreamCallStarted(call, _text(block.start.get("name")), _arguments_of(block) or "{}")]
        if kind == "thinking" and block.signature:
            return [ThinkingDelta("", block.signature)]
        return []

    def _count(self, usage: object) -> None:
        """Update the counts. They only grow within a response; servers may send them at its beginning or end."""
        for name in _COUNTS:
            count = _object(usage).get(name)
            if isinstance(count, int):
                self._counts[name] = max(count, self._counts.get(name, 0))

    def _usage(self) -> Usage | None:
        if not self._counts:
            return None
        plain, written, made, read = (self._counts.get(name, 0) for name in _COUNTS)
        return Usage(plain + made + read, written, read, made)


def render_tools(tools: Iterable[ToolSpec]) -> list[dict[str, Any]]:
    """Return the `tools` of a request."""
    return [
        {"name": tool.name}
        | ({"description": tool.description} if tool.description else {})
        | {"input_schema": {"type": "object"} | (tool.parameters or {"properties": {}})}
        | ({"strict": True} if tool.strict else {})
        for tool in tools
    ]


def _arguments_of(block: _Block) -> str:
    """Return arguments as the model wrote them; some servers send them complete at the beginning."""
    written = "".join(block.pieces)
    whole = block.start.get("input")
    return written if written or not whole else encode_json(whole)


def _upstream_end(block: Json) -> UpstreamCallEnded:
    content = block.get("content")
    kind = _text(_object(content).get("type"))
    has_failed = block.get("is_error") is True or kind.endswith("_error")
    outcome = Outcome.ERROR if has_failed else Outcome.OK
    return UpstreamCallEnded(_text(block.get("tool_use_id")), _words_of(content), outcome)


def _words_of(content: object) -> str:
    """Return a result as text: its text, else its JSON without members that only the provider can read."""
    if isinstance(content, str):
        return content
    blocks = content if isinstance(content, list) else [content]
    return "\n".join(map(_words_of_block, blocks))


def _words_of_block(block: object) -> str:
    if isinstance(block, dict) and block.get("type") == "text" and isinstance(block.get("text"), str):
        return _text(block["text"])
    return encode_json(_without_sealed(block))


def _without_sealed(value: object) -> object:
    if isinstance(value, list):
        return [_without_sealed(each) for each in value]
    if isinstance(value, dict):
        return {key: _without_sealed(each) for key, each in value.items() if not key.startswith(_SEALED)}
    return value


def _index_of(event: AnthropicEvent) -> int:
    return event.index if isinstance(event.index, int) else -1


def _object(value: object) -> Json:
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
