"""The four APIs that agent programs use, as a model provider writes them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from msgspec import Struct

Json = dict[str, Any]
USAGE_IN, USAGE_OUT = 1000, 10
_NUMBERS = itertools.count(1)
SHELLS: Mapping[str, Callable[[str], Json]] = {
    "Bash": lambda command: {"command": command, "description": "append a line"},
    "bash": lambda command: {"command": command, "description": "append a line"},
    "run_shell_command": lambda command: {"command": command, "description": "append a line"},
    "exec_command": lambda command: {"cmd": command, "yield_time_ms": 30000},
    "shell": lambda command: {"command": ["bash", "-lc", command]},
    "shell_command": lambda command: {"command": command},
}
"""Parameters of each program's shell tool."""
SUB_AGENTS: Mapping[str, Callable[[str], Json]] = {
    "Agent": lambda prompt: {"description": "a side task", "prompt": prompt, "run_in_background": False},
    "task": lambda prompt: {"description": "a side task", "prompt": prompt, "subagent_type": "general"},
}
"""Parameters of each program's tool for sub-agents."""
ESCALATIONS: Mapping[str, Json] = {
    "exec_command": {"sandbox_permissions": "require_escalated", "justification": "it writes a file"},
    "shell": {"sandbox_permissions": "require_escalated", "justification": "it writes a file"},
    "shell_command": {"sandbox_permissions": "require_escalated", "justification": "it writes a file"},
}
"""Parameters that request a permission for a command, where the sandbox would just refuse it."""


class Words(Struct, frozen=True):
    """A text, in pieces."""

    pieces: list[str]


class ToolUse(Struct, frozen=True):
    """A call of the program's shell, or of its tool for sub-agents.

    Args:
        command: The command, or the task.
        is_escalated: The model requests that it runs outside a sandbox, where the program has a parameter for that.
        is_sub_agent: It starts a sub-agent.
        tool: The end of the name of another tool; the command is the JSON of its arguments then.
    """

    id: str
    command: str
    is_escalated: bool = False
    is_sub_agent: bool = False
    tool: str = ""


Part = Words | ToolUse


class ModelApi(Struct, frozen=True):
    """One API of a model provider.

    Args:
        texts: All texts of a request in their order, system prompt and results included.
        tools: The names of its tools.
        images: How many images it has.
        is_stream: Whether the answer is a stream, by path and body.
        stream: Write an answer as a stream; its end only if `is_whole`.
        whole: Write an answer in one piece.
        error: Write an error of a status.
    """

    texts: Callable[[Json], Iterator[str]]
    tools: Callable[[Json], list[str]]
    images: Callable[[Json], int]
    is_stream: Callable[[str, Json], bool]
    stream: Callable[..., Iterator[bytes]]
    whole: Callable[[Json, list[Part]], Json]
    error: Callable[[int], Json]
    headers: Mapping[str, str] = {}


def _flat(value: Any) -> Iterator[str]:  # noqa: ANN401 - JSON
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _flat(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _flat(each)


def _new_id(kind: str) -> str:
    return f"{kind}_{next(_NUMBERS)}"


def _event(data: Json, name: str = "") -> bytes:
    return (f"event: {name}\n" if name else "").encode() + b"data: " + json.dumps(data).encode() + b"\n\n"


def _call_of(names: list[str], use: ToolUse) -> tuple[str, dict[str, Any]]:
    if use.tool:
        return next((name for name in names if name.endswith(use.tool)), use.tool), json.loads(use.command)
    if use.is_sub_agent:
        name = next(name for name in SUB_AGENTS if name in names)
        return name, SUB_AGENTS[name](use.command)
    name = next((name for name in SHELLS if name in names), "Bash")
    return name, SHELLS[name](use.command) | (ESCALATIONS.get(name, {}) if use.is_escalated else {})


# --- Anthropic Messages ---------------------------------------------------------------------------


def _messages_tools(body: Json) -> list[str]:
    return [tool.get("name", "") for tool in body.get("tools") or ()]


def _messages_texts(body: Json) -> Iterator[str]:
    for message in body.get("messages") or ():
        yield from _flat(message.get("content"))


def _messages_images(body: Json) -> int:
    return json.dumps(body.get("messages")).count('"type": "image"')


def _messages_stream(body: Json, parts: list[Part], *, is_whole: bool) -> Iterator[bytes]:
    message: Json = {
        "id": _new_id("msg"),
        "type": "message",
        "role": "assistant",
        "model": body.get("model"),
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": USAGE_IN, "output_tokens": 1},
    }
    yield _event({"type": "message_start", "message": message}, "message_start")
    reason = "end_turn"
    for index, part in enumerate(parts):
        if isinstance(part, Words):
            block: Any = {"type": "text", "text": ""}
            deltas: list[Any] = [{"type": "text_delta", "text": piece} for piece in part.pieces]
        else:
            name, given = _call_of(_messages_tools(body), part)
            block = {"type": "tool_use", "id": "toolu_" + part.id, "name": name, "input": {}}
            deltas = [{"type": "input_json_delta", "partial_json": json.dumps(given)}]
            reason = "tool_use"
        yield _event(
            {"type": "content_block_start", "index": index, "content_block": block}, "content_block_start"
        )
        for delta in deltas:
            yield _event(
                {"type": "content_block_delta", "index": index, "delta": delta}, "content_block_delta"
            )
        if is_whole:
            yield _event({"type": "content_block_stop", "index": index}, "content_block_stop")
    if is_whole:
        end = {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": None},
            "usage": {"output_tokens": USAGE_OUT},
        }
        yield _event(end, "message_delta")
        yield _event({"type": "message_stop"}, "message_stop")


def _messages_whole(body: Json, parts: list[Part]) -> Json:
    content: list[Any] = []
    for part in parts:
        if isinstance(part, Words):
            content.append({"type": "text", "text": "".join(part.pieces)})
        else:
            name, given = _call_of(_messages_tools(body), part)
            content.append({"type": "tool_use", "id": "toolu_" + part.id, "name": name, "input": given})
    return {
        "id": _new_id("msg"),
        "type": "message",
        "role": "assistant",
        "model": body.get("model"),
        "content": content,
        "stop_reason": "tool_use" if any(isinstance(part, ToolUse) for part in parts) else "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": USAGE_IN, "output_tokens": USAGE_OUT},
    }


_MESSAGE_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    529: "overloaded_error",
}


def _messages_error(code: int) -> Json:
    kind = _MESSAGE_ERRORS.get(code, "api_error")
    return {"type": "error", "error": {"type": kind, "message": f"scripted {code}"}}


MESSAGES = ModelApi(
    _messages_texts,
    _messages_tools,
    _messages_images,
    lambda _, body: bool(body.get("stream")),
    _messages_stream,
    _messages_whole,
    _messages_error,
)

# --- OpenAI chat completions ----------------------------------------------------------------------


def _chat_tools(body: Json) -> list[str]:
    return [tool.get("function", {}).get("name", "") for tool in body.get("tools") or ()]


def _chat_texts(body: Json) -> Iterator[str]:
    for message in body.get("messages") or ():
        yield from _flat(message.get("content"))
        yield from _flat(message.get("tool_calls"))


def _chat_images(body: Json) -> int:
    return json.dumps(body.get("messages")).count('"type": "image_url"')


def _chat_chunk(body: Json, delta: Json, finish: str | None = None, **more: object) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return _event(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": body.get("model"),
            "choices": [choice],
            **more,
        }
    )


def _chat_stream(body: Json, parts: list[Part], *, is_whole: bool) -> Iterator[bytes]:
    yield _chat_chunk(body, {"role": "assistant", "content": ""})
    reason = "stop"
    for part in parts:
        if isinstance(part, Words):
            for piece in part.pieces:
                yield _chat_chunk(body, {"content": piece})
        else:
            reason = "tool_calls"
            yield _chat_chunk(body, {"tool_calls": [{"index": 0, **_chat_call(body, part)}]})
    if is_whole:
        yield _chat_chunk(body, {}, reason, usage=_chat_usage())
        yield b"data: [DONE]\n\n"


def _chat_call(body: Json, part: ToolUse) -> Json:
    name, given = _call_of(_chat_tools(body), part)
    return {"id": part.id, "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}


def _chat_usage() -> Json:
    return {
        "prompt_tokens": USAGE_IN,
        "completion_tokens": USAGE_OUT,
        "total_tokens": USAGE_IN + USAGE_OUT,
    }


def _chat_whole(body: Json, parts: list[Part]) -> Json:
    text = "".join("".join(part.pieces) for part in parts if isinstance(part, Words))
    calls = [_chat_call(body, part) for part in parts if isinstance(part, ToolUse)]
    message = {"role": "assistant", "content": text or None, **({"tool_calls": calls} if calls else {})}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop"}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": body.get("model"),
        "choices": [choice],
        "usage": _chat_usage(),
    }


def _openai_error(code: int) -> Json:
    kind = {401: "invalid_api_key", 429: "rate_limit_exceeded", 400: "invalid_request"}.get(
        code, "server_error"
    )
    return {"error": {"message": f"scripted {code}", "type": kind, "code": kind}}


CHAT = ModelApi(
    _chat_texts,
    _chat_tools,
    _chat_images,
    lambda _, body: bool(body.get("stream")),
    _chat_stream,
    _chat_whole,
    _openai_error,
)

# --- OpenAI Responses -----------------------------------------------------------------------------


def _responses_tools(body: Json) -> list[str]:
    return [tool.get("name") or tool.get("type", "") for tool in body.get("tools") or ()]


def _responses_texts(body: Json) -> Iterator[str]:
    given = body.get("input")
    yield from _flat(given)


def _responses_images(body: Json) -> int:
    return json.dumps(body.get("input")).count('"type": "input_image"')


def _responses_items(body: Json, parts: list[Part]) -> list[Any]:
    items: list[Any] = []
    for index, part in enumerate(parts):
        if isinstance(part, Words):
            content = [{"type": "output_text", "text": "".join(part.pieces), "annotations": []}]
            items.append(
                {
                    "type": "message",
                    "id": f"msg_{index}",
                    "role": "assistant",
                    "status": "completed",
                    "content": content,
                }
            )
        else:
            name, given = _call_of(_responses_tools(body), part)
            items.append(
                {
                    "type": "function_call",
                    "id": f"fc_{index}",
                    "call_id": part.id,
                    "name": name,
                    "arguments": json.dumps(given),
                    "status": "completed",
                }
            )
    return items


def _response(body: Json, items: list[Any], status: str) -> Json:
    usage = {
        "input_tokens": USAGE_IN,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": USAGE_OUT,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": USAGE_IN + USAGE_OUT,
    }
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "status": status,
        "model": body.get("model"),
        "output": items,
        "usage": usage if status == "completed" else None,
    }


def _responses_stream(body: Json, parts: list[Part], *, is_whole: bool) -> Iterator[bytes]:
    number = itertools.count()

    def event(kind: str, **more: object) -> bytes:
        return _event({"type": kind, "sequence_number": next(number), **more}, kind)

    items = _responses_items(body, parts)
    yield event("response.created", response=_response(body, [], "in_progress"))
    for index, (part, item) in enumerate(zip(parts, items, strict=True)):
        place = {"output_index": index, "item_id": item["id"]}
        nothing: Json = {"content": []} if isinstance(part, Words) else {"arguments": ""}
        empty = {**item, "status": "in_progress", **nothing}
        yield event("response.output_item.added", output_index=index, item=empty)
        if isinstance(part, Words):
            text = {"type": "output_text", "text": "", "annotations": []}
            yield event("response.content_part.added", content_index=0, part=text, **place)
            for piece in part.pieces:
                yield event("response.output_text.delta", content_index=0, delta=piece, **place)
            if is_whole:
                yield event("response.output_text.done", content_index=0, text="".join(part.pieces), **place)
        else:
            yield event("response.function_call_arguments.done", arguments=item["arguments"], **place)
        if is_whole:
            yield event("response.output_item.done", output_index=index, item=item)
    if is_whole:
        yield event("response.completed", response=_response(body, items, "completed"))


def _responses_whole(body: Json, parts: list[Part]) -> Json:
    return _response(body, _responses_items(body, parts), "completed")


RESPONSES = ModelApi(
    _responses_texts,
    _responses_tools,
    _responses_images,
    lambda _, body: bool(body.get("stream")),
    _responses_stream,
    _responses_whole,
    _openai_error,
)

# --- Gemini ---------------------------------------------------------------------------------------


def _gemini_tools(body: Json) -> list[str]:
    return [
        function.get("name", "")
        for tool in body.get("tools") or ()
        for function in tool.get("functionDeclarations") or ()
    ]


def _gemini_texts(body: Json) -> Iterator[str]:
    for content in body.get("contents") or ():
        yield from _flat(content.get("parts"))


def _gemini_images(body: Json) -> int:
    return json.dumps(body.get("contents")).count('"inlineData"')


def _gemini_chunk(parts: list[Any], finish: str = "") -> Json:
    candidate: dict[str, Any] = {"content": {"role": "model", "parts": parts}, "index": 0}
    chunk: dict[str, Any] = {"candidates": [candidate], "modelVersion": "scripted"}
    if finish:
        candidate["finishReason"] = finish
        chunk["usageMetadata"] = {
            "promptTokenCount": USAGE_IN,
            "candidatesTokenCount": USAGE_OUT,
            "totalTokenCount": USAGE_IN + USAGE_OUT,
        }
    return chunk


def _gemini_call(body: Json, part: ToolUse) -> Json:
    name, given = _call_of(_gemini_tools(body), part)
    return {"functionCall": {"name": name, "args": given, "id": part.id}}


def _gemini_stream(body: Json, parts: list[Part], *, is_whole: bool) -> Iterator[bytes]:
    for part in parts:
        if isinstance(part, Words):
            for piece in part.pieces:
                yield _event(_gemini_chunk([{"text": piece}]))
        else:
            yield _event(_gemini_chunk([_gemini_call(body, part)]))
    if is_whole:
        yield _event(_gemini_chunk([{"text": ""}], "STOP"))


def _gemini_whole(body: Json, parts: list[Part]) -> Json:
    written = [
        {"text": "".join(part.pieces)} if isinstance(part, Words) else _gemini_call(body, part)
        for part in parts
    ]
    return _gemini_chunk(written, "STOP")


def _gemini_error(code: int) -> Json:
    status = {400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 429: "RESOURCE_EXHAUSTED"}.get(
        code, "UNAVAILABLE"
    )
    return {"error": {"code": code, "message": f"scripted {code}", "status": status}}


GEMINI = ModelApi(
    _gemini_texts,
    _gemini_tools,
    _gemini_images,
    lambda path, _: "streamGenerateContent" in path,
    _gemini_stream,
    _gemini_whole,
    _gemini_error,
)

API_OF_PATH: Mapping[str, ModelApi] = {
    "/messages": MESSAGES,
    "/chat/completions": CHAT,
    "/responses": RESPONSES,
    ":streamGenerateContent": GEMINI,
    ":generateContent": GEMINI,
}
"""The API of a request, by the end of its path."""
