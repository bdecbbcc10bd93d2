"""Subscriptions of Durable Streams over HTTP: requests of their owners, and reports of woken workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from midstream.dialects.stream_subscriptions import (
    AckError,
    ClaimBody,
    ReportAnswer,
    StreamsBody,
    StreamSubscription,
    SubscriptionConfig,
    Tail,
    WakeReport,
)
from midstream.engine.host import Host
from midstream.engine.journal import require_session_id
from midstream.errors import NotFoundError, UnauthorizedError
from midstream.server.api.plain_streams import PlainStreams, StreamGoneError
from midstream.server.api.problems import MEDIA_TYPE, problem_of_status
from midstream.server.api.request_bodies import BODY_BYTES_MAX, decode_body
from midstream.server.api.stream_names import (
    CONTROL,
    journal_of,
    name_of,
    require_no_locks,
    require_stream_name,
    stored_part,
)
from midstream.server.api.subscription_delivery import StreamSubscriptions
from midstream.server.auth.caller import Caller, KnownCaller, caller_of
from midstream.server.auth.principals import Action
from midstream.server.webhooks import WebhookUrlError

REPORT_BYTES_MAX = 512 * 1024
"""Bytes of the report of an authenticated worker."""
JWKS_S = 300
"""Seconds for which the public key may be cached."""
NO_STORE = {"Cache-Control": "no-store"}


class JsonWebKeySet(Struct, frozen=True):
    """The public keys of this store's webhooks (RFC 7517)."""

    keys: list[dict[str, str]]


class SubscriptionOwnerEndpoint:
    """Endpoints that create, show, change and delete subscriptions, and claim their wakes."""

    def __init__(self, host: Host, streams: PlainStreams, subscriptions: StreamSubscriptions) -> None:
        self._host = host
        self._streams = streams
        self._subscriptions = subscriptions

    async def create_subscription(self, request: Request, body: SubscriptionConfig) -> Response:
        """Create a subscription, or find an existing one with an equal configuration (Durable Streams)."""
        key, caller = self._key_in(request)
        config = body.normalized()
        await caller.require(Action.SEND)
        known = await self._subscriptions.find(key)
        if known is None:
            made = await self._made(request, config, caller)
            if isinstance(made, Response):
                return made
            caller.set_session(key)
            await caller.begin()
            if await self._subscriptions.create(key, made):
                return await self._described(made, 201)
            known = await self._subscriptions.find(key)
        if known is not None and not _is_of(known, caller):
            raise NotFoundError("there is no such subscription")
        if known is None or known.config != config:
            return problem(409, "SUBSCRIPTION_ALREADY_EXISTS", "the subscription has another configuration")
        return await self._described(known, 200)

    async def show_subscription(self, request: Request) -> Response:
        """Return a subscription, with the last acked offset of each stream (Durable Streams)."""
        key, caller = self._key_in(request)
        await caller.require_existing(Action.READ)
        return await self._described(await self._found(key), 200)

    async def delete_subscription(self, request: Request) -> Response:
        """Delete a subscription; reports about its wakes are refused from then on (Durable Streams)."""
        key, caller = self._key_in(request)
        await caller.require_existing(Action.OWN)
        if not await self._subscriptions.delete(key):
            raise NotFoundError("there is no such subscription")
        return Response(status_code=204)

    async def link_streams(self, request: Request, body: StreamsBody) -> Response:
        """Add streams to a subscription, each at its end (Durable Streams)."""
        key, caller = self._key_in(request)
        await caller.require_existing(Action.SEND)
        tails = await self._tails_of(body.streams, caller)

        def change(found: StreamSubscription, _: Mapping[str, Tail]) -> StreamSubscription:
            for path, tail in tails.items():
                found = found.with_link(path, tail, is_explicit=True)
            return found

        await self._subscriptions.update(key, change)
        return Response(status_code=204)

    async def unlink_stream(self, request: Request) -> Response:
        """Remove an added stream from a subscription; streams of its pattern stay (Durable Streams)."""
        key, caller = self._key_in(request)
        await caller.require_existing(Action.SEND)
        path = request.path_params["stream"].strip("/")
        require_stream_name(path)
        await self._subscriptions.update(key, lambda found, _: found.without_link(path))
        return Response(status_code=204)

    async def claim_wake(self, request: Request, body: ClaimBody) -> Response:
        """Claim the pending work of a subscription for a worker, until the lease expires (Durable Streams)."""
        key, caller = self._key_in(request)
        await caller.require_existing(Action.SEND)
        known = await self._found(key)
        if known.is_webhook:
            return problem(409, "INVALID_REQUEST", "a subscription of type `webhook` cannot be claimed")
        linked = (await self._subscriptions.discovered(known)).links
        now, wake_id = self._host.world.now(), self._host.world.new_id("wake")
        holders: list[str] = []
        was_pending: list[bool] = []

        def change(found: StreamSubscription, tails: Mapping[str, Tail]) -> StreamSubscription:
            holders[:] = [found.holder] if found.is_held(now=now) else []
            if holders:
                return found
            found = replace(found, links={**linked, **found.links})
            claimed = found.claim(body.worker, tails, now=now, wake_id=wake_id)
            was_pending[:] = [claimed is not None]
            return claimed or found

        found, tails = await self._subscriptions.update(key, change)
        if holders:
            held = {"current_holder": holders[0], "generation": found.generation}
            return problem(409, "ALREADY_CLAIMED", "another worker has claimed the subscription", held)
        if was_pending != [True]:
            return problem(409, "NO_PENDING_WORK", "nothing is pending")
        return json_answer(found.claim_answer(tails, f"{key}.{found.token()}"))

    async def _made(
        self, request: Request, config: SubscriptionConfig, caller: Caller
    ) -> StreamSubscription | Response:
        world, name = self._host.world, request.path_params["subscription"]
        if config.webhook is not None:
            try:
                await self._subscriptions.webhooks.check(config.webhook.url)
            except WebhookUrlError as error:
                return problem(400, "WEBHOOK_URL_REJECTED", error.message)
            await self._subscriptions.webhooks.key()
        principal = caller.principal if isinstance(caller, KnownCaller) else None
        now = world.now()
        made = StreamSubscription(
            name,
            config,
            f"{str(request.base_url).rstrip('/')}/v1/stream/{CONTROL}",
            world.new_secret(),
            now,
            tenant="" if principal is None else principal.tenant,
            principal="" if principal is None else principal.id,
            scanned_at=now,
        )
        if config.wake_stream:
            refused = await self._wake_stream_problem(config.wake_stream, caller)
            if refused is not None:
                return refused
        for path, tail in (await self._tails_of(config.streams, caller)).items():
            made = made.with_link(path, tail, is_explicit=True)
        if config.pattern:
            visible = await caller.visible_sessions()
            of = None if visible is None else set(visible)
            async for journal, tail in self._subscriptions.all_streams(of):
                path = name_of(journal, made.tenant) or ""
                if made.matches(path) and await self._subscriptions.may_follow(made, journal):
                    made = made.with_link(path, tail)
        return made

    async def _wake_stream_problem(self, name: str, caller: Caller) -> Response | None:
        journal = journal_of(name, caller)
        caller.set_session(journal)
        await caller.require_existing(Action.SEND)
        known = await self._streams.find(journal)
        if known is None or not known.state.settings.is_json:
            return problem(409, "INVALID_WAKE_STREAM", "create the wake stream first, with content type JSON")
        return None

    async def _tails_of(self, names: tuple[str, ...], caller: Caller) -> dict[str, Tail | None]:
        """Return the tails of streams by the caller's names; None for a stream that does not exist yet."""
        tails: dict[str, Tail | None] = {}
        for name in names:
            path = name.strip("/")
            journal = journal_of(path, caller)
            caller.set_session(journal)
            await caller.require(Action.READ)
            try:
                known = await self._streams.find(journal)
            except StreamGoneError:
                known = None
            tails[path] = None if known is None else Tail(known.birth, known.state.units)
        return tails

    def _key_in(self, request: Request) -> tuple[str, Caller]:
        require_no_locks(self._host)
        caller, name = caller_of(request.scope), request.path_params["subscription"]
        require_session_id(name, "the id of a subscription")
        key = caller.stored_name(stored_part(f"{CONTROL}/{name}"))
        caller.set_session(key)
        return key, caller

    async def _found(self, key: str) -> StreamSubscription:
        found = await self._subscriptions.find(key)
        if found is None:
            raise NotFoundError("there is no such subscription")
        return found

    async def _described(self, found: StreamSubscription, status: int) -> Response:
        signing: dict[str, str] = {}
        if found.is_webhook:
            key = await self._subscriptions.webhooks.key()
            signing = {"alg": "ed25519", "kid": key.kid, "jwks_url": f"{found.base_url}/jwks.json"}
        return json_answer(found.answer(signing), status)


class WakeEndpoint:
    """Endpoints for reports of workers, which authenticate with the token of their wake."""

    def __init__(self, host: Host, subscriptions: StreamSubscriptions) -> None:
        self._world = host.world
        self._subscriptions = subscriptions

    async def webhook_keys(self, request: Request) -> Response:  # noqa: ARG002 - the same for all
        """Return the public key that verifies the signatures of this server's webhooks."""
        key = await self._subscriptions.webhooks.key()
        headers = {"Cache-Control": f"public, max-age={JWKS_S}"}
        body = msgspec.json.encode(JsonWebKeySet([key.public_jwk()]))
        return Response(body, headers=headers, media_type="application/jwk-set+json")

    async def report_callback(self, request: Request) -> Response:
        """Ack offsets of a webhook's wake, and extend its lease or end it (Durable Streams)."""
        return await self._report(request, is_webhook=True)

    async def report_ack(self, request: Request) -> Response:
        """Ack offsets of a claimed wake, and extend its lease or end it (Durable Streams)."""
        return await self._report(request, is_webhook=False)

    async def release_wake(self, request: Request) -> Response:
        """Release a claimed wake without an ack (Durable Streams)."""
        return await self._report(request, is_webhook=False, releases=True)

    async def _report(self, request: Request, *, is_webhook: bool, releases: bool = False) -> Response:
        key, generation = await self._token_of(request)
        if not key:
            raise UnauthorizedError("send the token of the wake as `Authorization: Bearer`")
        caller_of(request.scope).set_session(key)
        request.scope[BODY_BYTES_MAX] = REPORT_BYTES_MAX
        report = await decode_body(request, WakeReport)
        now = self._world.now()
        is_current: list[bool] = []

        def change(found: StreamSubscription, tails: Mapping[str, Tail]) -> StreamSubscription:
            is_current[:] = [found.is_webhook is is_webhook and found.is_current(generation, report)]
            if found.lease_until and now >= found.lease_until:
                is_current[:] = [False]
            if is_current != [True]:
                return found
            return found.release() if releases else found.ack(report, tails, now=now)

        try:
            found, tails = await self._subscriptions.update(key, change)
        except AckError as error:
            return problem(409, "INVALID_OFFSET", str(error))
        if is_current != [True]:
            return problem(409, "FENCED", "this wake is over")
        if releases:
            return Response(status_code=204)
        return json_answer(ReportAnswer(ok=True, next_wake=report.done and bool(found.pending(tails))))

    async def _token_of(self, request: Request) -> tuple[str, int]:
        """Return the subscription and the generation of a request's token; "" if it is for another subscription."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        name = stored_part(f"{CONTROL}/{request.path_params['subscription']}")
        key, found, rest = token.strip().partition(f"{name}.")
        if scheme.lower() != "bearer" or not found or (key and not key.endswith(":")):
            return "", 0
        key += name
        subscription = await self._subscriptions.find(key)
        generation = None if subscription is None else subscription.generation_of(rest)
        return ("", 0) if generation is None else (key, generation)


def _is_of(found: StreamSubscription, caller: Caller) -> bool:
    """Return whether a caller owns a subscription. One without an owner is from a server without authentication."""
    if not isinstance(caller, KnownCaller) or caller.principal.is_operator:
        return True
    return (found.tenant, found.principal) == (caller.principal.tenant, caller.principal.id)


def json_answer(body: object, status: int = 200) -> Response:
    """Return a JSON answer that must not be cached."""
    return Response(msgspec.json.encode(body), status, headers=NO_STORE, media_type="application/json")


def problem(status: int, code: str, message: str, more: Mapping[str, Any] | None = None) -> Response:
    """Return a problem detail that also contains the error in the protocol's own form."""
    described = msgspec.to_builtins(problem_of_status(status, message))
    body = {**described, "error": {"code": code, "message": message, **(more or {})}}
    return Response(msgspec.json.encode(body), status, headers=NO_STORE, media_type=MEDIA_TYPE)
