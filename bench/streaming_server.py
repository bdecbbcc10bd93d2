"""The servers that `bench.streaming` compares, each in a process of its own: `python -m bench.streaming_server NAME`.

`midstream` journals every token in SQLite before a reader sees it. `bare` is the least the same stack (uvicorn, a plain
ASGI callable) can do: a list in memory, one wake-up per token, no ids, no journal. Both make the tokens themselves, on
the message "COUNT RATE"; a token carries the instant it was made.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import uvicorn

from midstream.core.messages import Text, UserMessage
from midstream.core.replies import Finished, ModelEvent, ModelRequest, TextDelta
from midstream.runtime.agent import Agent
from midstream.server.app import asgi

TOKEN_BYTES = 50

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


async def tokens(order: str) -> AsyncIterator[str]:
    """Make `COUNT` tokens at `RATE` a second (0: as fast as they are taken)."""
    count, rate = map(float, order.split())
    began = time.monotonic()
    for number in range(int(count)):
        if rate and (early_s := began + number / rate - time.monotonic()) > 0:
            await asyncio.sleep(early_s)
        yield f"@{time.monotonic_ns():020d}".ljust(TOKEN_BYTES, ".")


class Producer:
    """The tokens as a model."""

    name = "producer"

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        """Make what the last message orders."""
        message = request.history.entries[-1]
        assert isinstance(message, UserMessage)
        order = "".join(part.text for part in message.parts if isinstance(part, Text))
        async for token in tokens(order):
            yield TextDelta(token)
        yield Finished()


class Bare:
    """A list in memory and one wake-up per token, over WebSocket or SSE."""

    def __init__(self) -> None:
        self._log: list[str] = []
        self._waiting: list[asyncio.Future[None]] = []

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._sse(send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.accept"})
            async with asyncio.TaskGroup() as group:
                following = group.create_task(self._follow(send))
                while (message := await receive())["type"] == "websocket.receive":
                    group.create_task(self._produce(message["text"]))
                following.cancel()

    async def _produce(self, order: str) -> None:
        async for token in tokens(order):
            self._log.append('{"t":"' + token + '"}')
            waiting, self._waiting = self._waiting, []
            for each in waiting:
                if not each.done():
                    each.set_result(None)
            await asyncio.sleep(0)

    async def _more(self, position: int) -> list[str]:
        while position >= len(self._log):
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(waiting)
            await waiting
        return self._log[position : position + 512]

    async def _follow(self, send: Send) -> None:
        position = len(self._log)
        while True:
            more = await self._more(position)
            position += len(more)
            await send({"type": "websocket.send", "text": "[" + ",".join(more) + "]"})

    async def _sse(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        position = 0
        while True:
            more = await self._more(position)
            position += len(more)
            body = "".join(f"data:{each}\n\n" for each in more).encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})


def main() -> None:
    """Serve on a free port of loopback and say which."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    app: Any = Bare() if name == "bare" else asgi(Agent(Producer()), store=folder / "bench.db")
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", ws_max_size=2**24)
    server = uvicorn.Server(config)

    async def serve() -> None:
        serving = asyncio.ensure_future(server.serve())
        while not server.started:  # noqa: ASYNC110 - uvicorn tells nobody when it listens
            await asyncio.sleep(0.01)
        print(server.servers[0].sockets[0].getsockname()[1], flush=True)
        await serving

    asyncio.run(serve())


if __name__ == "__main__":
    main()
