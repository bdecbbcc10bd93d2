"""OpenAI Responses: the events of a streamed response, and the tools of a request.

Events are numbered, and the reader skips known ones, so that a stream may be resumed anywhere before its newest event.
The provider's failure is stored in `failure` and not raised: it is final, unlike an error of the connection.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct

from midstream.errors import ModelError, ModelFilteredError, ModelUnavailableError
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

_INCOMPLETE = {
    "max_output_tokens": Finish.LENGTH,
    "max_messages": Finish.LENGTH,
    "content_filter": Finish.FILTER,
}
_WORDS = {"response.output_text.delta", "response.refusal.delta"}
_THOUGHTS = {"response.reasoning_summary_text.delta", "response.reasoning_text.delta"}
_NO_NEWS = {"response.created", "response.queued", "response.in_progress"}
_ENDS = {"response.completed", "response.incomplete", "response.failed", "response.cancelled"}
_CALL = "function_call"
_UPSTREAM_CALLS = {
    "mcp_call": ("arguments", "output"),
    "web_search_call": ("action", "status"),
    "file_search_call": ("queries", "results"),
    "code_interpreter_call": ("code", "outputs"),
}
"""Items of the provider's own tools, with the fields of their arguments and results."""


class ResponsesEvent(Struct):
    """The used fields of one event."""

    type: str = ""
    sequence_number: int | None = None
    delta: Any = None
    summary_index: Any = None
    item: Any = None
    item_id: Any = None
    arguments: Any = None
    response: Any = None
    error: Any = None
    code: Any = None
    message: Any = None


_DECODER = msgspec.json.Decoder(ResponsesEvent)


class ResponsesReader:
    """Converts the events of one response. Pass each event to `read_json` until `is_ended`."""

    def __init__(self) -> None:
        self.response_id = ""
        """The provider's id of the response; "" before it was sent."""
        self.sequence = -1
        """The number of the newest event that was read."""
        self.is_ended = False
        self.failure: ModelError | None = None
        """The provider's failure, or None."""
        self._calls: list[ToolCallRequested] = []
        self._upstream_calls: dict[str, str] = {}
        """Names of the provider's own calls, by id, until their arguments are complete."""
        self._has_text = False

    def read_json(self, data: bytes) -> list[ModelEvent]:
        """Process one event as JSON text; return the new model events.

        Raises:
            ModelUnavailableError: It is not an event of the Responses API.
        """
        event = decode_event(data, _DECODER, "an event of a response")
        if self.is_ended:
            return []
        if event.sequence_number is not None:
            if event.sequence_number <= self.sequence:
                return []
            self.sequence = event.sequence_number
        if isinstance(event.response, dict) and isinstance(event.response.get("id"), str):
            self.response_id = event.response["id"]
        return self._read(event)

    def _read(self, event: ResponsesEvent) -> list[ModelEvent]:
        kind = event.type
        text = event.delta if isinstance(event.delta, str) else ""
        if kind in _WORDS:
            self._has_text = self._has_text or bool(text)
            return [TextDelta(text)]
        if kind in _THOUGHTS:
            return [ThinkingDelta(text)]
        if kind == "response.reasoning_summary_part.added" and event.summary_index not in (None, 0):
            return [ThinkingDelta("\n\n")]
        if kind in _NO_NEWS:
            return [KeepAlive()]
        if kind in _ENDS:
            return self._end(kind, event.response if isinstance(event.response, dict) else {})
        if kind == "error":
            fields = (
                event.error if event.error is not None else {"code": event.code, "message": event.message}
            )
            return self._fail(error_of(fields))
        if kind == "response.output_item.done":
            self._calls += _calls_in([event.item])
        return self._upstream_call(event) or [Working(_name_of(event.item))]

    def _upstream_call(self, event: ResponsesEvent) -> list[ModelEvent]:
        """Report a call of the provider's own tool when its arguments are complete."""
        if event.type == "response.mcp_call_arguments.done":
            name = self._upstream_calls.pop(str(event.item_id), None)
            return [UpstreamCallStarted(str(event.item_id), name, str(event.arguments))] if name else []
        item = event.item
        if not isinstance(item, dict) or item.get("type") not in _UPSTREAM_CALLS:
            return []
        call, name = str(item.get("id") or ""), _upstream_name(item)
        if event.type == "response.output_item.added":
            self._upstream_calls[call] = name
            return []
        if event.type != "response.output_item.done":
            return []
        is_new = self._upstream_calls.pop(call, None) is not None
        started = [UpstreamCallStarted(call, name, _upstream_arguments(item))] if is_new else []
        return [*started, _upstream_end(call, item)]

    def _end(self, kind: str, response: dict[str, Any]) -> list[ModelEvent]:
        if kind == "response.failed":
            return self._fail(error_of(response.get("error")))
        if kind == "response.cancelled":
            return self._fail(ModelUnavailableError("the response was stopped at the provider"))
        output = response.get("output")
        calls = _calls_in(output) if isinstance(output, list) else []
        finish = Finish.STOP
        if kind == "response.incomplete":
            details = response.get("incomplete_details")
            reason = details.get("reason") if isinstance(details, dict) else None
            finish = _INCOMPLETE.get(str(reason), Finish.STOP)
        words: list[ModelEvent] = []
        if not self._has_text and (text := _text_in(output)):
            words = [TextDelta(text)]
        calls = calls or self._calls
        if finish is Finish.FILTER and not (self._has_text or words or calls):
            return self._fail(ModelFilteredError("the server's content filter withheld the whole response"))
        self.is_ended = True
        if calls and finish is Finish.STOP:
            finish = Finish.CALLS
        model = response.get("model")
        return [
            *words,
            *calls,
            Finished(finish, model if isinstance(model, str) else "", _usage_of(response.get("usage"))),
        ]

    def _fail(self, error: ModelError) -> list[ModelEvent]:
        self.is_ended, self.failure = True, error
        return []


def render_tools(tools: Iterable[ToolSpec]) -> list[dict[str, Any]]:
    """Return the `tools` of a request."""
    return [
        {
            "type": "function",
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters or {"type": "object", "properties": {}},
            "strict": bool(tool.strict),
        }
        for tool in tools
    ]


def _calls_in(items: Iterable[Any]) -> list[ToolCallRequested]:
    found = (item for item in items if isinstance(item, dict) and item.get("type") == _CALL)
    return [
        ToolCallRequested(*(str(item.get(key) or "") for key in ("call_id", "name", "arguments")))
        for item in found
    ]


def _name_of(item: object) -> str:
    return str(item.get("name") or "") if isinstance(item, dict) else ""


def _text_in(output: object) -> str:
    """Return the text of a complete response, for servers that do not stream it."""
    items = output if isinstance(output, list) else []
    contents = (item.get("content") for item in items if isinstance(item, dict))
    pieces = (piece for content in contents if isinstance(content, list) for piece in content)
    texts = (piece.get("text") or piece.get("refusal") for piece in pieces if isinstance(piece, dict))
    return "".join(text for text in texts if isinstance(text, str))


def _usage_of(usage: object) -> Usage | None:
    if not isinstance(usage, dict):
        return None
    read, made = (usage.get(f"{way}_tokens_details") for way in ("input", "output"))
    parts = {**(read if isinstance(read, dict) else {}), **(made if isinstance(made, dict) else {})}
    whole = (usage.get("input_tokens"), usage.get("output_tokens"))
    counts = (*whole, *(parts.get(f"{kind}_tokens") for kind in ("cached", "cache_write", "reasoning")))
    return Usage(*(count if isinstance(count, int) else 0 for count in counts))


def _upstream_name(item: dict[str, Any]) -> str:
    return _name_of(item) or str(item["type"]).removesuffix("_call")


def _upstream_arguments(item: dict[str, Any]) -> str:
    value = item.get(_UPSTREAM_CALLS[item["type"]][0])
    return value if isinstance(value, str) and item["type"] == "mcp_call" else encode_json(value)


def _upstream_end(call: str, item: dict[str, Any]) -> UpstreamCallEnded:
    if item.get("error") or item.get("status") == "failed":
        return UpstreamCallEnded(call, _text(item.get("error")), Outcome.ERROR)
    return UpstreamCallEnded(call, _text(item.get(_UPSTREAM_CALLS[item["type"]][1])))


def _text(value: object) -> str:
    return value if isinstance(value, str) else encode_json(value)
