"""The gateway as an ASGI app: authentication, routes, and errors in the format of the API that was called."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol, runtime_checkable
from urllib.parse import parse_qsl, unquote

import msgspec
from starlette.types import Message, Receive, Scope, Send

from midstream.agents.agent_runs import SILENCE_MAX_S
from midstream.background_loops import spawn_loop
from midstream.dialects.accepted_requests import Accepting
from midstream.dialects.anthropic import estimate_tokens
from midstream.dialects.api_callers import ApiCaller
from midstream.dialects.api_errors import BUG, ApiError, final, refusal_of
from midstream.dialects.application_sessions import ApplicationSessions
from midstream.dialects.conversation_routes import ConversationRoutes
from midstream.dialects.dialect import Dialect
from midstream.dialects.dialect_registry import RESPONSES, dialect_at, dialect_for_errors
from midstream.dialects.gateway_bodies import (
    Arrived,
    GoneError,
    RefusedError,
    body_of,
    headers_of,
    is_local,
    refusal_in,
)
from midstream.dialects.kept_conversations import KeptConversations
from midstream.dialects.live_responses import GRACE_S, LiveResponses
from midstream.dialects.passthrough_requests import PASSED, PassedRequests
from midstream.dialects.request_fields import BadFieldError, field, fields_of
from midstream.dialects.response_inputs import ResponseInputs
from midstream.dialects.response_reader import ResponseReader, refuse, refuse_socket, send_whole
from midstream.dialects.response_routes import ResponseRoutes
from midstream.dialects.response_socket import ResponseSocket
from midstream.dialects.stored_conversations import Conversations
from midstream.dialects.usage_counting import UsageCounting
from midstream.dialects.usage_ledger import UsageLedger
from midstream.dialects.usage_totals import Prices
from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.engine.sleeping import MemoryLimits
from midstream.environment import World
from midstream.errors import DrainingError, MidstreamError, UsageError
from midstream.history.codecs.codec_spec import Json
from midstream.models.model import Model
from midstream.models.routed_models import RoutedModels
from midstream.number_checks import require_seconds
from midstream.server.auth.origins import origins_of
from midstream.server.client_keys import ClientKey
from midstream.server.gateway_limits import GatewayLimits
from midstream.server.gateway_users import GatewayCallers, GatewayUsers
from midstream.server.lifespan import live
from midstream.server.node_reporting import NodeReports
from midstream.session.retention import Retention
from midstream.store.contract import Store
from midstream.store.store_registry import open_store
from midstream.timing import StallBudgets
from midstream.version import __version__

KEPT_S = 3600.0
"""Seconds for which a conversation is kept after its last response."""
PRIVATE_KEPT_S = 600.0
"""The same for a conversation in memory only (`store: false`, side calls). It bounds their number."""
_SILENCE = StallBudgets(math.inf, math.inf, math.inf, SILENCE_MAX_S, SILENCE_MAX_S, SILENCE_MAX_S)
"""No stall limits here: the pool of an agent (`--silence`) and the HTTP client of a model have them."""
IDLE_S = 10.0
"""Seconds without a request after which a conversation is removed from memory."""
_NOT_FOUND = ApiError(404, "not_found", "no such address")


def gateway(
    model: Model,
    *,
    token: str | None,
    users: Path | None = None,
    prices: Mapping[str, Prices] = {},
    store: str | Path | Store | None = None,
    names: Collection[str] = (),
    allowed_origins: Collection[str] = (),
    grace_s: float = GRACE_S,
    kept_s: float = KEPT_S,
    shows_upstream_calls: bool = True,
    world: World | None = None,
) -> Gateway:
    """Create the ASGI app that serves a model through the APIs of OpenAI and Anthropic.

    Args:
        model: The model or pool that answers; closed with the app if it has an `aclose`.
        token: The API key of clients, at least 16 characters; None admits every client that can reach the gateway.
        users: A token file with each user's key and limits, read again when it changes. It may be missing at the start.
        prices: Prices of models by name, for the cost of usage; the name "" stands for all other models.
        store: Store of responses and of conversation digests, or its URL or path (see `open_store`). By default they
            are in memory, and lost with the process.
        names: Model names that client applications may request; by default any, or those of `RoutedModels`.
        allowed_origins: Origins such as `https://app.example` whose pages may send requests without a token.
        grace_s: Seconds for which a response continues without a reader.
        kept_s: Seconds for which the text of a conversation is kept after its last response; digests remain.
        shows_upstream_calls: Show tools that the upstream runs itself as thinking; otherwise omit them.
        world: Clock, random numbers and tasks; the real ones by default.

    Raises:
        UsageError: The store is unknown, `allowed_origins` has an invalid origin, the token is too short, `users` is
            given without a token, its file is invalid, `grace_s` or `kept_s` is not a number of seconds, or
            `RoutedModels` lacks one of `names`.
    """
    for option, seconds in (("grace_s", grace_s), ("kept_s", kept_s)):
        require_seconds(option, seconds, most=math.inf)
    world = world or World()
    if users is not None and token is None:
        raise UsageError("`users` needs a token: a gateway without a token does not check keys")
    if isinstance(model, RoutedModels):
        if unknown := set(names).difference(model.names):
            raise UsageError(f"none of the models has the name {', '.join(sorted(unknown))}")
        names = names or model.names
    return Gateway(
        model,
        open_store("memory:" if store is None else store, world=world),
        is_durable=store not in (None, "memory:"),
        callers=GatewayCallers(
            None if token is None else ClientKey(token, world),
            None if users is None else GatewayUsers(users, world),
            origins_of(allowed_origins),
        ),
        prices=prices,
        names=names,
        grace_s=grace_s,
        kept_s=kept_s,
        shows_upstream_calls=shows_upstream_calls,
        world=world,
    )


@runtime_checkable
class _Closing(Protocol):
    async def aclose(self) -> None: ...


class _CancelledInAnswerError(asyncio.CancelledError):
    """A request was cancelled after its upstream had sent something. Its client must not repeat it."""


class Gateway:
    """ASGI app around a model, created by `gateway`."""

    def __init__(
        self,
        model: Model,
        store: Store,
        *,
        is_durable: bool,
        callers: GatewayCallers,
        prices: Mapping[str, Prices],
        names: Collection[str],
        grace_s: float,
        kept_s: float,
        shows_upstream_calls: bool,
        world: World,
    ) -> None:
        self.world = world
        self._model = model
        self._kept_s = kept_s
        self._shows_upstream_calls = shows_upstream_calls
        self._conversations = Conversations(store, world)
        self.responses = LiveResponses(world, self._conversations, grace_s=grace_s)
        durable = _host_of(model, store, world, kept_s=kept_s)
        memory = open_store("memory:", world=world)
        private = _host_of(model, memory, world, kept_s=min(kept_s, PRIVATE_KEPT_S))
        self._durable = ApplicationSessions(durable, world, "durable", is_durable=is_durable)
        self._private = ApplicationSessions(private, world, "private", is_durable=False)
        self._callers = callers
        ledger = UsageLedger(durable.store, prices, world)
        self._usage = UsageCounting(ledger, self._durable, self._private, world)
        allowances = GatewayLimits(ledger, self.responses.count_open, world)
        counters = {**callers.counters, **allowances.counters}
        self.reports = NodeReports(
            durable, "gateway", name=model.name, figures=self._figures, counters=counters
        )
        """Reports of the gateways that share the store."""
        self._names = frozenset(names)
        self._kept = ConversationRoutes(kept := KeptConversations(self._durable, world, kept_s=kept_s))
        self._accepting = Accepting(
            model,
            self._durable,
            self._private,
            self.responses,
            self._conversations,
            kept,
            self._names,
            ledger,
            allowances,
            world,
        )
        self._routes = ResponseRoutes(
            self._durable,
            self.responses,
            ResponseInputs(self._accepting, self.responses, world),
            world,
            shows_upstream_calls=shows_upstream_calls,
        )
        self._passed = PassedRequests(model, ledger, allowances, world)
        self._starting = asyncio.Lock()
        self._tending: set[asyncio.Task[None]] = set()
        self._is_draining = False
        self._is_stopped = False

    @property
    def requires_authentication(self) -> bool:
        """Whether requests need a key."""
        return self._callers.are_authenticated

    @property
    def open_streams(self) -> int:
        """Number of answers in progress."""
        return len(self.responses) + self._passed.open

    async def start(self) -> None:
        """Open the store. Idempotent.

        Raises:
            DrainingError: The gateway was stopped. Nothing is left open.
            StoreBusyError, StoreFullError, StoreDamagedError: The store cannot be opened. Nothing was changed.
        """
        if self._tending:
            return
        self._refuse_when_stopped()
        async with self._starting:
            if not self._tending:
                await self._durable.host.start()  # first: the model's records are in its store
                await self._private.host.start()
                self._refuse_when_stopped()
                await self._usage.begin()
                self.reports.start()
                self._tending = {
                    spawn_loop(self.world, loop, name=f"the gateway's {name}")
                    for name, loop in (
                        ("requests", partial(self._durable.tend, self._kept_s)),
                        ("private requests", partial(self._private.tend, self._kept_s)),
                        ("responses", partial(self.responses.tend, self._durable)),
                        ("conversations", self._conversations.tend),
                        ("usage", self._usage.tend),
                    )
                }

    def _figures(self) -> dict[str, float]:
        host = self._durable.host
        return {
            "streams": len(self.responses),
            "sessions_awake": len(host.awake),
            "turns_running": host.awake.turns_running,
            "is_draining": self._is_draining,
            "leases": host.awake.leases,
            "sessions_followed": host.awake.followed,
            "peers": host.peers,
            "appends_waiting": host.store.appends_waiting,
            "loop_lag_seconds": self.reports.loop_lag_s,
        }

    def _refuse_when_stopped(self) -> None:
        if self._is_stopped:
            raise _draining()

    def drain(self) -> None:
        """Refuse new requests. Answers continue until `stop`."""
        self._is_draining = True

    async def stop(self, *, grace_s: float = 0.0) -> None:
        """Wait at most `grace_s` seconds for answers, stop the rest, and close the store and the model. Idempotent.

        It continues if its caller is cancelled.
        """
        require_seconds("grace_s", grace_s)
        self.drain()
        self._is_stopped = True
        await self.world.finish(self._stop(grace_s), name="stop of the gateway")

    async def _stop(self, grace_s: float) -> None:
        until = self.world.monotonic() + grace_s
        while self.open_streams and self.world.monotonic() < until:
            await self.world.sleep(0.05)
        await self.responses.stop()
        tending, self._tending = self._tending, set()
        for task in tending:
            task.cancel()
        if tending:
            await asyncio.wait(tending)
        await self.reports.stop()
        for sessions in (self._private, self._durable):
            await self._usage.settle()  # before the store is closed
            await sessions.host.stop(grace_s=0.0)
        if isinstance(self._model, _Closing):  # a host closes only models that keep values in its store
            await self._model.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, a WebSocket, or the ASGI lifespan."""
        if scope["type"] == "lifespan":
            await live(self.start, self.stop, receive, send)
            return
        parts = _parts_of(scope["path"])
        if scope["type"] != "http":
            await self._serve_socket(scope, parts, receive, send)
            return
        dialect = dialect_for_errors(parts)
        is_begun = False

        async def send_and_mark_begun(message: Message) -> None:
            nonlocal is_begun
            is_begun = True
            await send(message)

        try:
            await self._guard(scope, parts, receive, send_and_mark_begun)
        except (RefusedError, BadFieldError) as error:
            await refuse(send, dialect, refusal_in(error))
        except GoneError:
            pass
        except asyncio.CancelledError as error:
            if self._is_draining and not is_begun:  # the server shuts down; the client can retry
                refusal = refusal_of(_draining())
                is_final = isinstance(error, _CancelledInAnswerError)
                await refuse(send, dialect, final(refusal) if is_final else refusal)
            raise
        except MidstreamError as error:
            if is_begun:
                raise
            is_late = self._is_stopped and isinstance(
                error, UsageError
            )  # the shutdown closed the store during the request
            await refuse(send, dialect, refusal_of(_draining() if is_late else error))
        except Exception:
            if not is_begun:
                await refuse(send, dialect, BUG)
            raise

    async def _serve_socket(self, scope: Scope, parts: list[str], receive: Receive, send: Send) -> None:
        """Serve a WebSocket of the Responses API; a refused handshake gets an ordinary HTTP error."""
        await receive()  # websocket.connect
        headers = headers_of(scope)

        def check() -> ApiCaller:
            if parts != [*RESPONSES.path]:
                raise RefusedError(_NOT_FOUND)
            if self._is_draining:
                raise _draining()
            return self._callers.find(headers, scope)

        try:
            caller = check()
            await self.start()
        except (RefusedError, MidstreamError) as error:
            await refuse_socket(scope, send, RESPONSES, refusal_in(error))
            return
        socket = ResponseSocket(
            self._accepting,
            self.responses,
            self.world,
            receive,
            send,
            shows_upstream_calls=self._shows_upstream_calls,
            check=check,
        )
        path = "/" + "/".join(parts)
        await socket.run(Arrived("POST", path, {}, headers, b"", is_local(scope, headers), caller))

    async def _guard(self, scope: Scope, parts: list[str], receive: Receive, send: Send) -> None:
        headers = headers_of(scope)
        method = scope["method"]
        if parts in (["health"], ["ready"]) and method == "GET":
            await self._health(parts[0], send)
            return
        caller = self._callers.find(headers, scope)
        await self.start()
        body = await body_of(headers, receive) if method == "POST" else b""
        query_string = scope["query_string"].decode("latin-1")
        query = dict(parse_qsl(query_string, keep_blank_values=True)) if query_string else {}
        path = "/" + "/".join(parts)
        arrived = Arrived(method, path, query, headers, body, is_local(scope, headers), caller)
        await self._answer(parts, arrived, receive, send)

    async def _answer(self, parts: list[str], arrived: Arrived, receive: Receive, send: Send) -> None:
        dialect = dialect_at(parts)
        if dialect is not None and arrived.method == "POST":
            await self._run(dialect, arrived, receive, send)
        elif dialect is not None:
            raise _no_post()
        elif len(parts) == 1 and parts[0] in PASSED:
            await self._pass_on(parts[0], arrived, receive, send)
        elif parts[:1] == ["responses"]:
            if self._is_draining and parts[1:] == ["compact"]:
                raise _draining()
            await self._routes.answer(parts[1:], arrived, receive, send)
        elif parts[:1] == ["conversations"]:
            await self._kept.answer(parts[1:], arrived, send)
        elif parts == ["messages", "count_tokens"] and arrived.method == "POST":
            tokens = estimate_tokens(fields_of(arrived.body))
            await send_whole(send, msgspec.json.encode({"input_tokens": tokens}))
        elif parts[:1] == ["models"] and arrived.method == "GET":
            await self._models("/".join(parts[1:]), arrived, send)
        else:
            raise RefusedError(_NOT_FOUND)

    async def _pass_on(self, name: str, arrived: Arrived, receive: Receive, send: Send) -> None:
        if arrived.method != "POST":
            raise _no_post()
        if self._is_draining:
            raise _draining()
        model = field(fields_of(arrived.body), "model", str) or ""
        self._accepting.check_model(model, arrived.caller)
        counted_model = self._accepting.counted_model(model)
        await self._passed.answer(name, arrived, receive, send, model=model, counted_model=counted_model)

    async def _run(self, dialect: Dialect, arrived: Arrived, receive: Receive, send: Send) -> None:
        if self._is_draining:
            raise _draining()
        reply = await self._accepting.response_to(dialect, arrived)
        live, form = reply.live, reply.form
        headers = {"x-request-id": live.id, "request-id": live.id}
        if reply.is_repeated:
            headers["x-midstream-replayed"] = "true"
        if form.ignored:
            headers["x-midstream-ignored"] = ",".join(form.ignored)
        reader = ResponseReader(
            live,
            self.responses,
            self.world,
            receive,
            send,
            form=form,
            shows_upstream_calls=self._shows_upstream_calls,
        )
        try:
            async with reader:
                if form.is_stream:
                    await reader.stream(headers)
                elif form.is_background:
                    await reader.state(headers)
                else:
                    await reader.whole(headers)
        except asyncio.CancelledError as error:
            if reader.projection.has_begun:
                raise _CancelledInAnswerError from error
            raise

    async def _health(self, what: str, send: Send) -> None:
        if what == "ready" and self._is_draining:
            body = msgspec.json.encode({"status": "draining"})
            await send_whole(send, body, status=503, headers={"retry-after": "2"})
            return
        report = {"status": "ok", "version": __version__, "answers": len(self.responses)}
        await send_whole(send, msgspec.json.encode(report))

    async def _models(self, name: str, arrived: Arrived, send: Send) -> None:
        own = arrived.caller.allowance.models
        names = sorted(self._names.intersection(own) if own and self._names else own or self._names)
        if not (own or self._names):
            names = [self._model.name]
        is_anthropic = "anthropic-version" in arrived.headers
        listed = [_model_in(each, is_anthropic=is_anthropic) for each in names]
        if name:
            self._accepting.check_model(name, arrived.caller)
            await send_whole(send, msgspec.json.encode(_model_in(name, is_anthropic=is_anthropic)))
            return
        body: Json = {"object": "list", "data": listed}
        if is_anthropic:
            ends = (
                {"first_id": names[0], "last_id": names[-1]} if names else {"first_id": None, "last_id": None}
            )
            body = {"data": listed, "has_more": False, **ends}
        await send_whole(send, msgspec.json.encode(body))


def _host_of(model: Model, store: Store, world: World, *, kept_s: float) -> Host:
    agent, memory = Agent(model, name=model.name, stalls=_SILENCE), MemoryLimits(idle_s=IDLE_S)
    return Host(agent, store, world=world, retention=Retention(sessions_for_s=kept_s), memory=memory)


def _draining() -> DrainingError:
    return DrainingError("this gateway is shutting down; retry in a few seconds", retry_after_s=2.0)


def _no_post() -> RefusedError:
    return RefusedError(ApiError(405, "method_not_allowed", "this address takes POST"))


def _parts_of(path: str) -> list[str]:
    """Split a path; drop the version, which base URLs of clients have or omit."""
    parts = [unquote(part) for part in path.split("/") if part]
    while parts[:1] == ["v1"]:
        del parts[0]
    return parts


def _model_in(name: str, *, is_anthropic: bool) -> Json:
    if is_anthropic:
        return {"type": "model", "id": name, "display_name": name, "created_at": "2025-01-01T00:00:00Z"}
    return {"id": name, "object": "model", "created": 1735689600, "owned_by": "midstream"}
