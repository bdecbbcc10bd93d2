"""A scripted local server of chat completions (or of another API with one path)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Sequence
from typing import Any

import uvicorn
from msgspec import Struct
from starlette.types import ASGIApp, Receive, Scope, Send

from midstream.environment import World

WAIT_S = 60.0
Json = dict[str, Any]


class Hasty(World):
    """A world without waits between attempts."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


class Answer(Struct):
    """One answer: a status with headers and a body in pieces. `ending` is its behaviour after the last piece."""

    pieces: list[bytes]
    status: int = 200
    content_type: str = "text/event-stream"
    headers: dict[str, str] = {}
    ending: str = "end"
    """`end`; `cut`: the connection is closed without the end of the body; `hang`: nothing until the client
    disconnects; `never`: not even a status until the client disconnects.
    """
    gate: asyncio.Event | None = None
    """Event to wait for before the last piece."""


def delta(finish: str | None = None, **fields: object) -> Json:
    """Return a chunk."""
    choice = {"index": 0, "delta": {"role": "assistant", **fields}, "finish_reason": finish}
    return {
        "id": "c1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m-1",
        "choices": [choice],
    }


def call(index: int, arguments: str, call_id: str | None = None, name: str | None = None) -> Json:
    """Return a piece of a call."""
    function = {"arguments": arguments} | ({"name": name} if name else {})
    return {"index": index, "function": function} | ({"id": call_id, "type": "function"} if call_id else {})


def usage(prompt: int, completion: int) -> Json:
    """Return the chunk after the last one."""
    counted = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    return {**delta(), "choices": [], "usage": counted}


def stream(*chunks: Json | bytes, ending: str = "end", is_marked: bool = True) -> Answer:
    """Answer with a stream of chunks; bytes are sent unchanged."""
    pieces = [
        each if isinstance(each, bytes) else b"data: %b\n\n" % json.dumps(each).encode() for each in chunks
    ]
    if ending == "end" and is_marked:
        pieces.append(b"data: [DONE]\n\n")
    return Answer(pieces, ending=ending)


def silence() -> Answer:
    """Accept the request and never answer: the hang of a provider."""
    return Answer([], ending="never")


def refusal(status: int, error: object = None, **headers: str) -> Answer:
    """Answer with an error."""
    body = json.dumps({"error": error or {"message": "no", "type": "test"}}).encode()
    return Answer([body], status, "application/json", headers)


class ChatServer:
    """A server that gives each request the next answer of the script and records the requests."""

    def __init__(self, answers: Sequence[Answer], path: str) -> None:
        self._path = path
        self.url = ""
        self.bodies: list[Json] = []
        self.raw_bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.connections: list[object] = []
        """Peer of each request: the same peer, the same connection."""
        self.asked = asyncio.Event()
        """Set when a request has arrived."""
        self.left = asyncio.Event()
        """Set when a client has closed its connection before the end of its answer."""
        self._answers = list(answers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        assert scope["path"] == self._path
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        self.bodies.append(json.loads(body))
        self.raw_bodies.append(body)
        self.headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
        self.connections.append(scope["client"])
        self.asked.set()
        answer = self._answers.pop(0)
        if answer.ending == "never":
            await self._gone(receive)
            return
        headers = {"content-type": answer.content_type, **answer.headers}
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": answer.status, "headers": encoded})
        for number, piece in enumerate(answer.pieces, start=1):
            if answer.gate is not None and number == len(answer.pieces):
                await answer.gate.wait()
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        if answer.ending == "end":
            await send({"type": "http.response.body", "body": b""})
        elif answer.ending == "hang":
            await self._gone(receive)

    async def _gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.left.set()


@contextlib.asynccontextmanager
async def chat_server(*answers: Answer, path: str = "/v1/chat/completions") -> AsyncIterator[ChatServer]:
    """Serve a script on a free port until the end of the block."""
    app = ChatServer(answers, path)
    async with serve_app(app) as app.url:
        yield app


@contextlib.asynccontextmanager
async def serve_app(app: ASGIApp) -> AsyncIterator[str]:
    """Serve an app on a free port until the end of the block; yield the base address of its API."""
    # With the protocol named, asyncio sends small writes at once: else a client waits 40 ms for the second.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listening:
        listening.bind(("127.0.0.1", 0))
        config = uvicorn.Config(
            app, lifespan="off", log_config=None, log_level="critical", timeout_graceful_shutdown=1
        )
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve([listening]))
        try:
            async with asyncio.timeout(WAIT_S):
                while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
                    await asyncio.sleep(0)
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        finally:
            server.should_exit = True
            await asyncio.wait_for(serving, WAIT_S)
