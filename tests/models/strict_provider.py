"""A strict local provider: it refuses calls and results as the real ones do, with their error texts.

The rules here are written from the providers' error texts and share nothing with ours.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Json = dict[str, Any]

ANTHROPIC_RESPONSE: Json = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "claude-sonnet-4-5",
    "content": [{"type": "text", "text": "on it"}],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": {"input_tokens": 1, "output_tokens": 1},
}
CHAT_RESPONSE: Json = {
    "id": "c1",
    "object": "chat.completion",
    "created": 1,
    "model": "gpt-5",
    "choices": [
        {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "on it"}},
    ],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}
RESPONSES_RESPONSE: Json = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1,
    "status": "completed",
    "model": "gpt-5",
    "output": [
        {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "on it", "annotations": []}],
        }
    ],
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
}


class StrictProvider:
    """The requests, unchanged, and the address."""

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []

    @property
    def last(self) -> Json:
        """The last request's JSON."""
        request: Json = json.loads(self.bodies[-1])
        return request

    def answer(self, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, Json]:
        """Check a request."""
        self.bodies.append(body)
        self.headers.append(headers)
        request = json.loads(body)
        if path.endswith("/messages"):
            fault, response = _anthropic_fault(request), ANTHROPIC_RESPONSE
        elif path.endswith("/chat/completions"):
            fault, response = _chat_fault(request["messages"]), CHAT_RESPONSE
        elif path.endswith("/responses"):
            fault, response = _responses_fault(request), RESPONSES_RESPONSE
        else:
            return 404, {"error": {"type": "not_found_error", "message": path}}
        return (
            (400, {"error": {"type": "invalid_request_error", "message": fault}})
            if fault
            else (200, response)
        )


def _anthropic_fault(request: Json) -> str | None:
    open_ids: set[str] = set()
    for at, message in enumerate(request["messages"]):
        blocks = message["content"] if isinstance(message["content"], list) else []
        results = {block["tool_use_id"] for block in blocks if block["type"] == "tool_result"}
        if missing := open_ids - results:
            return f"messages.{at}: `tool_use` ids were found without `tool_result` blocks: {sorted(missing)}"
        if results - open_ids:
            return f"messages.{at}: unexpected `tool_use_id` found in `tool_result` blocks"
        open_ids = {block["id"] for block in blocks if block["type"] == "tool_use"}
    if open_ids:
        return "`tool_use` ids were found without `tool_result` blocks"
    return _thinking_fault(request)


def _thinking_fault(request: Json) -> str | None:
    is_on = request.get("thinking", {}).get("type") == "enabled"
    edits = request.get("context_management", {}).get("edits", [])
    if not is_on and any(edit["type"].startswith("clear_thinking") for edit in edits):
        return "`clear_thinking` strategy requires `thinking` to be enabled"
    responses = [message for message in request["messages"] if message["role"] == "assistant"]
    if is_on and responses and isinstance(responses[-1]["content"], list):
        kind = responses[-1]["content"][0]["type"]
        if kind == "tool_use":
            return f"Expected `thinking` or `redacted_thinking`, but found `{kind}`"
    return None


def _chat_fault(messages: list[Json]) -> str | None:
    open_ids: set[str] = set()
    for message in messages:
        if message["role"] == "tool":
            if message["tool_call_id"] not in open_ids:
                return (
                    "messages with role 'tool' must be a response to a preceeding message with 'tool_calls'"
                )
            open_ids.discard(message["tool_call_id"])
            continue
        if open_ids:
            return "An assistant message with 'tool_calls' must be followed by tool messages"
        open_ids = {call["id"] for call in message.get("tool_calls") or ()}
    return "An assistant message with 'tool_calls' must be followed by tool messages" if open_ids else None


def _responses_fault(request: Json) -> str | None:
    items = request["input"] if isinstance(request["input"], list) else []
    calls = {item["call_id"] for item in items if item.get("type") == "function_call"}
    outputs = {item["call_id"] for item in items if item.get("type") == "function_call_output"}
    if calls - outputs:
        return f"No tool output found for function call {sorted(calls - outputs)}"
    if outputs - calls and "previous_response_id" not in request:
        return f"No tool call found for function call output with call_id {sorted(outputs - calls)}"
    return None


@contextlib.contextmanager
def strict_provider() -> Iterator[StrictProvider]:
    """Serve on a free port until the end of the block."""
    provider = StrictProvider()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self._body()
            status, response = provider.answer(self.path.partition("?")[0], body, dict(self.headers.items()))
            reply = json.dumps(response).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def _body(self) -> bytes:
            if "content-length" in self.headers:
                return self.rfile.read(int(self.headers["content-length"]))
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - their name
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    serving.start()
    provider.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield provider
    finally:
        server.shutdown()
        server.server_close()
        serving.join(60)
