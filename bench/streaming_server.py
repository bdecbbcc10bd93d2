"""The servers that `bench.streaming` compares, each in its own process:
`python -m bench.streaming_server NAME LENGTH,... FOLDER`.

All of them receive tokens by POST and send them to readers:

`raw` is the minimum with Starlette and uvicorn: a list in memory and one wake-up per append, without ids and journal.
`midstream` is the product: a posted token is the next text of a model in an open turn. The engine journals it in
SQLite, and the endpoints (`/v1/sessions/{id}/events`, `/stream`) send it as usual.

The response to a POST comes when the model has the token; with `?journaled`, when it is in the journal. A body is one
JSON string, or a list of them, each a token. Both servers run on uvloop and httptools, with the garbage collector set
as `midstream serve` sets it.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket

from midstream.cli.listening import run_server
from midstream.engine.agent import Agent
from midstream.history.messages import UserMessage
from midstream.models.responses import ModelEvent, ModelRequest, TextDelta
from midstream.server.app import App, asgi
from midstream.server.limits import Limits
from midstream.server.uvicorn_server import listen, serve
from midstream.session import records
from midstream.session.records import (
    AttemptStarted,
    Delta,
    EpochStarted,
    MessageAccepted,
    Sync,
    TurnEnded,
    TurnStatus,
)
from midstream.session.turn.commands import SendMessage
from midstream.store.contract import Batch, Store
from midstream.store.sqlite import SQLiteStore

TOKEN_CHARS = 48
"""Characters of a token; with its quotes it has 50 bytes."""
READ_AT_ONCE = 2000
NO_LIMITS = Limits(connections_max=0x10000)
REPLAYED = "replayed"
"""Prefix of the names of the sessions that exist from the start; the number of their events follows."""


# --- the ceiling ---


class Log:
    """Events of one stream, and the readers that wait for more."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._waiting: list[asyncio.Future[None]] = []

    def extend(self, events: Sequence[bytes]) -> None:
        """Append events, then wake all readers."""
        self._events += events
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.done():
                each.set_result(None)

    async def follow(self, position: int) -> AsyncIterator[bytes]:
        """Yield the existing events, and those that follow."""
        while True:
            if more := self._events[position : position + READ_AT_ONCE]:
                position += len(more)
                yield b"".join(more)
            else:
                waiting = asyncio.get_running_loop().create_future()
                self._waiting.append(waiting)
                await waiting


class Raw:
    """A server of streams in memory."""

    def __init__(self) -> None:
        self._logs: dict[str, Log] = {}

    async def serve(self) -> None:
        """Serve on a free port with the defaults of uvicorn, and print the port."""
        path = "/s/{name}"
        app = Starlette(
            routes=[
                Route(path, self.begin, methods=["PUT"]),
                Route(path, self.append, methods=["POST"]),
                Route(path, self.follow, methods=["GET"]),
                WebSocketRoute(path, self.follow_by_socket),
            ]
        )
        listener = listen("127.0.0.1", 0)
        print(listener.getsockname()[1], flush=True)
        config = uvicorn.Config(app, log_level="error", access_log=False)
        await uvicorn.Server(config).serve(sockets=[listener])

    async def begin(self, request: Request) -> Response:
        """Create a stream."""
        self._logs[request.path_params["name"]] = Log()
        return Response(status_code=201)

    async def append(self, request: Request) -> Response:
        """Append one event, or several."""
        body = await request.body()
        bodies = [bytes(each) for each in _raws.decode(body)] if body.startswith(b"[") else [body]
        self._logs[request.path_params["name"]].extend([b"data: " + each + b"\n\n" for each in bodies])
        return Response(status_code=204)

    async def follow(self, request: Request) -> Response:
        """Send the existing events, and those that follow, by SSE."""
        log, position = self._logs[request.path_params["name"]], int(request.query_params.get("from", "0"))
        return StreamingResponse(log.follow(position), media_type="text/event-stream")

    async def follow_by_socket(self, socket: WebSocket) -> None:
        """Send the existing events, and those that follow, until the reader disconnects."""
        log, position = self._logs[socket.path_params["name"]], int(socket.query_params["from"])
        await socket.accept()
        sending = asyncio.create_task(_send(socket, log.follow(position)))
        await socket.receive()
        sending.cancel()


async def _send(socket: WebSocket, events: AsyncIterator[bytes]) -> None:
    async for some in events:
        await socket.send_text(some.decode())


_raws = msgspec.json.Decoder(list[msgspec.Raw])


# --- midstream ---


class Feed:
    """The next tokens of a model."""

    def __init__(self) -> None:
        self._tokens: deque[str] = deque()
        self._arrival: asyncio.Future[None] | None = None
        self.is_read = asyncio.Event()
        """Set when the model reads the feed."""

    def put(self, tokens: Sequence[str]) -> None:
        """Add tokens."""
        self._tokens += tokens
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def events(self) -> AsyncIterator[ModelEvent]:
        """Yield the tokens, without end."""
        self.is_read.set()
        while True:
            while self._tokens:
                yield TextDelta(self._tokens.popleft())
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival


class FeedModel:
    """A model that returns the posted tokens."""

    name = "feed"

    def __init__(self) -> None:
        self.feeds: dict[str, Feed] = {}

    def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        """Return the tokens that are posted for this session."""
        return self.feeds[request.session].events()


class Midstream:
    """midstream's app with two more requests, which feed its model."""

    def __init__(self, store: Path | Store) -> None:
        self._model = FeedModel()
        self._app: App = asgi(Agent(self._model), store=store, limits=NO_LIMITS, allow_unauthenticated=True)
        place = "/s/{name}"
        self._feeding = Starlette(
            routes=[Route(place, self.start_turn, methods=["PUT"]), Route(place, self.feed, methods=["POST"])]
        )

        self.world, self.requires_authentication, self.open_streams = self._app.world, False, 0
        self.start, self.drain, self.stop = self._app.start, self._app.drain, self._app.stop

    async def serve(self) -> None:
        """Serve on a free port as `midstream serve` does, and print the port."""
        await serve(self, port=0, on_listening=lambda url: print(url.rpartition(":")[2], flush=True))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the requests that feed the model; pass all others to midstream's app."""
        is_feeding = scope.get("path", "").startswith("/s/")
        await (self._feeding if is_feeding else self._app)(scope, receive, send)

    async def start_turn(self, request: Request) -> Response:
        """See `begin`."""
        return await self.begin(request.path_params["name"])

    async def begin(self, name: str) -> Response:
        """Begin a turn; respond when the model reads its feed."""
        await self._app.start()
        feed = self._model.feeds[name] = Feed()
        runner = await self._app.host.session(name, create=True)
        await runner.submit(SendMessage(UserMessage.of("go")))
        await feed.is_read.wait()
        return Response(str(runner.newest), status_code=201)

    async def feed(self, request: Request) -> Response:
        """Feed the model with one token, or several."""
        name = request.path_params["name"]
        tokens = _tokens.decode(await request.body())
        runner = self._app.host.awake.get(name)
        assert runner is not None
        position = runner.newest.position
        self._model.feeds[name].put([tokens] if isinstance(tokens, str) else tokens)
        if request.scope["query_string"]:
            await runner.wait(position)
        return Response(status_code=204)


_tokens: msgspec.json.Decoder[str | list[str]] = msgspec.json.Decoder(str | list[str])


async def store_turn(path: Path, count: int) -> None:
    """Store a session with one turn of `count` deltas, each in its own record."""
    store = SQLiteStore(path)
    await store.open()
    name = f"{REPLAYED}{count}"
    at = time.time()
    epoch = await store.claim(name, at=at)
    text = "@".ljust(TOKEN_CHARS, ".")
    found: list[records.Record] = [
        EpochStarted(epoch, "bench", at),
        MessageAccepted(1, UserMessage.of("go"), at),
        AttemptStarted(1, 1, 1, at),
        *[Delta(1, 1, 1, 0, "text", text)] * count,
        TurnEnded(1, TurnStatus.INTERRUPTED, at),
    ]
    bodies = [records.encode(each) for each in found]
    await store.append(name, Batch(bodies, expected=0, epoch=epoch, sync=Sync.NORMAL))
    await store.release(name, epoch=epoch)
    await store.close()


def main() -> None:
    """Serve on a free port of the loopback interface, and print the port."""
    name, lengths, folder = sys.argv[1:]
    path = Path(folder) / "bench.db"
    if name == "raw":
        app: Raw | Midstream = Raw()
    else:
        for length in lengths.split(","):
            asyncio.run(store_turn(path, int(length)))
        app = Midstream(path)
    run_server(app.serve())


if __name__ == "__main__":
    main()
