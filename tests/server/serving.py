"""Shared parts of the server's tests: a served app, and its clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import httpx2
import websockets
from msgspec import Struct
from websockets.typing import Origin

from midstream.engine.agent import Agent
from midstream.environment import World
from midstream.server.app import App, asgi
from midstream.server.auth.access import Access
from midstream.server.limits import CONNECTIONS_MAX, Limits
from midstream.server.raw_connections import RawLimits
from midstream.server.uvicorn_server import STOP_WITHIN_S, serve
from midstream.store.contract import Store
from midstream.store.memory import MemoryStore
from midstream.testing.scripted_model import Script, ScriptedModel
from midstream.tools.function_tools import Tool

SECRET = "s" * 43
KEYS = {"x-idempotency-key": "k1", "x-idempotent-encryption-key": SECRET}
WAIT_S = 60.0
Json = dict[str, Any]


def make_app(
    script: Script = (),
    *,
    store: Store | None = None,
    tools: Sequence[Tool | Callable[..., Any]] = (),
    world: World | None = None,
    allowed_origins: Sequence[str] = (),
    connections_max: int = CONNECTIONS_MAX,
    access: Access | None = None,
    limits: Limits | None = None,
) -> App:
    """Make an app with a scripted model and a store in memory."""
    return asgi(
        Agent(ScriptedModel(script), tools=tools),
        store=store or MemoryStore(),
        world=world,
        allowed_origins=allowed_origins,
        access=access,
        limits=limits or Limits(connections_max=connections_max),
    )


@contextlib.asynccontextmanager
async def asgi_client(app: App) -> AsyncIterator[httpx2.AsyncClient]:
    """Call an app through its ASGI interface."""
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://testserver") as client:
        yield client
    await app.stop(grace_s=0.1)


class Served(Struct):
    """An app that uvicorn serves on a free port of this machine."""

    app: App
    url: str
    http: httpx2.AsyncClient
    stop: asyncio.Event
    serving: asyncio.Task[None]

    def socket(
        self,
        session: str = "s1",
        *,
        query: str = "",
        origin: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> websockets.connect:
        """Connect a WebSocket to a session's stream."""
        url = f"{self.url.replace('http', 'ws')}/v1/sessions/{session}/stream{query}"
        named = Origin(origin) if origin else None
        return websockets.connect(url, max_size=None, origin=named, additional_headers=headers)


@contextlib.asynccontextmanager
async def served(
    app: App,
    *,
    port: int = 0,
    allowed_hosts: Sequence[str] = (),
    trusted_proxies: Sequence[str] = (),
    stop_within_s: float = STOP_WITHIN_S,
    raw_limits: RawLimits = RawLimits(),  # noqa: B008 - frozen
) -> AsyncIterator[Served]:
    """Serve an app until the end of the block."""
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    work = serve(
        app,
        port=port,
        allowed_hosts=allowed_hosts,
        trusted_proxies=trusted_proxies,
        stop_within_s=stop_within_s,
        on_listening=listening.set_result,
        stop=stop,
        raw_limits=raw_limits,
    )
    serving = asyncio.create_task(work)
    try:
        url = await asyncio.wait_for(listening, WAIT_S)
        async with httpx2.AsyncClient(base_url=url, timeout=WAIT_S) as client:
            yield Served(app, url, client, stop, serving)
    finally:
        stop.set()
        await asyncio.wait_for(serving, 2 * WAIT_S)


class Socket:
    """A raw WebSocket peer: it sends and receives frames as JSON."""

    def __init__(self, connecting: websockets.connect) -> None:
        self._connecting = connecting

    async def __aenter__(self) -> Self:
        self._socket = await self._connecting.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._connecting.__aexit__(kind, error, trace)

    async def send(self, frame: Json | str) -> None:
        await self._socket.send(frame if isinstance(frame, str) else json.dumps(frame))

    async def receive(self) -> Json:
        frame: Json = json.loads(await asyncio.wait_for(self._socket.recv(), WAIT_S))
        return frame

    async def receive_until(self, kind: str) -> list[Json]:
        """Receive frames up to and with the first one that is a `kind`, or that carries a record of this kind."""
        received: list[Json] = []
        while True:
            frame = await self.receive()
            received.append(frame)
            if kind in {frame["type"], *(event["record"]["type"] for event in frame.get("events", ()))}:
                return received

    async def receive_close(self) -> tuple[int, str]:
        """Receive the close, and fail on any other frame."""
        await asyncio.wait_for(self._socket.wait_closed(), WAIT_S)
        return self._socket.close_code or 0, self._socket.close_reason or ""


def opening(**fields: object) -> Json:
    return {"type": "open", "stream": "k1", "secret": SECRET, **fields}


def command(seqno: int = 0, words: str = "hi", **more: object) -> Json:
    return {"type": "command", "seqno": seqno, "payload": {**send_payload(words), **more}}


def send_payload(words: str) -> Json:
    return {"type": "send", "parts": [{"type": "text", "text": words}]}


def abort(seqno: int) -> Json:
    return {"type": "command", "seqno": seqno, "payload": {"type": "cancel"}}


async def post(
    client: httpx2.AsyncClient, frame: Json, *, session: str = "s1", **headers: str
) -> httpx2.Response:
    """Send one frame by POST, under the usual keys where `headers` have no others."""
    return await client.post(f"/v1/sessions/{session}/commands", json=frame, headers={**KEYS, **headers})


def records_of(frames: Sequence[Json]) -> list[Json]:
    """Return all records of frames, with their ids."""
    return [event for frame in frames for event in frame.get("events", ())]


def words_of(events: Sequence[Json]) -> str:
    """Return the text that a model streamed in these records."""
    return "".join(event["record"]["text"] for event in events if event["record"]["type"] == "delta")
