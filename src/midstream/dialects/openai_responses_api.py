"""Server side of OpenAI's Responses API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from typing_extensions import override

from midstream.dialects.answer_options import STRICT_FIELD, read_options
from midstream.dialects.api_errors import (
    CONTEXT_LENGTH_EXCEEDED,
    INSUFFICIENT_QUOTA,
    RATE_LIMIT_EXCEEDED,
    RATE_LIMITED,
    ApiError,
    openai_error,
)
from midstream.dialects.compacted_items import expand_compacted
from midstream.dialects.declared_tools import SEARCH, in_functions, list_others, loaded_tools, read_input
from midstream.dialects.dialect import Asked, Dialect, Form, Writer
from midstream.dialects.request_fields import Fields, bad_field, field, texts_of
from midstream.dialects.tool_specs import tools_of
from midstream.history.codecs.codec_spec import Json, Value
from midstream.history.messages import Finish, ToolCall, Usage
from midstream.history.rendering import arguments_of
from midstream.models.responses import Finished, ModelEvent, TextDelta, ThinkingDelta, ToolCallRequested

_WISHES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "max_output_tokens": "tokens_max",
    "text": "response_format",
    "tool_choice": "forced_tool",
    "parallel_tool_calls": "parallel_calls",
    "reasoning": "effort",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "store": "store",
}
_READ = frozenset(
    {
        *("background", "client_metadata", "conversation", "input", "instructions", "metadata", "model"),
        *("previous_response_id", "prompt_cache_key", "safety_identifier", "stream", "stream_options"),
        *("tools", "user", *_WISHES),
    }
)
_ECHOED = (
    "frequency_penalty",
    "instructions",
    "max_output_tokens",
    "metadata",
    "parallel_tool_calls",
    "presence_penalty",
    "previous_response_id",
    "prompt_cache_key",
    "reasoning",
    "safety_identifier",
    "temperature",
    "text",
    "tool_choice",
    "tools",
    "top_p",
    "user",
)
_DEFAULTS: Json = {
    "frequency_penalty": 0,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "presence_penalty": 0,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "temperature": 1,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1,
    "truncation": "disabled",
}
"""The API's documented defaults of omitted fields; also the values of fields that are not supported."""
_FUNCTION: Json = {"description": None, "parameters": None, "strict": None}
_CUT = {Finish.LENGTH: "max_output_tokens", Finish.FILTER: "content_filter"}

_ID_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "tool_search_call": "tsc",
}

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]

_json = msgspec.json.encode


def read_responses(fields: Fields, known: int = 0) -> Asked:
    """Read a request.

    Args:
        known: Number of items from an earlier request that precede those in the fields.

    Raises:
        BadFieldError: A required field is invalid, or requests a feature that the gateway does not have.
    """
    sent = field(fields, "input", object)
    if isinstance(sent, str):
        sent = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": sent}]}]
    previous = field(fields, "previous_response_id", str) or ""
    conversation = _conversation_of(fields)
    if sent is None and (previous or conversation):
        sent = []
    if not isinstance(sent, list) or not (sent or previous or conversation or known):
        raise bad_field("input", "`input` must be a text or a list of items")
    is_stored = field(fields, "store", bool) is not False
    if conversation and (previous or not is_stored):
        raise bad_field("conversation", "`conversation` needs `store`, and excludes `previous_response_id`")
    is_background = bool(field(fields, "background", bool))
    if is_background and not is_stored:
        raise bad_field("background", "`background` needs `store`, because the answer is requested later")
    ignored = sorted(fields.keys() - _READ)
    loaded = loaded_tools(sent)
    tools = tools_of(fields, ignored, loaded=loaded)
    wished = read_options(fields, _WISHES, tools)
    return Asked(
        dialect=RESPONSES,
        model=field(fields, "model", str) or "",
        messages=sent,
        instructions=field(fields, "instructions", str) or "",
        tools=tools,
        other_tools={
            each.function_name: (each.kind, each.namespace, each.name)
            for tool in [*(field(fields, "tools", list[Any]) or ()), *loaded]
            for each in list_others(tool)
        },
        is_stream=bool(field(fields, "stream", bool)),
        is_background=is_background,
        is_stored=is_stored,
        is_private=not is_stored,
        previous=previous,
        conversation=conversation,
        metadata=texts_of(fields, "metadata"),
        user=field(fields, "user", str) or field(fields, "safety_identifier", str) or "",
        cache_key=field(fields, "prompt_cache_key", str) or "",
        echo={name: field(fields, name, object) for name in _ECHOED if name in fields}
        | ({"conversation": {"id": conversation}} if conversation else {}),
        wished=wished,
        ignored=(*ignored, *wished.odd),
    )


def _conversation_of(fields: Fields) -> str:
    value = field(fields, "conversation", object)
    name = value.get("id") if isinstance(value, dict) else value
    if name is not None and not isinstance(name, str):
        raise bad_field("conversation", "`conversation` must be an id, or an object with an `id`")
    return name or ""


def list_items(messages: list[Value], response_id: str) -> list[Value]:
    """Return the items of a request for a listing: each with its type and an id."""
    listed = []
    for at, item in enumerate(messages):
        whole: Json = dict(item) if isinstance(item, dict) else {"role": "user", "content": str(item)}
        whole.setdefault("type", "message")
        if not whole.get("id"):
            whole["id"] = f"in_{response_id.removeprefix('resp_')}_{at}"
        if isinstance(whole.get("content"), str):
            kind = "output_text" if whole.get("role") == "assistant" else "input_text"
            whole["content"] = [{"type": kind, "text": whole["content"]}]
        listed.append(whole)
    return listed


class ResponsesWriter(Writer):
    """Writes the numbered events of a response, or one `response`."""

    def __init__(self, form: Form) -> None:
        self._suffix = form.id.removeprefix("resp_")
        self._other_tools = form.other_tools
        self._fixed: Json = {
            "id": form.id,
            "object": "response",
            "created_at": form.created_at,
            "model": form.model,
            "background": form.is_background,
            "store": form.is_stored,
            **_settings(form),
        }
        self._ended_at = 0.0
        self._sequence = 0
        self._output: list[Json] = []
        """Completed items."""
        self._open: Literal["", "message", "reasoning"] = ""
        self._words: list[str] = []
        """Id of the open item."""
        self.response: Json = self._in_state("in_progress")
        """The response so far."""

    @override
    def begin(self) -> list[bytes]:
        return [
            self._event("response.created", {"response": self.response}),
            self._event("response.in_progress", {"response": self.response}),
        ]

    @override
    def write(self, event: ModelEvent) -> list[bytes]:
        match event:
            case TextDelta():
                opened = self._open_item("message")
                place = {"item_id": self._item_id(), "output_index": len(self._output), "content_index": 0}
                self._words.append(event.text)
                text_delta = {**place, "delta": event.text, "logprobs": []}
                return [*opened, self._event("response.output_text.delta", text_delta)]
            case ThinkingDelta() if event.text:
                opened = self._open_item("reasoning")
                place = {"item_id": self._item_id(), "output_index": len(self._output), "summary_index": 0}
                self._words.append(event.text)
                thought = {**place, "delta": event.text}
                return [*opened, self._event("response.reasoning_summary_text.delta", thought)]
            case ToolCallRequested():
                return [*self._close(), *self._call(event)]
            case Finished():
                return self._end(event)
            case _:
                return []

    @override
    def fail(self, refusal: ApiError) -> list[bytes]:
        is_pause = refusal.status == RATE_LIMITED and refusal.code != INSUFFICIENT_QUOTA
        code = RATE_LIMIT_EXCEEDED if is_pause else refusal.code
        error = {"code": code, "message": refusal.message}
        return self._stop("failed", error=error)

    @override
    def cancel(self, refusal: ApiError) -> list[bytes]:
        del refusal  # this API has a status `cancelled`
        return self._stop("cancelled")

    @override
    def whole(self) -> bytes:
        return _json(self.response)

    @override
    def end_at(self, at: float) -> None:
        self._ended_at = at

    def _stop(self, status: Status, *, error: Json | None = None) -> list[bytes]:
        pieces = self._close("incomplete")
        self.response = self._in_state(status, error=error)
        return [*pieces, self._event(f"response.{status}", {"response": self.response})]

    def _end(self, event: Finished) -> list[bytes]:
        reason = _CUT.get(event.finish)
        pieces = self._close("incomplete" if reason else "completed")
        status: Status = "incomplete" if reason else "completed"
        details = {"reason": reason} if reason else None
        self.response = self._in_state(status, details=details, usage=usage_in_responses(event.usage))
        return [*pieces, self._event(f"response.{status}", {"response": self.response})]

    def _in_state(
        self,
        status: Status,
        *,
        error: Json | None = None,
        details: Json | None = None,
        usage: Json | None = None,
    ) -> Json:
        completed_at = int(self._ended_at) if status == "completed" else None
        changing = {"error": error, "incomplete_details": details, "output": [*self._output], "usage": usage}
        return {**self._fixed, "status": status, "completed_at": completed_at, **changing}

    # --- items ------------------------------------------------------------------------------------------------

    def _item_id(self, kind: str = "") -> str:
        prefix = _ID_PREFIXES[kind or self._open]
        return f"{prefix}_{self._suffix}_{len(self._output)}"

    def _item(self, status: str, words: str | None) -> Json:
        """Return the open item; with `words` None, the item as it begins."""
        item: Json = {"id": self._item_id(), "type": self._open, "status": status}
        if self._open == "reasoning":
            return {**item, "summary": [] if words is None else [{"type": "summary_text", "text": words}]}
        return {**item, "role": "assistant", "content": [] if words is None else [_output_text(words)]}

    def _open_item(self, kind: Literal["message", "reasoning"]) -> list[bytes]:
        if self._open == kind:
            return []
        pieces = self._close()
        self._open = kind
        place: Json = {"item_id": self._item_id(), "output_index": len(self._output)}
        added = {"output_index": len(self._output), "item": self._item("in_progress", None)}
        pieces.append(self._event("response.output_item.added", added))
        if kind == "reasoning":
            part = {"type": "summary_text", "text": ""}
            pieces.append(
                self._event(
                    "response.reasoning_summary_part.added", {**place, "summary_index": 0, "part": part}
                )
            )
        else:
            begun = {**place, "content_index": 0, "part": _output_text("")}
            pieces.append(self._event("response.content_part.added", begun))
        return pieces

    def _close(self, status: str = "completed") -> list[bytes]:
        if not self._open:
            return []
        words, self._words = "".join(self._words), []
        place: Json = {"item_id": self._item_id(), "output_index": len(self._output)}
        if self._open == "reasoning":
            place["summary_index"] = 0
            done = ("response.reasoning_summary_text.done", {**place, "text": words})
            part = {"type": "summary_text", "text": words}
            ended = ("response.reasoning_summary_part.done", {**place, "part": part})
        else:
            place["content_index"] = 0
            done = ("response.output_text.done", {**place, "text": words, "logprobs": []})
            ended = ("response.content_part.done", {**place, "part": _output_text(words)})
        item = self._item(status, words)
        pieces = [self._event(*done), self._event(*ended), self._item_done(item)]
        self._output.append(item)
        self._open = ""
        return pieces

    def _call(self, event: ToolCallRequested) -> list[bytes]:
        kind, namespace, name = self._other_tools.get(event.name, ("function", "", event.name))
        if kind == SEARCH:
            return self._search(event)
        group = {"namespace": namespace} if namespace else {}
        item: Json = {"status": "in_progress", "call_id": event.id, "name": name, **group}
        at = len(self._output)
        if kind == "custom":
            text = read_input(event.arguments)
            item = {"id": self._item_id("custom_tool_call"), "type": "custom_tool_call", **item, "input": ""}
            whole = {**item, "status": "completed", "input": text}
            delta, done = "response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"
            ended: Json = {"input": text}
        else:
            text = event.arguments
            item = {"id": self._item_id("function_call"), "type": "function_call", **item, "arguments": ""}
            whole = {**item, "status": "completed", "arguments": text}
            delta, done = "response.function_call_arguments.delta", "response.function_call_arguments.done"
            ended = {"name": name, "arguments": text}
        place = {"item_id": item["id"], "output_index": at}
        pieces = [
            self._event("response.output_item.added", {"output_index": at, "item": item}),
            self._event(delta, {**place, "delta": text}),
            self._event(done, {**place, **ended}),
            self._item_done(whole),
        ]
        self._output.append(whole)
        return pieces

    def _search(self, event: ToolCallRequested) -> list[bytes]:
        """Return the events of a call of the application's tool search, whose arguments are an object."""
        _, arguments = arguments_of(ToolCall(event.id, event.name, event.arguments))
        item: Json = {
            "id": self._item_id("tool_search_call"),
            "type": "tool_search_call",
            "status": "completed",
            "call_id": event.id,
            "execution": "client",
            "arguments": msgspec.Raw(arguments.encode()),
        }
        begun = {"output_index": len(self._output), "item": {**item, "status": "in_progress"}}
        pieces = [self._event("response.output_item.added", begun), self._item_done(item)]
        self._output.append(item)
        return pieces

    def _item_done(self, item: Json) -> bytes:
        return self._event("response.output_item.done", {"output_index": len(self._output), "item": item})

    def _event(self, kind: str, fields: Json) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        body = _json({"type": kind, "sequence_number": number, **fields})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), body)


def _settings(form: Form) -> Json:
    """Return the settings of a response: supported requested values, and defaults."""
    granted = {
        name: value for name, value in form.echo.items() if value is not None and (name not in form.ignored)
    }
    for name in ("reasoning", "text"):
        if isinstance(granted.get(name), dict):
            granted[name] = {**_DEFAULTS[name], **granted[name]}
    if isinstance(tools := granted.get("tools"), list):
        granted["tools"] = [_whole_tool(each, is_strict=STRICT_FIELD not in form.ignored) for each in tools]
    return {**_DEFAULTS, **granted}


def _whole_tool(tool: Value, *, is_strict: bool) -> Value:
    """Return a tool for the list in a response: a function with all fields, and `strict` only if supported."""
    if not (isinstance(tool, dict) and tool.get("type") == "function"):
        return tool
    return {**_FUNCTION, **tool} | ({} if is_strict else {"strict": None})


def usage_in_responses(counted: Usage | None) -> Json | None:
    """Return usage in the form of this API, or None if the upstream did not report it."""
    if counted is None:
        return None
    return {
        "input_tokens": counted.input_tokens,
        "input_tokens_details": {
            "cached_tokens": counted.cached_tokens,
            "cache_write_tokens": counted.cache_write_tokens,
        },
        "output_tokens": counted.output_tokens,
        "output_tokens_details": {"reasoning_tokens": counted.reasoning_tokens},
        "total_tokens": counted.input_tokens + counted.output_tokens,
    }


def _output_text(words: str) -> Json:
    return {"type": "output_text", "text": words, "annotations": [], "logprobs": []}


def _in_functions(items: Sequence[Value]) -> list[Value]:
    return in_functions(expand_compacted(items))


RESPONSES = Dialect(
    name="responses",
    path=("responses",),
    format="openai-responses",
    messages="input",
    id_prefix="resp_",
    read=read_responses,
    writer=ResponsesWriter,
    error=openai_error,
    in_functions=_in_functions,
    is_retrievable=True,
    streamed_codes=frozenset(
        {CONTEXT_LENGTH_EXCEEDED}
    ),  # Codex shortens a conversation only after `response.failed`
)
