"""The door: every request and handshake comes through here before it meets a route.

In this order: how large its headers are, which page asks, how often its address asks, who asks, how often that
principal asks, and whether it may do with this session what its method and path do. What is not in the tables
below is for the session's owner alone, so that a route missing there is closed, not open. Behind the middleware the
scope names the session as the store does, and has a visit (`caller.visitor_of`), which endpoints use for what the
middleware cannot decide: whether a stream begins a session, which sessions of a list may be shown, and how long a
    stream may live.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Collection
from contextlib import suppress
from itertools import chain
from urllib.parse import parse_qsl

from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.types import Scope

from midstream.engine.host import Host
from midstream.errors import AccessError, MidstreamError, OtherLoginError, UnauthorizedError
from midstream.server.api.request_bodies import BODY_BYTES_MAX, STRANGER_BYTES_MAX
from midstream.server.audit_log import AuditLog
from midstream.server.auth.access import Access
from midstream.server.auth.audit_trail import AuditTrail
from midstream.server.auth.authorizer import Authorizer, has_credential
from midstream.server.auth.caller import VISIT, Counters, KnownCaller, LiveCallers, Stranger
from midstream.server.auth.credential_sources import source_of
from midstream.server.auth.local_user import LocalUser
from midstream.server.auth.origins import check_intent, check_origin, check_page, remote_address
from midstream.server.auth.ownership import Ownership, name_in_store
from midstream.server.auth.principals import OPERATOR, Action, Principal
from midstream.server.auth.revocations import WATCH_S, Revocations
from midstream.server.auth.tokens import LOGIN_LINK_S, AccessToken, AccessTokens, TokenKind
from midstream.server.limits import Limits, address_of

SESSION_PATH = re.compile(r"/v1/sessions/(?P<session>[^/]+)(?P<what>/.*)?", re.DOTALL)
"""The paths of one session, and what they ask of it."""
_OPEN = re.compile(
    r"/|/health|/ready|/static/.*|/v1/login|/v1/challenge|/\.well-known/agent-card\.json"
    r"|/v1/stream/__ds/jwks\.json"
    r"|/v1/stream/__ds/subscriptions/[^/]+/(?:callback|ack|release)"
)
"""What strangers may ask for: the page's own files, the agent's card, whether the server lives, to become known, the
public key of webhooks; and the reports of workers, which the endpoint admits by the token of their wake."""
_LOOKS = re.compile(r"/records|/blobs/[^/]+|/events|/poll|/commands|/tickets|/stream")
"""Open to all who may read; a stream, a frame or a ticket that speaks is checked again when it does so."""
_SPEAKS = frozenset({"/cancel", "/resume", "/withdraw"})
_APPROVES = "/answer"
_STREAMS = frozenset({"/events", "/poll", "/stream"})
"""What a ticket opens."""
_BEGINNINGS = frozenset({"/commands", "/events", "/poll", "/stream", "/tickets"})
"""What may come before its session is there."""

_ADVICE = (
    "Leave out --no-auth, or pass `access=` to `midstream.asgi`; or `allow_unauthenticated=True` where the app around "
    "it authenticates."
)
TRAIL = "midstream.trail"
"""Where a scope has the audit trail of its request."""
_log = logging.getLogger(__name__)


def action_of(method: str, what: str) -> Action:
    """Return the kind of access that a request needs to its session: `what` is the path behind its name."""
    if what in _SPEAKS:
        return Action.SPEAK
    if what == _APPROVES:
        return Action.APPROVE
    if _LOOKS.fullmatch(what) or (what == "" and method in {"GET", "HEAD"}):
        return Action.READ
    return Action.OWN


class AuthMiddleware:
    """Let requests in, or not.

    Args:
        host: Whose sessions are behind it.
        access: Who may come in; None where an application in front has asked already.
        limits: What callers may do.
        allowed_origins: Whose pages may ask beside our own.
        allow_unauthenticated: Serve other machines, too, where `access` is None.
        audit: Where acts and refusals are written; None writes nothing.

    Raises:
        UsageError: The store of the host keeps no small values, and `access` needs them.
    """

    def __init__(
        self,
        host: Host,
        access: Access | None,
        limits: Limits,
        allowed_origins: Collection[str],
        *,
        allow_unauthenticated: bool = False,
        audit: AuditLog | None = None,
    ) -> None:
        self.access = access
        self._audit = audit
        self.is_local = access is None and not allow_unauthenticated
        self._host = host
        self._limits = limits
        self._allowed_origins = frozenset(allowed_origins)
        self.counters = Counters(limits, host.world, host.is_live)
        self._living = LiveCallers()
        self._watching: asyncio.Task[None] | None = None
        if access is None:
            return
        host.observers.add(self.counters)
        self.source = source_of(access.authenticate, access.still_valid)
        self.ownership = Ownership(host.store, host.world)
        self.revocations = Revocations(host.store, host.world)
        self.access_tokens = AccessTokens(host.store, host.world, self.revocations, self.source.is_current)
        self.authorizer = Authorizer(access, self.source, host.store, self.ownership, self.access_tokens)

    async def open(self) -> None:
        """Make ready, when the store is."""
        if self.access is not None:
            if self.access.login:
                await self._keep_login(self.access.login)
            await self.source.refresh(self._host.store, self._host.world)
            work = self._watch(await self.revocations.newest())
            self._watching = self._host.world.spawn(work, name="watch for revocations")
        else:
            clients = (
                "of this machine only" if self.is_local else "of every machine that can reach the server"
            )
            _log.warning(
                "no authentication is configured: every client %s has full access. %s", clients, _ADVICE
            )

    async def close(self) -> None:
        """Watch no longer. Calling it again is harmless."""
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
            await asyncio.wait([watching])

    async def _keep_login(self, word: str) -> None:
        """Store the link that is printed at the start, as one of the user of this machine."""
        operator = self.source.principal if isinstance(self.source, LocalUser) else OPERATOR
        now = self._host.world.now()
        await self.access_tokens.keep(word, AccessToken(TokenKind.LOGIN, operator, now, now + LOGIN_LINK_S))

    async def _watch(self, seen: int) -> None:
        """Check live connections when another process changed rights, or a file with credentials was changed.

        Args:
            seen: The number of the last change that is known. See `Revocations.newest`.
        """
        store, world = self._host.store, self._host.world
        while True:
            await world.sleep(WATCH_S)
            newest = seen
            with suppress(MidstreamError):  # the store is away for a while
                await self.source.refresh(store, world)
                newest = await self.revocations.newest()
            has_changed = self.source.has_changed()
            if newest != seen or has_changed:
                seen = newest
                self.recheck()

    def check_scope(self, scope: Scope) -> None:
        """Turn away what can be seen from outside, before anything is opened for it.

        Raises:
            AccessError: It comes from another machine, and this server has no authentication.
            ForeignOriginError: A page of another site asks.
            LimitReachedError: Its address asks too often.
            HTTPException: Its headers are too large, or its path is none.
        """
        size = sum(map(len, chain.from_iterable(scope["headers"])))
        if size > self._limits.header_bytes_max > 0:
            raise HTTPException(
                431, f"the headers of a request have {self._limits.header_bytes_max} bytes at most"
            )
        if not scope["path"].isprintable():
            # A router may overlook a line's end that the tables above do not.
            raise HTTPException(404)
        if self.is_local and (address := remote_address(scope)):
            raise AccessError(
                f"this app has no authentication, and refuses {address}: only clients of this machine are served. "
                f"{_ADVICE}"
            )
        check_origin(scope, self._allowed_origins)
        self.counters.requests.count(address_of(scope))

    async def admit(self, scope: Scope) -> Scope:
        """Return the scope to serve, a copy, with its visit.

        Raises:
            MidstreamError: It is refused.
        """
        address = address_of(scope)
        if self.access is None or _OPEN.fullmatch(path_of(scope)):
            check_intent(scope)
            trail: AuditTrail = scope[TRAIL]
            trail.note_admission()
            limit = {} if self.access is None else {BODY_BYTES_MAX: STRANGER_BYTES_MAX}
            return {**scope, VISIT: Stranger(self.counters, address, trail), **limit}
        return await self._authenticate(scope, path_of(scope), address)

    def trail_of(self, scope: Scope) -> AuditTrail:
        """Return where the acts of a request are written."""
        return AuditTrail(self._audit, scope, path_of(scope))

    async def principal_of(self, scope: Scope) -> Principal:
        """Return who makes a request, by anything but a ticket.

        Raises:
            UnauthorizedError: The caller is not authenticated.
            LimitReachedError: Wrong credentials came too often from its address.
        """
        address = address_of(scope)
        connection = HTTPConnection(scope)
        self.counters.refusals.check(address)
        try:
            principal = await self.authorizer.principal_of(connection)
        except UnauthorizedError:
            self.counters.refusals.add(address)
            raise
        if principal is None:
            if has_credential(connection):
                self.counters.refusals.add(address)
            raise UnauthorizedError("this server requires authentication; send a credential")
        return principal

    async def principal_by_link(self, word: str, scope: Scope, *, replaces: bool) -> Principal:
        """Use up a link to log in with and return whom it is for.

        Args:
            replaces: Also where another principal is logged in.

        Raises:
            UnauthorizedError: It is none, was used, or came late.
            OtherLoginError: Another principal is logged in. The link is still good.
            LimitReachedError: Wrong credentials came too often from this address.
        """
        address = address_of(scope)
        self.counters.refusals.check(address)
        try:
            current = await self.authorizer.principal_of_cookie(HTTPConnection(scope))
            coming = await self.authorizer.principal_of_link(word)
            if current is not None and current.key != coming.key and not replaces:
                raise OtherLoginError(
                    f"this browser is logged in as {current.name!r}; the link is for {coming.name!r}"
                )
            return await self.authorizer.by_link(word)
        except UnauthorizedError:
            self.counters.refusals.add(address)
            raise

    async def lock_out(self, principal: Principal) -> None:
        """End a principal's cookies, links, tickets and passes, all that was issued for them, and their streams:
        here at once, in other processes that share the store within `WATCH_S` seconds and the time of the check.
        """
        await self.revocations.lock_out(principal.key)
        self.recheck()

    async def announce(self) -> None:
        """Check all live connections, here and in the other processes of the store: rights have changed."""
        await self.revocations.announce()
        self.recheck()

    def recheck(self) -> None:
        """Check each live stream now: rights have changed."""
        self._living.recheck()

    async def _authenticate(self, scope: Scope, path: str, address: str) -> Scope:
        found = SESSION_PATH.fullmatch(path)
        session, what = (found["session"], found["what"] or "") if found else ("", "")
        action = action_of(scope.get("method", "GET"), what)
        connection: HTTPConnection | None = HTTPConnection(scope)
        checks = self._living.checks
        ticket = _ticket_of(scope) if what in _STREAMS else ""
        if ticket:
            principal = await self._by_ticket(ticket, HTTPConnection(scope), session)
            connection = None
        else:
            principal = await self.principal_of(scope)
            check_page(scope, is_stream=what in _STREAMS)
        if session:
            inside = name_in_store(session, principal.tenant)
            scope = _rename_session(scope, session, inside)
            session = inside
        trail: AuditTrail = scope[TRAIL]
        trail.identify(principal, session)
        visit = self._visit(principal, session, connection, address, checks, trail)
        self.counters.requests.count(visit.caller)
        if what in _BEGINNINGS:
            await visit.require(action)
        elif session:
            await visit.require_there(action)
        trail.note_admission()
        return {**scope, VISIT: visit}

    async def _by_ticket(self, ticket: str, connection: HTTPConnection, session: str) -> Principal:
        address = address_of(connection.scope)
        self.counters.refusals.check(address)
        try:
            return await self.authorizer.by_ticket(ticket, connection, session)
        except UnauthorizedError:
            self.counters.refusals.add(address)
            raise

    def _visit(
        self,
        principal: Principal,
        session: str,
        connection: HTTPConnection | None,
        address: str,
        checks: int,
        trail: AuditTrail,
    ) -> KnownCaller:
        assert self.access is not None
        return KnownCaller(
            principal,
            session,
            connection,
            address,
            authorizer=self.authorizer,
            ownership=self.ownership,
            counters=self.counters,
            host=self._host,
            living=self._living,
            checks=checks,
            trail=trail,
            recheck_s=self.access.recheck_s,
        )


def path_of(scope: Scope) -> str:
    """Return the path below the place where this app is mounted, as the router sees it."""
    root, path = scope.get("root_path", ""), str(scope["path"])
    is_below = bool(root) and path.startswith(f"{root}/")
    return path[len(root) :] if is_below else path


def _ticket_of(scope: Scope) -> str:
    query: list[tuple[str, str]] = parse_qsl(scope["query_string"].decode("latin-1"))
    return next((value for name, value in query if name == "ticket"), "")


def _rename_session(scope: Scope, session: str, inside: str) -> Scope:
    """Return a scope whose path names the session otherwise."""
    path: str = scope["path"]
    head = len(path) - len(path_of(scope)) + len("/v1/sessions/")
    return {**scope, "path": f"{path[:head]}{inside}{path[head + len(session) :]}"}
