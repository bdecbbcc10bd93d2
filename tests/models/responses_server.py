"""A local server of OpenAI's Responses API that keeps its responses, and breaks by script."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.parse
from collections.abc import AsyncIterator, Sequence
from typing import Any

from msgspec import Struct
from starlette.types import Message, Receive, Scope, Send

from midstream.environment import World
from tests.models.chat_server import Json, serve_app


class Link(Struct, frozen=True):
    """Behaviour of one connection: it sends `events_max` events (None: all), then acts as `ending` states.

    `end` closes it cleanly, `cut` in the middle of an event, `hang` sends nothing more; a `status` other than
    200 is its whole response, with `retry_after` as its `Retry-After` where there is one.
    """

    events_max: int | None = None
    ending: str = "end"
    status: int = 200
    retry_after: str = ""


def event(kind: str, **fields: object) -> Json:
    return {"type": f"response.{kind}", **fields}


def text_deltas(*pieces: str, kind: str = "output_text") -> list[Json]:
    return [event(f"{kind}.delta", item_id="msg_1", output_index=0, content_index=0, delta=p) for p in pieces]


def call_item(arguments: str, call_id: str = "call_1", name: str = "read", **more: object) -> Json:
    item = {"type": "function_call", "id": f"fc_{call_id}", "call_id": call_id, "name": name}
    return {**item, "arguments": arguments, "status": "completed", **more}


def call_events(arguments: str, call_id: str = "call_1", name: str = "read") -> list[Json]:
    """Return the events of a call, with its arguments in two pieces."""
    item, half = call_item(arguments, call_id, name), len(arguments) // 2
    return [
        event("output_item.added", output_index=0, item={**item, "arguments": "", "status": "in_progress"}),
        event("function_call_arguments.delta", item_id=item["id"], delta=arguments[:half]),
        event("function_call_arguments.delta", item_id=item["id"], delta=arguments[half:]),
        event("output_item.done", output_index=0, item=item),
    ]


def completed(*output: Json, kind: str = "completed", **fields: object) -> Json:
    usage = {"input_tokens": 7, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 5}}
    response = {"model": "m-1", "usage": usage, "output": list(output), **fields}
    return event(kind, response=response)


HELLO = [*text_deltas("Hel", "lo, ", "you ", "there"), completed()]
HELLO_TEXT = "Hello, you there"


class ResponsesServer:
    """A server that creates each response of the script in the background, at once, and keeps it.

    Each connection takes the next `Link`; later ones are faultless. Events are `pace_s` apart.
    """

    def __init__(
        self, responses: Sequence[Sequence[Json]], links: Sequence[Link] = (), pace_s: float = 0.0
    ) -> None:
        self.url = ""
        self.asked: list[tuple[str, str]] = []
        """Method and path with query of each request."""
        self.bodies: list[Json] = []
        self.raw_bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.cancelled: list[str] = []
        self.kept: dict[str, list[Json]] = {}
        self.left = asyncio.Event()
        """Set when a client has disconnected before the end of its answer."""
        self._responses = list(responses)
        self._links = list(links)
        self._pace_s = pace_s

    def delete_responses(self) -> None:
        """Delete all responses."""
        self.kept.clear()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        query = scope["query_string"].decode()
        method, path = scope["method"], scope["path"].removeprefix("/v1")
        self.asked.append((method, path + (f"?{query}" if query else "")))
        self.headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
        if path.endswith("/cancel"):
            self.cancelled.append(path.split("/")[2])
            await _answer(send, 200, b"{}")
            return
        link = self._links.pop(0) if self._links else Link()
        if link.status != 200:
            await _answer(send, link.status, b'{"error": {"message": "no"}}', retry_after=link.retry_after)
            return
        if method == "POST":
            self.bodies.append(json.loads(body))
            self.raw_bodies.append(body)
            response_id, after = self._make(), -1
        else:
            response_id = path.split("/")[2]
            after = int(urllib.parse.parse_qs(query).get("starting_after", ["-1"])[0])
        if response_id not in self.kept:
            await _answer(send, 404, b'{"error": {"message": "no such response"}}')
            return
        events = [each for each in self.kept[response_id] if each["sequence_number"] > after]
        await self._stream(events, link, receive, send)

    def _make(self) -> str:
        response_id = f"resp_{len(self.kept) + 1}_{len(self.asked)}"
        start = {"id": response_id, "status": "queued"}
        outcome_of_it = [event("created", response=start), event("in_progress", response=start)]
        events = [*outcome_of_it, *self._responses.pop(0)]
        self.kept[response_id] = [{**each, "sequence_number": n} for n, each in enumerate(events)]
        return response_id

    async def _stream(self, events: list[Json], link: Link, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        shown = events[: link.events_max]
        for each in shown:
            await send(_piece(_wire(each)))
            await World().sleep(self._pace_s)
        if link.ending == "cut" and len(shown) < len(events):
            await send(_piece(_wire(events[len(shown)])[:-20]))  # And no end of the body.
        elif link.ending == "hang":
            while (await receive())["type"] != "http.disconnect":
                pass
            self.left.set()
        else:
            await send({"type": "http.response.body", "body": b""})


def _wire(each: Json) -> bytes:
    return f"event: {each['type']}\ndata: {json.dumps(each)}\n\n".encode()


def _piece(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}


async def _answer(send: Send, status: int, body: bytes, retry_after: str = "") -> None:
    headers = [(b"content-type", b"application/json")]
    if retry_after:
        headers.append((b"retry-after", retry_after.encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def responses_server(
    *responses: Sequence[Json], links: Sequence[Link] = (), pace_s: float = 0.0
) -> AsyncIterator[ResponsesServer]:
    """Serve a script on a free port until the end of the block."""
    app = ResponsesServer(responses, links, pace_s)
    async with serve_app(app) as app.url:
        yield app


def resume_positions(server: ResponsesServer) -> list[str | None]:
    """Return the position from which each GET requested the stream."""
    queries: list[dict[str, Any]] = [
        urllib.parse.parse_qs(path.partition("?")[2]) for method, path in server.asked if method == "GET"
    ]
    return [query.get("starting_after", [None])[0] for query in queries]
