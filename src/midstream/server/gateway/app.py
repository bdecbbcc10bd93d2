"""The gateway as an ASGI app: who may ask, which address is what, every error in the words of the API it came by."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path
from typing import Protocol, runtime_checkable
from urllib.parse import parse_qsl, unquote

import msgspec
from starlette.types import Message, Receive, Scope, Send

from midstream.core.dialects.fields import BadFieldError, fields_of
from midstream.core.dialects.messages import estimated_tokens
from midstream.core.dialects.refusals import Dialect, Refusal, final, refusal_of
from midstream.core.formats.parts import Json
from midstream.errors import DrainingError, MidstreamError, UsageError
from midstream.runtime.models import Model, StoredModel
from midstream.server.gateway.answers import Reading, refuse, send_whole
from midstream.server.gateway.asking import Asking
from midstream.server.gateway.bodies import (
    Arrived,
    GoneError,
    RefusedError,
    body_of,
    check_token,
    headers_of,
)
from midstream.server.gateway.conversations import Conversations
from midstream.server.gateway.response_routes import ResponseRoutes
from midstream.server.gateway.runs import GRACE_S, Runs
from midstream.server.gateway.stored import StoredResponses
from midstream.server.guards import check_origin, origins_of
from midstream.server.lifespan import live
from midstream.store.contract import Store
from midstream.store.opening import open_store
from midstream.version import __version__
from midstream.world import World

_DIALECTS = {
    ("chat", "completions"): Dialect.CHAT,
    ("responses",): Dialect.RESPONSES,
    ("messages",): Dialect.MESSAGES,
}
_BUG = Refusal(500, "internal", "something went wrong in the gateway; its log has the details")
_NOT_FOUND = Refusal(404, "not_found", "there is no such address")


def gateway(
    model: Model,
    *,
    token: str | None,
    store: str | Path | Store | None = None,
    names: Collection[str] = (),
    allowed_origins: Collection[str] = (),
    grace_s: float = GRACE_S,
    shows_upstream_calls: bool = True,
    world: World | None = None,
) -> Gateway:
    """Make the ASGI app that puts a model behind the APIs of OpenAI and Anthropic.

    Args:
        model: What answers; closed with the app where it has an `aclose`.
        token: What clients show as their API key; None lets everybody in who can reach it.
        store: Where responses are kept, and what conversations are known by: a store, or the URL or path of one (see
            `open_store`); in memory by default, and lost with the process.
        names: The models' names that hosts may ask for; any by default.
        allowed_origins: Origins such as `https://app.example` whose pages may ask without a token.
        grace_s: Seconds that an answer goes on when nobody reads it any more.
        shows_upstream_calls: Tools that the upstream runs itself are told as thinking; otherwise they are left out.
        world: Clock, chance and tasks; the real ones by default.

    Raises:
        UsageError: No such store is known, or what stands in `allowed_origins` is no origin.
    """
    world = world or World()
    store = open_store("memory:" if store is None else store, world=world)
    runs = Runs(model, world, grace_s=grace_s, shows_upstream_calls=shows_upstream_calls)
    return Gateway(model, store, runs, token=token, names=names, allowed_origins=allowed_origins, world=world)


class _CancelledInAnswerError(asyncio.CancelledError):
    """A request was cancelled whose upstream had sent something: its client must not repeat it."""


@runtime_checkable
class _Closing(Protocol):
    async def aclose(self) -> None: ...


class Gateway:
    """An ASGI app around a model. Make it with `gateway`."""

    def __init__(
        self,
        model: Model,
        store: Store,
        runs: Runs,
        *,
        token: str | None,
        names: Collection[str],
        allowed_origins: Collection[str],
        world: World,
    ) -> None:
        self.world = world
        self.runs = runs
        self._model = model
        self._store = store
        self._responses = StoredResponses(store, world)
        self._conversations = Conversations(store, world)
        self._token = token
        self._names = frozenset(names)
        self._allowed_origins = origins_of(allowed_origins)
        self._asking = Asking(model, runs, self._responses, self._conversations, self._names, world)
        self._routes = ResponseRoutes(runs, self._responses, world)
        self._starting = asyncio.Lock()
        self._tending: set[asyncio.Task[None]] = set()
        self._is_draining = False
        self._is_stopped = False

    @property
    def asks_who(self) -> bool:
        """Whether strangers are kept out."""
        return self._token is not None

    @property
    def open_streams(self) -> int:
        """Answers that are being made."""
        return len(self.runs)

    async def start(self) -> None:
        """Open the store. Calling it again is harmless.

        Raises:
            DrainingError: It was stopped. Nothing is open, nor left open.
            StoreBusyError, StoreFullError, StoreDamagedError: The store cannot be opened. Nothing was changed.
        """
        if self._tending:
            return
        self._refuse_when_stopped()
        async with self._starting:
            if not self._tending:
                await self._store.open()
                try:
                    self._refuse_when_stopped()
                except DrainingError:  # meanwhile, when nothing was there to be closed
                    await self._store.close()
                    raise
                if isinstance(self._model, StoredModel):
                    self._model.begin_use(self._store)
                self._tending = {
                    self.world.spawn(self._responses.tend(), name="the gateway's responses"),
                    self.world.spawn(self._conversations.tend(), name="the gateway's conversations"),
                }

    def _refuse_when_stopped(self) -> None:
        if self._is_stopped:
            raise _draining()

    def drain(self) -> None:
        """Refuse new work. Answers go on until `stop`."""
        self._is_draining = True

    async def stop(self, *, grace_s: float = 0.0) -> None:
        """Let answers go on for `grace_s` seconds, stop them, close the store and the model. Again is harmless."""
        self.drain()
        self._is_stopped = True
        until = self.world.monotonic() + grace_s
        while len(self.runs) and self.world.monotonic() < until:
            await self.world.sleep(0.05)
        await self.runs.stop(_draining())
        tending, self._tending = self._tending, set()
        if tending:
            for task in tending:
                task.cancel()
            await asyncio.wait(tending)
            await self._store.close()
        if isinstance(self._model, _Closing):
            await self._model.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or the life of the server."""
        if scope["type"] == "lifespan":
            await live(self.start, self.stop, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008, "reason": "not_found"})
            return
        parts = _parts_of(scope["path"])
        dialect = _DIALECTS.get(tuple(parts[:2] if parts[:1] == ["chat"] else parts[:1]), Dialect.CHAT)
        is_begun = False

        async def send_and_know(message: Message) -> None:
            nonlocal is_begun
            is_begun = True
            await send(message)

        try:
            await self._guarded(scope, parts, receive, send_and_know)
        except RefusedError as error:
            await refuse(send, dialect, error.refusal)
        except GoneError:
            pass
        except asyncio.CancelledError as error:
            if self._is_draining and not is_begun:  # the server lets go of it: whoever waits is to come back
                refusal = refusal_of(_draining())
                is_final = isinstance(error, _CancelledInAnswerError)
                await refuse(send, dialect, final(refusal) if is_final else refusal)
            raise
        except BadFieldError as error:
            await refuse(send, dialect, Refusal(400, error.code, error.message, param=error.param))
        except MidstreamError as error:
            if is_begun:
                raise
            is_late = self._is_stopped and isinstance(error, UsageError)  # the store was closed under it
            await refuse(send, dialect, refusal_of(_draining() if is_late else error))
        except Exception:
            if not is_begun:
                await refuse(send, dialect, _BUG)
            raise

    async def _guarded(self, scope: Scope, parts: list[str], receive: Receive, send: Send) -> None:
        headers = headers_of(scope)
        method = scope["method"]
        if parts in (["health"], ["ready"]) and method == "GET":
            await self._health(parts[0], send)
            return
        if self._token is None:
            check_origin(scope, self._allowed_origins)
        else:
            check_token(headers, self._token)
        await self.start()
        body = await body_of(headers, receive) if method == "POST" else b""
        said = scope["query_string"].decode("latin-1")
        query = dict(parse_qsl(said, keep_blank_values=True)) if said else {}
        arrived = Arrived(method, "/" + "/".join(parts), query, headers, body)
        await self._answer(parts, arrived, receive, send)

    async def _answer(self, parts: list[str], arrived: Arrived, receive: Receive, send: Send) -> None:
        dialect = _DIALECTS.get(tuple(parts))
        if dialect is not None and arrived.method == "POST":
            await self._run(dialect, arrived, receive, send)
        elif dialect is not None:
            raise RefusedError(Refusal(405, "method_not_allowed", "this address takes POST"))
        elif parts[:1] == ["responses"]:
            await self._routes.answer(parts[1:], arrived, receive, send)
        elif parts == ["messages", "count_tokens"] and arrived.method == "POST":
            tokens = estimated_tokens(fields_of(arrived.body))
            await send_whole(send, msgspec.json.encode({"input_tokens": tokens}))
        elif parts[:1] == ["models"] and arrived.method == "GET":
            await self._models("/".join(parts[1:]), arrived, send)
        else:
            raise RefusedError(_NOT_FOUND)

    async def _run(self, dialect: Dialect, arrived: Arrived, receive: Receive, send: Send) -> None:
        if self._is_draining:
            raise _draining()
        run, was_there = await self._asking.run_of(dialect, arrived)
        headers = {"x-request-id": run.named.id, "request-id": run.named.id}
        if was_there:
            headers["x-midstream-replayed"] = "true"
        if run.asked.ignored:
            headers["x-midstream-ignored"] = ",".join(run.asked.ignored)
        try:
            async with Reading(run, self.runs, self.world, receive, send) as reading:
                if run.asked.is_stream:
                    await reading.stream(headers)
                elif run.asked.is_background:
                    await reading.state(headers)
                else:
                    await reading.whole(headers)
        except asyncio.CancelledError as error:
            if run.has_emitted:
                raise _CancelledInAnswerError from error
            raise

    async def _health(self, what: str, send: Send) -> None:
        if what == "ready" and self._is_draining:
            body = msgspec.json.encode({"status": "draining"})
            await send_whole(send, body, status=503, headers={"retry-after": "2"})
            return
        told = {"status": "ok", "version": __version__, "answers": len(self.runs)}
        await send_whole(send, msgspec.json.encode(told))

    async def _models(self, name: str, arrived: Arrived, send: Send) -> None:
        names = sorted(self._names) or [self._model.name]
        is_anthropic = "anthropic-version" in arrived.headers
        listed = [_model_in(each, is_anthropic=is_anthropic) for each in names]
        if name:
            self._asking.check_model(name)
            await send_whole(send, msgspec.json.encode(_model_in(name, is_anthropic=is_anthropic)))
            return
        told: Json = {"object": "list", "data": listed}
        if is_anthropic:
            told = {"data": listed, "has_more": False, "first_id": names[0], "last_id": names[-1]}
        await send_whole(send, msgspec.json.encode(told))


def _draining() -> DrainingError:
    return DrainingError("this gateway is shutting down: ask again in a moment", retry_after_s=2.0)


def _parts_of(path: str) -> list[str]:
    """Return a path in pieces, without the version: people write base addresses with it and without."""
    parts = [unquote(part) for part in path.split("/") if part]
    while parts[:1] == ["v1"]:
        del parts[0]
    return parts


def _model_in(name: str, *, is_anthropic: bool) -> Json:
    if is_anthropic:
        return {"type": "model", "id": name, "display_name": name, "created_at": "2025-01-01T00:00:00Z"}
    return {"id": name, "object": "model", "created": 1735689600, "owned_by": "midstream"}
