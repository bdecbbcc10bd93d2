"""OpenAI's Responses API on this machine, scripted, with stored responses and conversations."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.parse
from collections.abc import AsyncIterator
from typing import Any

from starlette.types import Receive, Scope, Send

from midstream.agents.openai_conversation import Memory, OpenAIChain, OpenAIConversation
from midstream.testing.upstream_contract import SEPARATOR, USAGE, PeerMessage, Trait
from tests.agents.stateful_server import StatefulServer, answer_json, body_of, until_gone
from tests.models.chat_server import Hasty, Json, serve_app
from tests.models.responses_server import call_item, completed, event, text_deltas

USED = {
    "input_tokens": USAGE.input_tokens,
    "output_tokens": USAGE.output_tokens,
    "input_tokens_details": {
        "cached_tokens": USAGE.cached_tokens,
        "cache_write_tokens": USAGE.cache_write_tokens,
    },
}


class OpenAIMemory(StatefulServer):
    """The server, with the controls of `Peer`.

    It answers each input with all user texts of the chain or of the conversation. `cuts` connections in a row
    break off after an event, each one event later than the one before.
    """

    def __init__(self, memory: Memory, *, is_background: bool = False) -> None:
        super().__init__()
        self.memory: Memory = memory
        self.is_background = is_background
        self.lacks = frozenset({Trait.BUSY, Trait.PROCESS})
        self.requests: list[tuple[str, str, Json]] = []
        """Method, path and body of each request."""
        self.fails_with = 0
        """The status of the response to every message, or 0."""
        self.locked = 0
        """Requests to refuse because another response of the conversation is running."""
        self.is_nameless = False
        """Whether a conversation is created without an id in the answer."""
        self.is_silent = False
        """Whether responses omit the id of the response that they continue."""
        self.ignores_names = False
        """Whether the id is ignored, so that each response starts a new conversation."""
        self.cuts = 0
        self.asks: Json | None = None
        """A function call that the next answer requests from the client application."""
        self.outputs: list[Json] = []
        """Results of calls that arrived."""
        self._texts: dict[str, list[str]] = {}
        """The texts up to each response, or in each conversation."""
        self._responses: dict[str, list[Json]] = {}
        self._running: dict[str, asyncio.Event] = {}

    def upstream(self) -> OpenAIChain | OpenAIConversation:
        kind = OpenAIChain if self.memory == "responses" else OpenAIConversation
        return kind(
            "gpt-5", api_key="key-1", base_url=self.url, is_background=self.is_background, world=Hasty()
        )

    def runs(self) -> int:
        return len(self._running)

    def expire(self, agent: str) -> None:
        del self._texts[agent]

    def end_processes(self) -> None:
        raise AssertionError("there are none")

    def be_busy(self, agent: str) -> None:
        raise AssertionError(f"{agent} cannot be busy here")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        raw = await body_of(receive)
        method, path = scope["method"], scope["path"].removeprefix("/v1")
        query = urllib.parse.parse_qs(scope["query_string"].decode())
        body: Json = json.loads(raw or b"{}")
        self.requests.append((method, path, body))
        key = dict(scope["headers"]).get(b"idempotency-key", b"").decode()
        name = path.split("/")[2] if path.count("/") > 1 else ""
        if self._refuses:
            await _refuse(send, 401, "invalid_api_key")
        elif path.startswith("/models/"):
            await answer_json(send, 200, {"id": name, "object": "model"})
        elif method == "DELETE":
            known = self._texts.pop(name, None)
            await (answer_json(send, 200, {"deleted": True}) if known else _refuse(send, 404, "not_found"))
        elif path == "/conversations":
            made = f"conv_{len(self.requests)}"
            self._texts[made] = []
            unnamed = {"object": "conversation"}
            await answer_json(send, 200, unnamed if self.is_nameless else {"id": made, **unnamed})
        elif path.endswith("/cancel"):
            self._running[name].set()
            await answer_json(send, 200, {"id": name, "status": "cancelled"})
        elif method == "GET":
            after = int(query.get("starting_after", ["-1"])[0])
            await self._stream(name, after, receive, send)
        else:
            await self._respond(body, key, receive, send)

    async def _respond(self, body: Json, key: str, receive: Receive, send: Send) -> None:
        named = body.get("previous_response_id") or body.get("conversation") or ""
        if self.ignores_names:
            named = ""
        if self.fails_with:
            await _refuse(send, self.fails_with, "server_error", retry_after=self.retry_after)
            return
        if self.locked:
            self.locked -= 1
            await _refuse(send, 400, "conversation_locked")
            return
        if named and named not in self._texts:
            if self.memory == "responses":
                await _refuse(send, 400, "previous_response_not_found", param="previous_response_id")
            else:
                await _refuse(send, 404, "", param="conversation")
            return
        if self._errs and named:
            self._errs = False
            named = f"other_{len(self.requests)}"
            self._texts[named] = []
        made = f"resp_{len(self.requests)}"
        before = self._texts.get(named, [])
        items = [item for item in body["input"] if isinstance(item, dict)]
        new = [text for item in items for text in _texts_in(item)]
        self.outputs += [item for item in items if item.get("type") == "function_call_output"]
        texts = [*before, *new]
        self._texts[made] = texts
        if self.memory == "conversation" and named:
            self._texts[named] = texts
        self._messages += [
            PeerMessage(made if self.memory == "responses" else named, text, key) for text in new
        ]
        if self._loses or self._is_mute:
            is_mute, self._loses, self._is_mute = self._is_mute, False, False
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b": taken\n\n", "more_body": True})
            if is_mute:
                await until_gone(receive, asyncio.Event())
            return
        self._responses[made] = self._events(made, named, SEPARATOR.join(texts))
        if self._hangs or self._dies:
            types = [each["type"] for each in self._responses[made]]
            first_words = next(at for at, name in enumerate(types) if name.endswith("output_text.delta"))
            self._responses[made] = self._responses[made][: 2 if self._hangs else first_words + 1]
        await self._stream(made, -1, receive, send)

    def _events(self, made: str, named: str, answer: str) -> list[Json]:
        response: Json = {"id": made, "object": "response", "status": "in_progress", "output": []}
        if self.is_silent:
            pass
        elif self.memory == "responses":
            response["previous_response_id"] = named or None
        else:
            response["conversation"] = {"id": named}
        half = len(answer) // 2 + 1
        asked: list[Json] = []
        items: list[Json] = []
        if self.asks is not None:
            items = [call_item(self.asks["arguments"], self.asks["id"], self.asks["name"])]
            asked = [event("output_item.done", output_index=1, item=items[0])]
            self.asks = None
        events = [
            event("created", response=response),
            event("in_progress", response=response),
            *self._tool_events(),
            *text_deltas(answer[:half], answer[half:]),
            *asked,
            completed(
                *items,
                **{**response, "status": "completed", "usage": USED, "model": "gpt-5", "output": items},
            ),
        ]
        return [{**each, "sequence_number": number} for number, each in enumerate(events)]

    def _tool_events(self) -> list[Json]:
        events: list[Json] = []
        for name, arguments, content in self._tools:
            item = {"type": "mcp_call", "id": "mcp_1", "server_label": "files", "name": name, "arguments": ""}
            events += [
                event("output_item.added", output_index=0, item=item),
                event("mcp_call_arguments.done", output_index=0, item_id="mcp_1", arguments=arguments),
                event(
                    "output_item.done",
                    output_index=0,
                    item={**item, "arguments": arguments, "output": content},
                ),
            ]
        self._tools = []
        return events

    async def _stream(self, name: str, after: int, receive: Receive, send: Send) -> None:
        if name not in self._responses:
            await _refuse(send, 404, "")
            return
        self._running[name] = asyncio.Event()
        try:
            headers = [(b"content-type", b"text/event-stream")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            events = [each for each in self._responses[name] if each["sequence_number"] > after]
            if self.cuts:
                self.cuts -= 1
                events = events[: len(self._responses[name]) // 3]
            for each in events:
                await send(_piece(f"event: {each['type']}\ndata: {json.dumps(each)}\n\n".encode()))
            is_whole = bool(events) and events[-1]["type"] == "response.completed"
            if self._hangs:
                self._hangs = False
                await until_gone(receive, self._running[name])
            self._dies = False
            if is_whole:
                await send({"type": "http.response.body", "body": b""})
            # otherwise the connection closes without the end of the body
        finally:
            del self._running[name]


def _texts_in(item: Json) -> list[str]:
    if item.get("role") != "user":
        return []
    content = item["content"]
    return [content] if isinstance(content, str) else [piece["text"] for piece in content if "text" in piece]


def _piece(body: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": True}


async def _refuse(send: Send, status: int, code: str, *, param: str = "", retry_after: str = "") -> None:
    error = {"message": f"refused: {code}", "code": code, "type": "x", "param": param or None}
    await answer_json(send, status, {"error": error}, retry_after=retry_after)


@contextlib.asynccontextmanager
async def openai_memory(memory: Memory, *, is_background: bool = False) -> AsyncIterator[OpenAIMemory]:
    """Serve it on a free port until the end of the block."""
    server = OpenAIMemory(memory, is_background=is_background)
    async with serve_app(server) as server.url:
        yield server
