"""Probe of the network in between, for a client: numbered chunks, paced, over each transport.

This module has no access to sessions. `/v1/probe/stream` sends chunks over a WebSocket, `/v1/probe/events` as
server-sent events, `/v1/probe/poll` one to an answer, and `/v1/probe/chunks` gives back what is posted.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from midstream.environment import World
from midstream.errors import OverloadedError
from midstream.protocol.sse import ServerSentEvent, encode
from midstream.server.api.http_endpoints import SSE_HEADERS, number_of
from midstream.server.api.request_bodies import body_of
from midstream.server.transports.long_poll import POLL_HEADERS

CHUNKS = 5
CHUNKS_MAX = 20
EVERY_MS = 600
"""Milliseconds between two chunks: five of them last longer than the two seconds after which a first one is late."""
EVERY_MS_MAX = 1000
PROBES_MAX = 20
"""Probes under way at once; each holds a connection for 20 s at most."""


class ProbeEndpoints:
    """Everything a probe asks."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._under_way = 0

    def routes(self) -> list[BaseRoute]:
        """Return the routes, for a router."""
        return [
            WebSocketRoute("/v1/probe/stream", self.stream),
            Route("/v1/probe/events", self.events, methods=["GET"]),
            Route("/v1/probe/poll", self.poll, methods=["GET"]),
            Route("/v1/probe/chunks", self.chunks, methods=["POST"]),
        ]

    async def stream(self, socket: WebSocket) -> None:
        """Send each chunk as a message.

        Raises:
            UsageError, OverloadedError: As in each of these; nothing was sent.
        """
        chunks = self._paced(socket)
        await socket.accept()
        with contextlib.suppress(WebSocketDisconnect):
            async for chunk in chunks:
                await socket.send_text(chunk.decode())
            await socket.close()

    async def events(self, request: Request) -> Response:
        """Send each chunk as an event; the body ends after the last one."""
        chunks = self._paced(request)
        headers = {name.decode(): value.decode() for name, value in SSE_HEADERS}
        return StreamingResponse(_as_events(chunks), headers=headers)

    async def poll(self, request: Request) -> Response:
        """Send chunk `?n=`, when it is due after the one before it."""
        number, every_s = number_of(request, "n", most=CHUNKS_MAX) or 0, _every_s(request)
        if number:
            await self._world.sleep(every_s)
        return Response(_chunk(number), headers=POLL_HEADERS, media_type="application/json")

    async def chunks(self, request: Request) -> Response:
        """Give back what was posted."""
        return Response(await body_of(request), headers=POLL_HEADERS, media_type="application/octet-stream")

    def _paced(self, request: HTTPConnection) -> AsyncIterator[bytes]:
        if self._under_way >= PROBES_MAX:
            raise OverloadedError(f"{PROBES_MAX} probes are under way, which is all this server allows")
        count = number_of(request, "chunks", least=1, most=CHUNKS_MAX) or CHUNKS
        return self._chunks(count, _every_s(request))

    async def _chunks(self, count: int, every_s: float) -> AsyncIterator[bytes]:
        self._under_way += 1
        try:
            for number in range(count):
                if number:
                    await self._world.sleep(every_s)
                yield _chunk(number)
        finally:
            self._under_way -= 1


def _every_s(request: HTTPConnection) -> float:
    return (number_of(request, "every_ms", least=1, most=EVERY_MS_MAX) or EVERY_MS) / 1000


def _chunk(number: int) -> bytes:
    return b'{"probe":%d}' % number


async def _as_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for chunk in chunks:
        yield encode(ServerSentEvent(chunk, "probe"))
