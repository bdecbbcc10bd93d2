"""The ASGI app: routes, guards and errors around one host.

It runs alone (its lifespan starts and stops the host) or mounted in another app, whose server never tells it
about its life: then it starts with the first request, and whoever mounts it calls `stop()` at the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router, WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from midstream.core.retention import Retention
from midstream.core.turn import LOOK_BACK_S
from midstream.errors import DrainingError, MidstreamError
from midstream.runtime.agent import Agent
from midstream.runtime.host import Host
from midstream.server.connection import CONNECTIONS_MAX, Connections
from midstream.server.guards import check_origin
from midstream.server.http import EventsEndpoint, HttpEndpoints, StreamCutError
from midstream.server.lifespan import live
from midstream.server.pages import page_routes
from midstream.server.poll import PollEndpoint
from midstream.server.probe import ProbeEndpoints
from midstream.server.problems import internal_problem, problem_of, problem_of_http, refuse
from midstream.server.websocket import WebSocketEndpoint
from midstream.store.contract import Store
from midstream.store.sqlite import SQLiteStore
from midstream.world import World

GRACE_S = 5.0
"""Seconds that running tools have to end when the app is stopped."""
_CHUNK_HEADERS = (
    "content-type",
    "idempotency-key",
    "last-event-id",
    "x-idempotency-event-id",
    "x-idempotency-key",
    "x-idempotency-next-seqno",
    "x-idempotent-encryption-key",
    "x-midstream-connection",
)


def asgi(
    agent: Agent,
    *,
    store: str | Path | Store = "midstream.db",
    world: World | None = None,
    look_back_s: float = LOOK_BACK_S,
    allowed_origins: Collection[str] = (),
    connections_max: int = CONNECTIONS_MAX,
    retention: Retention = Retention(),
    coalesce_s: float = 0.0,
) -> App:
    """Make the ASGI app that hosts an agent: run it with `midstream serve`, or mount it in your own.

    Args:
        agent: What answers.
        store: A SQLite file, made where it is missing, or a store of your own.
        world: Clock, chance and tasks; the real ones by default.
        look_back_s: Seconds after which an interrupted turn is ended at start-up instead of carried on.
        allowed_origins: Origins such as `https://app.example` whose pages may ask, beside the app's own.
        connections_max: Streams that may be open at once.
        retention: How long events can be replayed, and sessions are kept.
        coalesce_s: Seconds (0.1 at most) for which events are held back, so that several go out at once: fewer writes
            for words that come 5 to 20 ms later. A client may ask for it where this is 0.
    """
    world = world or World()
    if isinstance(store, str | Path):
        store = SQLiteStore(store, world=world)
    host = Host(agent, store, world=world, look_back_s=look_back_s, retention=retention)
    connections = Connections(limit=connections_max)
    return App(
        host,
        connections,
        allowed_origins=allowed_origins,
        retention_s=look_back_s,
        coalesce_s=coalesce_s,
    )


class App:
    """An ASGI app around a host. Make it with `asgi`."""

    def __init__(
        self,
        host: Host,
        connections: Connections,
        *,
        allowed_origins: Collection[str],
        retention_s: float,
        coalesce_s: float = 0.0,
    ) -> None:
        self.host = host
        self.connections = connections
        self._allowed_origins = frozenset(allowed_origins)
        self._starting = asyncio.Lock()
        self._is_started = False
        self._router = _router_of(host, connections, retention_s, coalesce_s)
        self._shared: ASGIApp = self._guarded
        if allowed_origins:
            self._shared = CORSMiddleware(
                self._guarded,
                allow_origins=[*allowed_origins],
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=_CHUNK_HEADERS,
                expose_headers=["retry-after", "x-midstream-replayed"],
            )

    @property
    def world(self) -> World:
        """Clock, chance and tasks."""
        return self.host.world

    @property
    def open_streams(self) -> int:
        """Streams that are open now."""
        return len(self.connections)

    async def start(self) -> None:
        """Open the store and begin recovery. Calling it again is harmless.

        Raises:
            StoreBusyError, StoreFullError, StoreDamagedError: The store cannot be opened. Nothing was changed.
        """
        if self._is_started:
            return
        async with self._starting:
            if not self._is_started:
                await self.host.start()
                self._is_started = True

    def drain(self) -> None:
        """Tell every connection to reconnect elsewhere or later, and refuse new ones. Turns go on until `stop`.

        Call it when your own server is told to end, before it waits for its connections: they would stay open.
        """
        self.connections.drain(
            DrainingError("this server is shutting down: reconnect to carry on", retry_after_s=1.0)
        )
        self.host.drain()

    async def stop(self, *, grace_s: float = GRACE_S) -> None:
        """Drain, give running tools `grace_s` seconds, close the store. Calling it again is harmless."""
        self.drain()
        await self.host.stop(grace_s=grace_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, a WebSocket, or the life of the server."""
        if scope["type"] == "lifespan":
            await live(self.start, self.stop, receive, send)
            return
        is_begun = False

        async def send_and_know(message: Message) -> None:
            nonlocal is_begun
            is_begun = True
            await send(message)

        try:
            await self._shared(scope, receive, send_and_know)
        except StreamCutError:
            raise
        except MidstreamError as error:
            if is_begun:
                raise
            await refuse(problem_of(error), scope, receive, send)
        except HTTPException as error:
            await refuse(problem_of_http(error), scope, receive, send)
        except Exception:
            if not is_begun:
                await refuse(internal_problem(), scope, receive, send)
            raise

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        check_origin(scope, self._allowed_origins)
        await self.start()
        # Errors come here and not to the handlers of an app that mounts this one.
        await self._router({**scope, "app": self, "starlette.exception_handlers": ({}, {})}, receive, send)


def _router_of(host: Host, connections: Connections, retention_s: float, coalesce_s: float) -> Router:
    one = "/v1/sessions/{session_id}"
    events = EventsEndpoint(host, connections, retention_s=retention_s, coalesce_s=coalesce_s)
    stream = WebSocketEndpoint(host, connections, retention_s=retention_s, coalesce_s=coalesce_s)
    routes = [
        *HttpEndpoints(host, connections).routes(),
        Route(f"{one}/events", events, methods=["GET", "POST"]),
        Route(
            f"{one}/poll", PollEndpoint(host, connections, retention_s=retention_s), methods=["GET", "POST"]
        ),
        WebSocketRoute(f"{one}/stream", stream),
        *ProbeEndpoints(host.world).routes(),
        *page_routes(),
    ]
    return Router(routes, redirect_slashes=False, default=_not_found)


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG001 - ASGI's shape
    raise HTTPException(404)
