"""Server side of Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from typing_extensions import override

from midstream.dialects.answer_options import read_options
from midstream.dialects.api_errors import INSUFFICIENT_QUOTA, OVERLOADED, SERVER_FAULTS, ApiError
from midstream.dialects.dialect import Asked, Dialect, Form, Writer
from midstream.dialects.request_fields import Fields, bad_field, field, texts_of
from midstream.dialects.tool_specs import tools_of
from midstream.history.codecs.codec_spec import Value
from midstream.history.messages import Finish, ToolCall, Usage
from midstream.history.rendering import arguments_of
from midstream.history.repair.system_prompts import words_of_system
from midstream.models.responses import Finished, ModelEvent, TextDelta, ThinkingDelta, ToolCallRequested

CHARS_PER_TOKEN = 4
"""Estimate of characters for each token; for prose, real tokenizers differ by less than a third."""
_WISHES: Mapping[str, str | tuple[str, ...]] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "max_tokens": "tokens_max",
    "stop_sequences": "stop",
    "tool_choice": ("forced_tool", "parallel_calls"),
    "output_config": ("effort", "response_format"),
    "output_format": "response_format",
}
_READ = frozenset({"messages", "metadata", "model", "stream", "system", "thinking", "tools", *_WISHES})
_STOPS = {
    Finish.STOP: "end_turn",
    Finish.CALLS: "tool_use",
    Finish.LENGTH: "max_tokens",
    Finish.FILTER: "refusal",
    Finish.INTERRUPTED: "end_turn",
}
_NO_STOP = {"stop_reason": None, "stop_sequence": None}
_COUNTER = "x-anthropic-billing-header:"
OVERLOADED_STATUS = 529
PAYMENT_STATUS = 402
_ERROR_TYPES = {
    402: "billing_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
    504: "timeout_error",
}
PING = b'event: ping\ndata: {"type":"ping"}\n\n'

_json = msgspec.json.encode


def read_messages(fields: Fields, known: int = 0) -> Asked:
    """Read a request.

    Args:
        known: Number of messages from an earlier request that precede those in the fields.

    Raises:
        BadFieldError: A required field is invalid.
    """
    messages = field(fields, "messages", list[Any])
    if messages is None or not (messages or known):
        raise bad_field("messages", "`messages` must be a list with at least one message")
    ignored = sorted(fields.keys() - _READ)
    tools = tools_of(fields, ignored)
    wished = read_options(fields, _WISHES, tools)
    thinking = field(fields, "thinking", object)
    is_thinking = isinstance(thinking, dict) and thinking.get("type") in ("enabled", "adaptive")
    metadata = texts_of(fields, "metadata")
    return Asked(
        dialect=MESSAGES,
        model=field(fields, "model", str) or "",
        messages=messages,
        instructions=_instructions(field(fields, "system", object)),
        tools=tools,
        is_stream=bool(field(fields, "stream", bool)),
        shows_thinking=is_thinking,
        metadata=metadata,
        user=metadata.get("user_id", ""),
        wished=wished,
        ignored=(*ignored, *wished.odd),
    )


def _instructions(system: Value) -> str:
    """Return the system prompt without Claude Code's counter block, which differs in every request."""
    if isinstance(system, list):
        system = [block for block in system if not _is_counter(block)]
    return words_of_system(system)


def _is_counter(block: Value) -> bool:
    words = block.get("text") if isinstance(block, dict) else None
    return isinstance(words, str) and words.startswith(_COUNTER)


def estimate_tokens(fields: Fields) -> int:
    """Estimate the tokens of a request by its length, because models count tokens only when they answer."""
    counted = (fields[name] for name in ("system", "messages", "tools") if name in fields)
    return max(1, sum(len(raw) for raw in map(bytes, counted)) // CHARS_PER_TOKEN)


class MessagesWriter(Writer):
    """Writes `message_start` … `message_stop`, or one `message`."""

    def __init__(self, form: Form) -> None:
        self._form = form
        self._shows_thinking = form.shows_thinking
        self._blocks: list[dict[str, Any]] = []
        self._pieces: list[str] = []
        """Text of the open block."""
        self._open = ""
        """Type of the open block; "" between blocks."""
        self._signature = ""
        self._finished: Finished | None = None

    @override
    def begin(self) -> list[bytes]:
        message = self._message([], _NO_STOP, usage_in_messages(None))
        return [_event("message_start", {"message": message}), PING]

    @override
    def write(self, event: ModelEvent) -> list[bytes]:
        match event:
            case TextDelta():
                return self._append_text("text", event.text)
            case ThinkingDelta() if self._shows_thinking:
                pieces = self._append_text("thinking", event.text) if event.text else []
                if event.signature is not None and self._open == "thinking":
                    self._signature = event.signature
                    pieces += [
                        self._delta({"type": "signature_delta", "signature": event.signature}),
                        *self._close(),
                    ]
                return pieces
            case ToolCallRequested():
                return [*self._close(), *self._call(event)]
            case Finished():
                return self._end(event)
            case _:
                return []

    @override
    def fail(self, refusal: ApiError) -> list[bytes]:
        return [b"event: error\ndata: " + _json(anthropic_error(refusal)) + b"\n\n"]

    @override
    def cancel(self, refusal: ApiError) -> list[bytes]:
        return self.fail(refusal)

    @override
    def whole(self) -> bytes:
        finished = self._finished or Finished()
        return _json(self._message(self._blocks, _stop_of(finished), usage_in_messages(finished.usage)))

    def _message(
        self, blocks: list[dict[str, Any]], stop: Mapping[str, str | None], usage: Mapping[str, int]
    ) -> dict[str, Any]:
        return {
            "id": self._form.id,
            "type": "message",
            "role": "assistant",
            "model": self._form.model,
            "content": blocks,
            **stop,
            "usage": usage,
        }

    def _append_text(self, kind: str, words: str) -> list[bytes]:
        pieces: list[bytes] = []
        if self._open != kind:
            pieces = self._close()
            self._open = kind
            block = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
            pieces.append(self._start(block))
        self._pieces.append(words)
        return [*pieces, self._delta({"type": f"{kind}_delta", kind: words})]

    def _call(self, event: ToolCallRequested) -> list[bytes]:
        _, arguments = arguments_of(ToolCall(event.id, event.name, event.arguments))
        block = {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
        pieces = [
            self._start(block),
            self._delta({"type": "input_json_delta", "partial_json": arguments}),
            _event("content_block_stop", {"index": len(self._blocks)}),
        ]
        self._blocks.append({**block, "input": msgspec.Raw(arguments.encode())})
        return pieces

    def _close(self) -> list[bytes]:
        if not self._open:
            return []
        stop = _event("content_block_stop", {"index": len(self._blocks)})
        words = "".join(self._pieces)
        signed = {"signature": self._signature} if self._open == "thinking" else {}
        self._blocks.append({"type": self._open, self._open: words, **signed})
        self._open, self._pieces, self._signature = "", [], ""
        return [stop]

    def _end(self, event: Finished) -> list[bytes]:
        pieces = self._close()
        self._finished = event
        usage = usage_in_messages(event.usage)
        return [
            *pieces,
            _event("message_delta", {"delta": _stop_of(event), "usage": usage}),
            _event("message_stop", {}),
        ]

    def _start(self, block: dict[str, Any]) -> bytes:
        return _event("content_block_start", {"index": len(self._blocks), "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", {"index": len(self._blocks), "delta": delta})


def _stop_of(end: Finished) -> dict[str, str | None]:
    """Return the stop reason of a response, and the stop sequence if the upstream reported it."""
    if end.finish is Finish.STOP and end.stop_sequence:
        return {"stop_reason": "stop_sequence", "stop_sequence": end.stop_sequence}
    return {"stop_reason": _STOPS[end.finish], "stop_sequence": None}


def usage_in_messages(usage: Usage | None) -> dict[str, int]:
    """Return usage in the form of this API, which counts cached tokens separately."""
    counted = usage or Usage()
    return {
        "input_tokens": max(0, counted.input_tokens - counted.cached_tokens - counted.cache_write_tokens),
        "cache_creation_input_tokens": counted.cache_write_tokens,
        "cache_read_input_tokens": counted.cached_tokens,
        "output_tokens": counted.output_tokens,
    }


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _json({"type": kind, **fields}))


def anthropic_error(refusal: ApiError) -> dict[str, Any]:
    """Return a refusal as an error object of this API, for bodies and streams."""
    fault = "api_error" if refusal.status >= SERVER_FAULTS else "invalid_request_error"
    kind = _ERROR_TYPES.get(anthropic_status(refusal), fault)
    return {"type": "error", "error": {"type": kind, "message": refusal.message}}


def anthropic_status(refusal: ApiError) -> int:
    """Return the HTTP status of a refusal; overload and missing credit have special ones."""
    if refusal.code == INSUFFICIENT_QUOTA:
        return PAYMENT_STATUS
    return OVERLOADED_STATUS if refusal.status == OVERLOADED else refusal.status


MESSAGES = Dialect(
    name="messages",
    path=("messages",),
    format="anthropic",
    messages="messages",
    id_prefix="msg_",
    read=read_messages,
    writer=MessagesWriter,
    error=anthropic_error,
    status=anthropic_status,
    keep_alive=PING,
)
