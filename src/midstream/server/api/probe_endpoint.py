"""Probe of a client's network: numbered chunks at intervals, over each transport.

This module has no access to sessions. `/v1/probe/stream` sends chunks over a WebSocket, `/v1/probe/events` as
server-sent events, and `/v1/probe/poll` one in each answer. `/v1/probe/chunks` returns the posted body.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.websockets import WebSocket, WebSocketDisconnect

from midstream.environment import World
from midstream.errors import OverloadedError
from midstream.protocol.sse import ServerSentEvent, encode
from midstream.server.api.http_endpoints import SSE_HEADERS
from midstream.server.api.request_bodies import body_of, decode_query
from midstream.server.transports.long_poll import POLL_HEADERS

CHUNKS = 5
EVERY_MS = 600
"""Milliseconds between two chunks. Five chunks take longer than 2 s, the time after which a client considers the first
one late."""
EVERY_MS_MAX = 1000
PROBES_MAX = 20
"""Concurrent probes; each holds a connection for 4 s."""


class ProbeQuery(Struct, frozen=True):
    """The milliseconds between two chunks."""

    every_ms: Annotated[int, Meta(ge=1, le=EVERY_MS_MAX)] = EVERY_MS


class ProbePollQuery(ProbeQuery, frozen=True):
    """The number of the requested chunk."""

    n: Annotated[int, Meta(ge=0, le=CHUNKS - 1)] = 0


class ProbeChunk(Struct, frozen=True):
    """One numbered chunk of a probe."""

    probe: int


class ProbeEndpoints:
    """The endpoints of a probe."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._under_way = 0

    async def stream(self, socket: WebSocket) -> None:
        """Send each chunk as a message.

        Raises:
            UsageError: The query is invalid. Nothing was sent.
            OverloadedError: Too many probes run. Nothing was sent.
        """
        chunks = self._start_probe(decode_query(socket, ProbeQuery))
        await socket.accept()
        with contextlib.suppress(WebSocketDisconnect):
            async for chunk in chunks:
                await socket.send_text(chunk.decode())
            await socket.close()

    async def events(self, _: Request, query: ProbeQuery) -> Response:
        """Send numbered chunks as events at intervals; the body ends after the last one."""
        chunks = self._start_probe(query)
        headers = {name.decode(): value.decode() for name, value in SSE_HEADERS}
        return StreamingResponse(_as_events(chunks), headers=headers)

    async def poll(self, _: Request, query: ProbePollQuery) -> Response:
        """Return chunk `n`: the first one at once, others after a pause."""
        if query.n:
            await self._world.sleep(query.every_ms / 1000)
        return Response(_chunk(query.n), headers=POLL_HEADERS, media_type="application/json")

    async def chunks(self, request: Request) -> Response:
        """Return the body of the request."""
        return Response(await body_of(request), headers=POLL_HEADERS, media_type="application/octet-stream")

    def _start_probe(self, query: ProbeQuery) -> AsyncIterator[bytes]:
        if self._under_way >= PROBES_MAX:
            raise OverloadedError(f"{PROBES_MAX} probes are running, the limit of this server")
        return self._chunks(query.every_ms / 1000)

    async def _chunks(self, every_s: float) -> AsyncIterator[bytes]:
        self._under_way += 1
        try:
            for number in range(CHUNKS):
                if number:
                    await self._world.sleep(every_s)
                yield _chunk(number)
        finally:
            self._under_way -= 1


def _chunk(number: int) -> bytes:
    return msgspec.json.encode(ProbeChunk(number))


async def _as_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for chunk in chunks:
        yield encode(ServerSentEvent(chunk, "probe"))
