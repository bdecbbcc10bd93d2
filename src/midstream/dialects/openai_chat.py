"""Server side of OpenAI's chat completions."""

from __future__ import annotations

from typing import Any

import msgspec
from typing_extensions import override

from midstream.dialects.answer_options import read_options
from midstream.dialects.api_errors import ApiError, openai_error
from midstream.dialects.declared_tools import chat_in_functions, list_chat_customs, read_input
from midstream.dialects.dialect import Asked, Dialect, Form, Writer
from midstream.dialects.request_fields import Fields, bad_field, field, texts_of
from midstream.dialects.tool_specs import tools_of
from midstream.history.messages import Finish, Usage
from midstream.models.responses import Finished, ModelEvent, TextDelta, ThinkingDelta, ToolCallRequested

_WISHES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "seed": "seed",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "max_tokens": "tokens_max",
    "max_completion_tokens": "tokens_max",
    "stop": "stop",
    "response_format": "response_format",
    "tool_choice": "forced_tool",
    "parallel_tool_calls": "parallel_calls",
    "reasoning_effort": "effort",
    "store": "store",
}
_READ = frozenset(
    {
        *("functions", "messages", "metadata", "model", "n", "prompt_cache_key", "safety_identifier"),
        *("stream", "stream_options", "tools", "user", *_WISHES),
    }
)
FINISHES = {
    Finish.STOP: "stop",
    Finish.CALLS: "tool_calls",
    Finish.LENGTH: "length",
    Finish.FILTER: "content_filter",
    Finish.INTERRUPTED: "stop",
}
DONE = b"data: [DONE]\n\n"

_json = msgspec.json.encode


def read_chat(fields: Fields, known: int = 0) -> Asked:
    """Read a request.

    Args:
        known: Number of messages from an earlier request that precede those in the fields.

    Raises:
        BadFieldError: A required field is invalid, or `n` requests several answers.
    """
    messages = field(fields, "messages", list[Any])
    if messages is None or not (messages or known):
        raise bad_field("messages", "`messages` must be a list with at least one message")
    if field(fields, "n", int) not in (None, 1):
        raise bad_field("n", "one answer a request: `n` is 1")
    ignored = sorted(fields.keys() - _READ)
    tools = tools_of(fields, ignored)
    wished = read_options(fields, _WISHES, tools)
    options = field(fields, "stream_options", dict[str, Any]) or {}
    return Asked(
        dialect=CHAT,
        model=field(fields, "model", str) or "",
        messages=messages,
        tools=tools,
        other_tools=_customs_of(fields) if "tools" in fields else {},
        is_stream=bool(field(fields, "stream", bool)),
        includes_usage=options.get("include_usage") is True,
        is_private=field(fields, "store", bool) is False,
        metadata=texts_of(fields, "metadata"),
        user=field(fields, "user", str) or field(fields, "safety_identifier", str) or "",
        cache_key=field(fields, "prompt_cache_key", str) or "",
        wished=wished,
        ignored=(*ignored, *wished.odd),
    )


def _customs_of(fields: Fields) -> dict[str, tuple[str, str, str]]:
    """Return the custom tools, which functions replace; see `Form.other_tools`."""
    declared = field(fields, "tools", list[Any]) or ()
    customs = [each for tool in declared for each in list_chat_customs(tool)]
    return {each.function_name: (each.kind, each.namespace, each.name) for each in customs}


class ChatWriter(Writer):
    """Writes `chat.completion.chunk`s, or one `chat.completion`."""

    def __init__(self, form: Form) -> None:
        self._form = form
        self._shows_thinking = form.shows_thinking
        head = {
            "id": form.id,
            "object": "chat.completion.chunk",
            "created": form.created_at,
            "model": form.model,
        }
        if self._form.includes_usage:
            head["usage"] = None
        # The common beginning of all chunks is encoded once.
        self._head = b"data: " + _json(head)[:-1] + b',"choices":[{"index":0,"delta":'
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._finished: Finished | None = None

    @override
    def begin(self) -> list[bytes]:
        return [self._chunk(b'{"role":"assistant","content":""}')]

    @override
    def write(self, event: ModelEvent) -> list[bytes]:
        match event:
            case TextDelta():
                self._texts.append(event.text)
                return [self._chunk(b'{"content":' + _json(event.text) + b"}")]
            case ThinkingDelta() if event.text and self._shows_thinking:
                self._thoughts.append(event.text)
                return [self._chunk(b'{"reasoning_content":' + _json(event.text) + b"}")]
            case ToolCallRequested():
                return self._call(event)
            case Finished():
                return self._end(event)
            case _:
                return []

    def fail(self, refusal: ApiError) -> list[bytes]:
        """See `Writer.fail`. No `[DONE]` follows an error."""
        return [b"data: " + _json(openai_error(refusal)) + b"\n\n"]

    @override
    def cancel(self, refusal: ApiError) -> list[bytes]:
        return self.fail(refusal)

    @override
    def whole(self) -> bytes:
        finished = self._finished or Finished()
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._texts) or None}
        if self._thoughts:
            message["reasoning_content"] = "".join(self._thoughts)
        if self._calls:
            message["tool_calls"] = self._calls
        elif message["content"] is None:
            message["content"] = ""
        message["refusal"] = None
        choice = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": FINISHES[finished.finish],
        }
        return _json(
            {
                "id": self._form.id,
                "object": "chat.completion",
                "created": self._form.created_at,
                "model": self._form.model,
                "choices": [choice],
                "usage": usage_in_chat(finished.usage),
            }
        )

    def _call(self, event: ToolCallRequested) -> list[bytes]:
        at = len(self._calls)
        kind, written = "function", "arguments"
        called = {"name": event.name, written: event.arguments}
        if event.name in self._form.other_tools:
            kind, written = "custom", "input"
            called = {"name": event.name, written: read_input(event.arguments)}
        call: dict[str, Any] = {"id": event.id, "type": kind, kind: called}
        if event.signature is not None:
            call["extra_content"] = {"google": {"thought_signature": event.signature}}
        self._calls.append(call)
        opening = {**call, "index": at, kind: {"name": event.name, written: ""}}
        rest = {"index": at, kind: {written: called[written]}}
        return [self._chunk(_json({"tool_calls": [piece]})) for piece in (opening, rest)]

    def _end(self, event: Finished) -> list[bytes]:
        self._finished = event
        pieces = [self._chunk(b"{}", _json(FINISHES[event.finish]))]
        if self._form.includes_usage:
            counted = {
                "id": self._form.id,
                "object": "chat.completion.chunk",
                "created": self._form.created_at,
                "model": self._form.model,
                "choices": [],
                "usage": usage_in_chat(event.usage),
            }
            pieces.append(b"data: " + _json(counted) + b"\n\n")
        return [*pieces, DONE]

    def _chunk(self, delta: bytes, finish: bytes = b"null") -> bytes:
        return b'%b%b,"logprobs":null,"finish_reason":%b}]}\n\n' % (self._head, delta, finish)


def usage_in_chat(counted: Usage | None) -> dict[str, Any] | None:
    """Return usage in the form of this API, or None if the upstream did not report it."""
    if counted is None:
        return None
    return {
        "prompt_tokens": counted.input_tokens,
        "completion_tokens": counted.output_tokens,
        "total_tokens": counted.input_tokens + counted.output_tokens,
        "prompt_tokens_details": {
            "cached_tokens": counted.cached_tokens,
            "cache_write_tokens": counted.cache_write_tokens,
        },
        "completion_tokens_details": {"reasoning_tokens": counted.reasoning_tokens},
    }


CHAT = Dialect(
    name="chat",
    path=("chat", "completions"),
    format="openai-chat",
    messages="messages",
    id_prefix="chatcmpl-",
    read=read_chat,
    writer=ChatWriter,
    in_functions=chat_in_functions,
    error=openai_error,
)
