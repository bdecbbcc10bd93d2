"""The ASGI app: routes, guards and errors around one host.

It runs alone (its lifespan starts and stops the host) or mounted in another app. A mounted app receives no lifespan
events: pass `App.lifespan` to the app around it, which then starts, drains and stops this one too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Collection, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, Never

from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match, Route, Router, WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from midstream.dialects.a2a_messages import A2aOptions
from midstream.dialects.mcp_messages import McpOptions
from midstream.engine.agent import Agent, require_agent
from midstream.engine.host import Host
from midstream.engine.sleeping import MemoryLimits
from midstream.environment import World
from midstream.errors import DrainingError, MidstreamError, UsageError
from midstream.number_checks import require_seconds
from midstream.observability.observers import Observer
from midstream.protocol.stream_settings import StreamSettings
from midstream.server.api.a2a_endpoint import A2aEndpoint, A2aRest, A2aTasks
from midstream.server.api.ag_ui_endpoint import AgUiEndpoint
from midstream.server.api.chat_endpoint import ChatEndpoint
from midstream.server.api.durable_stream_endpoint import PlainStreamReader, PlainStreamWriter
from midstream.server.api.http_endpoints import EventsEndpoint, HttpEndpoints, StreamCutError
from midstream.server.api.langgraph_endpoint import LangGraphAssistants, LangGraphThreads
from midstream.server.api.langgraph_protocol_endpoint import LangGraphProtocol
from midstream.server.api.langgraph_runs_endpoint import LangGraphRuns
from midstream.server.api.langgraph_threads import GraphThreads
from midstream.server.api.mcp_endpoint import McpCalls, McpEndpoint
from midstream.server.api.metrics import Metrics, MetricsPage
from midstream.server.api.nodes_endpoint import NodesEndpoint
from midstream.server.api.plain_streams import PlainStreams
from midstream.server.api.probe_endpoint import ProbeEndpoints
from midstream.server.api.problems import internal_problem, problem_of, problem_of_http, refuse
from midstream.server.api.route_table import OpenApiEndpoint, routes_of
from midstream.server.api.session_streams import SessionStreamReader
from midstream.server.api.stream_sweeping import StreamSweeper
from midstream.server.api.subscription_delivery import StreamSubscriptions
from midstream.server.api.subscription_endpoint import SubscriptionOwnerEndpoint, WakeEndpoint
from midstream.server.audit_log import AuditLog
from midstream.server.auth.access import Access
from midstream.server.auth.access_routes import AccessRoutes
from midstream.server.auth.cors import Cors
from midstream.server.auth.middleware import SESSION_PATH, TRAIL, AuthMiddleware, path_of
from midstream.server.auth.origins import origins_of
from midstream.server.auth.session_unlocking import HELD, unlock_for
from midstream.server.auth.viewer_token_routes import ViewerRoutes
from midstream.server.lifespan import live, on_end_signal
from midstream.server.limits import Limits
from midstream.server.node_reporting import NodeReports
from midstream.server.pages import page_routes
from midstream.server.transports.connection import Connections
from midstream.server.transports.http_commands import CommandsEndpoint
from midstream.server.transports.long_poll import PollEndpoint
from midstream.server.transports.websocket_endpoint import WebSocketEndpoint
from midstream.server.webhooks import Webhooks
from midstream.session.retention import Retention
from midstream.session.turn.states import LOOK_BACK_S
from midstream.store.contract import Store
from midstream.store.store_registry import open_store

_NO_HANDLERS: tuple[dict[Never, Never], dict[Never, Never]] = ({}, {})
"""No exception handlers: errors reach this app, not the handlers of an app that mounts it."""
_SESSION = "/v1/sessions/{session_id}"
"""Path of one session."""
_NO_LIFESPAN = (
    "the app was started by a request, because it is mounted without its lifespan: interrupted turns were not resumed "
    "before, and a SIGTERM does not drain it. Pass `lifespan=agents.lifespan` to Starlette or FastAPI, where `agents` "
    "is what `midstream.asgi` returned."
)
_log = logging.getLogger(__name__)
GRACE_S = 5.0
"""Seconds for running tools to end when the app is stopped."""


def asgi(
    agent: Agent,
    *,
    store: str | Path | Store = "midstream.db",
    world: World | None = None,
    look_back_s: float = LOOK_BACK_S,
    settings: StreamSettings | None = None,
    allowed_origins: Collection[str] = (),
    retention: Retention = Retention(),
    memory: MemoryLimits = MemoryLimits(),
    access: Access | None = None,
    limits: Limits = Limits(),
    observers: Sequence[Observer] = (),
    allow_unauthenticated: bool = False,
    audit: AuditLog | None = None,
    mcp: McpOptions = McpOptions(),
    a2a: A2aOptions = A2aOptions(),
    webhook_origins: Collection[str] = (),
) -> App:
    """Create the ASGI app that hosts an agent. Run it with `midstream serve`, or mount it in another app.

    Args:
        agent: The agent that answers.
        store: A store, or the path of a SQLite file, which is created if it is missing.
        world: Clock, random numbers and tasks; the real ones by default.
        look_back_s: Greatest age of an interrupted turn that continues at start-up; an older one is ended.
        settings: Settings of streams, including their look-back; `App.settings` changes them later.
        allowed_origins: Further origins, such as `https://app.example`, whose pages may send requests.
        retention: How long events can be replayed, and sessions are kept.
        memory: Limits of the memory of all loaded sessions, and of the time that an idle one stays loaded.
        access: Authentication and rights. None serves every client of this machine, and logs a warning.
        limits: Limits of each caller.
        observers: Notified of appends, such as `midstream.observability.opentelemetry.OpenTelemetry`. The first
            `MetricsPage` among them is served at `/metrics`.
        allow_unauthenticated: Serve clients of other machines without `access`, for an app that is mounted in one with
            its own login. By default they are refused.
        audit: Log of the acts of principals and of refusals, one JSON line each.
        mcp: Options for MCP clients, such as the tools that they receive.
        a2a: Options for A2A clients, and the contents of the agent card.
        webhook_origins: Origins in private networks, such as `http://127.0.0.1:9000`, to which subscriptions of plain
            streams may send webhooks. Without a port, each port of the host. Others need a public address and HTTPS.

    Raises:
        UsageError: `access` is given, and the store has no key-value part (`KeyValue`); or one of `allowed_origins` or
            of `webhook_origins` is not an origin, such as `*`.
    """
    require_agent(agent)
    allowed_origins = origins_of(allowed_origins)
    world = world or World()
    store = open_store(store, world=world)
    settings = settings or StreamSettings(look_back_s=look_back_s)
    host = Host(
        agent,
        store,
        world=world,
        look_back_s=settings.look_back_s,
        retention=retention,
        tail_bytes_max=settings.tail_bytes_max,
        memory=memory,
    )
    for observer in observers:
        host.observers.add(observer)
    page = next((each for each in observers if isinstance(each, MetricsPage)), None)
    auth = AuthMiddleware(
        host, access, limits, allowed_origins, allow_unauthenticated=allow_unauthenticated, audit=audit
    )
    connections = Connections(limit=limits.connections_max, settings=settings)
    webhooks = Webhooks(host.store, world, webhook_origins)
    return App(
        host, connections, auth, page, allowed_origins=allowed_origins, mcp=mcp, a2a=a2a, webhooks=webhooks
    )


class App:
    """ASGI app around a host, created by `asgi`."""

    def __init__(
        self,
        host: Host,
        connections: Connections,
        auth: AuthMiddleware,
        page: MetricsPage | None = None,
        *,
        allowed_origins: Collection[str],
        mcp: McpOptions = McpOptions(),
        a2a: A2aOptions = A2aOptions(),
        webhooks: Webhooks,
    ) -> None:
        self.host = host
        self.connections = connections
        self.auth = auth
        self._starting = asyncio.Lock()
        self._is_started = False
        self.reports = NodeReports(
            host, "serve", name=host.agent.name, figures=self._figures, counters=auth.counters.of_fleet
        )
        """Reports of the servers that share the store."""
        streams = PlainStreams(host)
        self._subscriptions = StreamSubscriptions(host, streams, webhooks)
        self._sweeper = StreamSweeper(host, streams)
        others = _stream_endpoints(host, connections, streams, self._sweeper, self._subscriptions)
        others.append(McpEndpoint(McpCalls(host, connections, mcp)))
        tasks = A2aEndpoint(A2aTasks(host, connections, a2a), is_authenticated=auth.access is not None)
        others.append(tasks)
        self._router = _router_of(host, connections, auth, [NodesEndpoint(self.reports), *others], tasks)
        self.metrics = None if page is None else Metrics(page, self._figures)
        """Serves `/metrics`; None without an observer that has a page."""
        if self.metrics is not None:
            self._router.routes += routes_of(self.metrics)
        self._cors = Cors(self._answer, allowed_origins)

    @property
    def world(self) -> World:
        """Clock, random numbers and tasks."""
        return self.host.world

    @property
    def requires_authentication(self) -> bool:
        """Whether requests need a credential."""
        return self.auth.access is not None

    @property
    def open_streams(self) -> int:
        """Number of open streams."""
        return len(self.connections)

    @property
    def settings(self) -> StreamSettings:
        """Settings of streams. New settings apply to connections and recoveries that begin later."""
        return self.connections.settings

    @settings.setter
    def settings(self, settings: StreamSettings) -> None:
        self.connections.settings = settings
        self.host.look_back_s = settings.look_back_s
        self.host.tail_bytes_max = settings.tail_bytes_max

    async def start(self) -> None:
        """Open the store and begin recovery. Idempotent.

        Raises:
            StoreBusyError, StoreFullError, StoreDamagedError: The store cannot be opened. Nothing was changed.
        """
        if self._is_started:
            return
        async with self._starting:
            if not self._is_started:
                await self.host.start()
                await self.auth.open()
                self.reports.start()
                self._subscriptions.start()
                self._sweeper.start()
                self._is_started = True

    async def _start_late(self) -> None:
        """Start on the first request, and log a warning about the missing lifespan."""
        if not self._starting.locked():
            _log.warning(_NO_LIFESPAN)
        await self.start()

    @contextlib.asynccontextmanager
    async def lifespan(self, outer: object) -> AsyncIterator[None]:  # noqa: ARG002 - the shape that Starlette calls
        """Start and stop with the app that mounts this one, and drain at SIGTERM or SIGINT.

            agents = midstream.asgi(agent)
            app = Starlette(routes=[Mount("/agent", agents)], lifespan=agents.lifespan)  # or FastAPI(lifespan=...)

        Or enter it in your own lifespan: `async with agents.lifespan(app): ...`.

        Args:
            outer: The app that mounts this one, as Starlette and FastAPI pass it.

        Raises:
            StoreBusyError, StoreFullError, StoreDamagedError: The store cannot be opened. Nothing was changed.
        """
        await self.start()
        with on_end_signal(self.drain):
            try:
                yield
            finally:
                await self.stop()

    def drain(self) -> None:
        """Send all connections a request to reconnect elsewhere or later, and refuse new ones. Turns continue until
        `stop`.

        Call it when your server begins to shut down, before it waits for its connections. Otherwise they stay open.
        """
        self.connections.drain(_draining())
        self.host.drain()

    async def stop(self, *, grace_s: float = GRACE_S) -> None:
        """Drain, wait at most `grace_s` seconds for running tools, and close the store. Idempotent.

        It continues if its caller is cancelled.
        """
        require_seconds("grace_s", grace_s)
        self.drain()
        await self.host.world.finish(self._stop(grace_s), name="stop of the app")

    async def _stop(self, grace_s: float) -> None:
        await self.auth.close()
        await self.reports.stop()
        await self._subscriptions.stop()
        await self._sweeper.stop()
        await self.host.stop(grace_s=grace_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, a WebSocket, or the ASGI lifespan."""
        if scope["type"] == "lifespan":
            await live(self.start, self.stop, receive, send)
            return
        await self._cors(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request; answer a refusal with a problem detail."""
        is_begun = False

        def send_and_mark_begun(message: Message) -> Awaitable[None]:
            nonlocal is_begun
            is_begun = True
            return send(message)

        try:
            await self._guard(scope, receive, send_and_mark_begun)
        except StreamCutError:
            raise
        except asyncio.CancelledError:
            # The server shuts down; the client can reconnect.
            if self.host.is_draining and not is_begun:
                await refuse(problem_of(_draining()), scope, receive, send)
            raise
        except MidstreamError as error:
            if is_begun:
                raise
            # The shutdown may have closed the store during the request.
            is_late = self.host.is_draining and isinstance(error, UsageError)
            await refuse(problem_of(_draining() if is_late else error), scope, receive, send)
        except HTTPException as error:
            headers = {name.lower(): value for name, value in (error.headers or {}).items()}
            headers |= self._allow_header(scope, error)
            await refuse(problem_of_http(error), scope, receive, send, headers)
        except Exception:
            if not is_begun:
                await refuse(internal_problem(), scope, receive, send)
            raise

    def _allow_header(self, scope: Scope, error: HTTPException) -> dict[str, str]:
        """Return the `Allow` header of a 405 response (RFC 9110, 15.5.6), unless an endpoint has set it."""
        if error.status_code != HTTPStatus.METHOD_NOT_ALLOWED:
            return {}
        matches = [
            (route, route.matches(scope)[0]) for route in self._router.routes if isinstance(route, Route)
        ]
        if any(match is Match.FULL for _, match in matches):
            return {}
        found = [route for route, match in matches if match is not Match.NONE]
        # Both `/threads/search` and `/threads/{id}` match `/threads/search`: the most specific route counts.
        nearest = min(map(_specificity, found), default=(0, 0))
        methods = {
            method for route in found if _specificity(route) == nearest for method in route.methods or ()
        }
        methods = methods or {"GET", "HEAD"}  # a file
        return {"allow": ", ".join(sorted(methods))}

    def _figures(self) -> dict[str, float]:
        return {
            "streams": self.open_streams,
            "sessions_awake": len(self.host.awake),
            "sessions_bytes": self.host.memory_held,
            "turns_running": self.host.awake.turns_running,
            "recovery_left": self.host.recovery.total - self.host.recovery.done,
            "is_draining": self.host.is_draining,
            "leases": self.host.awake.leases,
            "sessions_followed": self.host.awake.followed,
            "peers": self.host.peers,
            "appends_waiting": self.host.store.appends_waiting,
            "loop_lag_seconds": self.reports.loop_lag_s,
            "clients_ahead": self.connections.ahead,
        }

    async def _guard(self, scope: Scope, receive: Receive, send: Send) -> None:
        trail = self.auth.trail_of(scope)
        try:
            self.auth.check_scope(scope)
            if self._cors.is_preflight(scope):
                await self._cors.allow(send)
                return
            if not self._is_started:
                await self._start_late()
            scope = await self.auth.admit({**scope, TRAIL: trail})  # the old scope is freed: streams are long
            with await unlock_for(self.host, scope) as held:
                scope["app"], scope[HELD], scope["starlette.exception_handlers"] = self, held, _NO_HANDLERS
                await self._router(scope, receive, send)
        except MidstreamError as error:
            trail.note_failure(error.code)
            raise


def _specificity(route: Route) -> tuple[int, int]:
    """Return a sort key: the more specific a route, the smaller."""
    return len(route.param_convertors), -len(route.path)


def _draining() -> DrainingError:
    return DrainingError("this server is shutting down; reconnect to continue", retry_after_s=1.0)


class _Routes(Router):
    """Router with one dictionary lookup for paths of a session; other paths are tried route by route."""

    def __init__(self, routes: Sequence[BaseRoute], default: ASGIApp) -> None:
        super().__init__(routes, redirect_slashes=False, default=default)
        self._of_session = {
            (method, what): route.app
            for route in routes
            if isinstance(route, Route) and route.path.startswith(_SESSION)
            for method in route.methods or ()
            if "{" not in (what := route.path.removeprefix(_SESSION))
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = SESSION_PATH.fullmatch(path_of(scope)) if scope["type"] == "http" else None
        app = self._of_session.get((scope["method"], found["what"] or "")) if found else None
        if found is None or app is None:
            await super().__call__(scope, receive, send)
            return
        scope["path_params"] = {"session_id": found["session"]}
        await app(scope, receive, send)


def _router_of(
    host: Host,
    connections: Connections,
    auth: AuthMiddleware,
    others: Sequence[Any],
    tasks: A2aEndpoint,
) -> _Routes:
    probe = ProbeEndpoints(host.world)
    endpoints: list[Any] = [
        HttpEndpoints(host, connections),
        CommandsEndpoint(host, connections),
        EventsEndpoint(host, connections),
        PollEndpoint(host, connections),
        ChatEndpoint(host, connections),
        AgUiEndpoint(host, connections),
        *_langgraph_endpoints(host, connections),
        probe,
        OpenApiEndpoint(),
        *others,
    ]
    if auth.access is not None:
        endpoints.append(AccessRoutes(auth))
    if auth.access is not None or host.locks is not None:
        endpoints.append(ViewerRoutes(host, auth))
    return _Routes(
        [
            *(route for each in endpoints for route in routes_of(each)),
            WebSocketRoute(f"{_SESSION}/stream", WebSocketEndpoint(host, connections)),
            WebSocketRoute("/v1/probe/stream", probe.stream),
            *page_routes(),
        ],
        A2aRest(tasks, _raise_not_found),
    )


def _stream_endpoints(
    host: Host,
    connections: Connections,
    streams: PlainStreams,
    sweeper: StreamSweeper,
    subscriptions: StreamSubscriptions,
) -> list[Any]:
    return [
        WakeEndpoint(host, subscriptions),  # before the streams, whose names may contain slashes
        SubscriptionOwnerEndpoint(host, streams, subscriptions),
        SessionStreamReader(host, connections),
        PlainStreamWriter(host, streams, sweeper),
        PlainStreamReader(host, streams, connections),
    ]


def _langgraph_endpoints(host: Host, connections: Connections) -> list[Any]:
    threads = GraphThreads(host, connections)
    return [
        LangGraphAssistants(host),
        LangGraphThreads(threads),
        LangGraphRuns(threads),
        LangGraphProtocol(threads),
    ]


async def _raise_not_found(scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG001 - ASGI's shape
    raise HTTPException(404)
