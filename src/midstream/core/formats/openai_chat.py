"""OpenAI's chat completions: the messages and tools of a request.

A history is rendered as it is: pairing is guaranteed by `Exchange`, and nothing here repairs. Thinking is not sent
back (OpenAI's own servers refuse the field that others gave it), and a reply that holds nothing else is left out,
because servers refuse an assistant message without content and calls.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from midstream.core.messages import Call, Exchange, File, History, Text, ToolSpec, UserPart

_AUDIO_FORMATS = {"audio/wav": "wav", "audio/x-wav": "wav", "audio/mpeg": "mp3", "audio/mp3": "mp3"}


def render(history: History, instructions: str) -> list[dict[str, Any]]:
    """Return the `messages` of a request; instructions, where there are any, come first as the system message."""
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for entry in history.entries:
        if isinstance(entry, Exchange):
            messages.extend(_of_exchange(entry))
        else:
            messages.append({"role": "user", "content": _content_of(entry.parts)})
    return messages


def render_tools(tools: Iterable[ToolSpec]) -> list[dict[str, Any]]:
    """Return the `tools` of a request."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters or {"type": "object", "properties": {}},
            },
        }
        for tool in tools
    ]


def _of_exchange(exchange: Exchange) -> list[dict[str, Any]]:
    reply = exchange.reply
    message: dict[str, Any] = {"role": "assistant", "content": reply.text or None}
    if reply.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": arguments_of(call)},
            }
            for call in reply.calls
        ]
    elif not reply.text:
        return []
    results = [
        {"role": "tool", "tool_call_id": result.call_id, "content": result.content}
        for result in exchange.results
    ]
    return [message, *results]


def arguments_of(call: Call) -> str:
    """Return a call's arguments as a JSON object; broken ones travel inside one, because servers parse them."""
    try:
        parsed = msgspec.json.decode(call.arguments or "{}")
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        parsed = None
    if isinstance(parsed, dict):
        return call.arguments or "{}"
    return msgspec.json.encode({"invalid_arguments": call.arguments}).decode()


def _content_of(parts: tuple[UserPart, ...]) -> str | list[dict[str, Any]]:
    match parts:
        case (Text(text),):
            return text
    return [_content_part(part) for part in parts]


def _content_part(part: UserPart) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    data_url = f"data:{part.media_type};base64,{part.data}"
    if part.media_type.startswith("image/"):
        return {"type": "image_url", "image_url": {"url": part.url if part.data is None else data_url}}
    if part.data is None:
        # The API takes no other file by address: the model is told where it is.
        return {"type": "text", "text": f"[attached file: {part.name or part.media_type} at {part.url}]"}
    if part.media_type in _AUDIO_FORMATS:
        audio = {"data": part.data, "format": _AUDIO_FORMATS[part.media_type]}
        return {"type": "input_audio", "input_audio": audio}
    return {"type": "file", "file": {"filename": part.name or _file_name(part), "file_data": data_url}}


def _file_name(part: File) -> str:
    return "attachment." + part.media_type.partition("/")[2].partition(";")[0]
