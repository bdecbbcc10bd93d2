"""The servers that `bench.streaming` compares, each in a process of its own:
`python -m bench.streaming_server NAME LENGTH,... FOLDER`.

All of them take tokens by POST and give them to readers:

`raw` is the least that Starlette under uvicorn can do: a list in memory and one wake-up per append; no ids, no journal.
`midstream` is the real thing: a token that is posted is what a model says next in an open turn, which our runtime
journals in SQLite and our own endpoints (`/v1/sessions/{id}/events`, `/stream`) send, framed as for everybody.

A POST is answered when the token was handed to the model, whose words nobody acknowledges; with `?journaled` when it is
in the journal. A body is one JSON string, or a list of them, each a token. Both run on uvloop and httptools, with the
garbage collector set as `midstream serve` sets it; `midstream` is served as that command does it.
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
"""Of a token; with its quotes it is the 50 bytes that a post carries."""
READ_AT_ONCE = 2000
NO_LIMITS = Limits(connections_max=0x10000)
REPLAYED = "replayed"
"""Name of the sessions that are there from the beginning, followed by how many events their turn has."""


# --- the ceiling ---


class Log:
    """Events of one stream, and who waits for more."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._waiting: list[asyncio.Future[None]] = []

    def extend(self, events: Sequence[bytes]) -> None:
        """Append, then wake everybody."""
        self._events += events
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.done():
                each.set_result(None)

    async def follow(self, position: int) -> AsyncIterator[bytes]:
        """Yield what there is, and what comes."""
        while True:
            if more := self._events[position : position + READ_AT_ONCE]:
                position += len(more)
                yield b"".join(more)
            else:
                waiting = asyncio.get_running_loop().create_future()
                self._waiting.append(waiting)
                await waiting


class Raw:
    """Streams in memory."""

    def __init__(self) -> None:
        self._logs: dict[str, Log] = {}

    async def serve(self) -> None:
        """Serve on a free port and say which, under uvicorn as it comes."""
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
        """Make a stream."""
        self._logs[request.path_params["name"]] = Log()
        return Response(status_code=201)

    async def append(self, request: Request) -> Response:
        """Append one event, or several."""
        body = await request.body()
        bodies = [bytes(each) for each in _raws.decode(body)] if body.startswith(b"[") else [body]
        self._logs[request.path_params["name"]].extend([b"data: " + each + b"\n\n" for each in bodies])
        return Response(status_code=204)

    async def follow(self, request: Request) -> Response:
        """Send what is there and what comes."""
        log, position = self._logs[request.path_params["name"]], int(request.query_params.get("from", "0"))
        return StreamingResponse(log.follow(position), media_type="text/event-stream")

    async def follow_by_socket(self, socket: WebSocket) -> None:
        """Send what is there and what comes, until the reader goes, who says nothing."""
        log, position = self._logs[socket.path_params["name"]], int(socket.query_params["from"])
        await socket.accept()
        sending = asyncio.create_task(_send(socket, log.follow(position)))
        await socket.receive()
        sending.cancel()


async def _send(socket: WebSocket, events: AsyncIterator[bytes]) -> None:
    async for some in events:
        await socket.send_text(some.decode())


_raws = msgspec.json.Decoder(list[msgspec.Raw])


# --- ours ---


class Feed:
    """What a model is to say next."""

    def __init__(self) -> None:
        self._tokens: deque[str] = deque()
        self._arrival: asyncio.Future[None] | None = None
        self.is_asked = asyncio.Event()
        """Whether somebody reads it."""

    def put(self, tokens: Sequence[str]) -> None:
        """Let the model say this."""
        self._tokens += tokens
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def events(self) -> AsyncIterator[ModelEvent]:
        """Yield what is put, for ever."""
        self.is_asked.set()
        while True:
            while self._tokens:
                yield TextDelta(self._tokens.popleft())
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival


class Fed:
    """A model that says what is posted."""

    name = "fed"

    def __init__(self) -> None:
        self.feeds: dict[str, Feed] = {}

    def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        """Say what is posted for this session."""
        return self.feeds[request.session].events()


class Midstream:
    """Our app beside the two requests that feed its model."""

    def __init__(self, store: Path | Store) -> None:
        self._model = Fed()
        self._app: App = asgi(Agent(self._model), store=store, limits=NO_LIMITS, allow_unauthenticated=True)
        place = "/s/{name}"
        self._feeding = Starlette(
            routes=[Route(place, self.start_turn, methods=["PUT"]), Route(place, self.say, methods=["POST"])]
        )

        self.world, self.requires_authentication, self.open_streams = self._app.world, False, 0
        self.start, self.drain, self.stop = self._app.start, self._app.drain, self._app.stop

    async def serve(self) -> None:
        """Serve on a free port and say which, as `midstream serve` does."""
        await serve(self, port=0, on_listening=lambda url: print(url.rpartition(":")[2], flush=True))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve what feeds the model; the rest is our app's."""
        is_feeding = scope.get("path", "").startswith("/s/")
        await (self._feeding if is_feeding else self._app)(scope, receive, send)

    async def start_turn(self, request: Request) -> Response:
        """See `begin`."""
        return await self.begin(request.path_params["name"])

    async def begin(self, name: str) -> Response:
        """Open a turn; answer when the model was asked."""
        await self._app.start()
        feed = self._model.feeds[name] = Feed()
        runner = await self._app.host.session(name, create=True)
        await runner.submit(SendMessage(UserMessage.of("go")))
        await feed.is_asked.wait()
        return Response(str(runner.newest), status_code=201)

    async def say(self, request: Request) -> Response:
        """Let the model say one token, or several."""
        name = request.path_params["name"]
        said = _tokens.decode(await request.body())
        runner = self._app.host.awake(name)
        assert runner is not None
        position = runner.newest.position
        self._model.feeds[name].put([said] if isinstance(said, str) else said)
        if request.scope["query_string"]:
            await runner.wait(position)
        return Response(status_code=204)


_tokens: msgspec.json.Decoder[str | list[str]] = msgspec.json.Decoder(str | list[str])


async def store_turn(path: Path, count: int) -> None:
    """Store a session whose one turn has `count` events of the model, each of them a record."""
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
    """Serve on a free port of loopback and say which."""
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
