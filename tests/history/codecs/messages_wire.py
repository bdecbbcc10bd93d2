"""The events of a response of Anthropic's Messages API, as on the wire."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

Json = dict[str, Any]


def message_start(model: str = "claude-1", **usage: int) -> Json:
    """Return the first event of a response."""
    counts = {"input_tokens": 7, "output_tokens": 1, **usage}
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": model, "content": []}
    return {
        "type": "message_start",
        "message": {**message, "stop_reason": None, "stop_sequence": None, "usage": counts},
    }


def block_delta(index: int, kind: str, **fields: object) -> Json:
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, **fields}}


def block_start(index: int, kind: str, **fields: object) -> Json:
    return {"type": "content_block_start", "index": index, "content_block": {"type": kind, **fields}}


def block_stop(index: int) -> Json:
    return {"type": "content_block_stop", "index": index}


def text(index: int, *pieces: str) -> list[Json]:
    deltas = [block_delta(index, "text_delta", text=piece) for piece in pieces]
    return [block_start(index, "text", text=""), *deltas, block_stop(index)]


def thought(index: int, *pieces: str, signature: str = "c2ln") -> list[Json]:
    deltas = [block_delta(index, "thinking_delta", thinking=piece) for piece in pieces]
    signed = [block_delta(index, "signature_delta", signature=signature)] if signature else []
    return [block_start(index, "thinking", thinking="", signature=""), *deltas, *signed, block_stop(index)]


def redacted(index: int, data: str) -> list[Json]:
    return [block_start(index, "redacted_thinking", data=data), block_stop(index)]


def call(
    index: int,
    *pieces: str,
    call_id: str = "toolu_1",
    name: str = "read",
    kind: str = "tool_use",
    **more: object,
) -> list[Json]:
    deltas = [block_delta(index, "input_json_delta", partial_json=piece) for piece in pieces]
    start = block_start(index, kind, id=call_id, name=name, input={}, **more)
    return [start, *deltas, block_stop(index)]


def result(index: int, content: object, *, call_id: str, kind: str, **more: object) -> list[Json]:
    return [block_start(index, kind, tool_use_id=call_id, content=content, **more), block_stop(index)]


def message_end(stop_reason: str | None = "end_turn", **usage: int) -> list[Json]:
    """Return the last two events of a response."""
    delta = {"stop_reason": stop_reason, "stop_sequence": None}
    counts = {"output_tokens": 9, **usage}
    return [{"type": "message_delta", "delta": delta, "usage": counts}, {"type": "message_stop"}]


PING: Json = {"type": "ping"}


def wire(events: Sequence[Json]) -> bytes:
    """Return the wire form of events."""
    return b"".join(
        b"event: %b\ndata: %b\n\n" % (str(event["type"]).encode(), json.dumps(event).encode())
        for event in events
    )
