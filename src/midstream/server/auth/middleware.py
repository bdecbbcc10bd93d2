"""Authentication and authorization of each request and handshake, before its route.

The checks, in order: size of the headers, origin, rate of the address, credential, rate of the principal, and right to
the action of method and path. A path that is missing in the tables below needs the rights of the owner.

After the middleware, the scope has the stored name of the session, and the caller (`caller.caller_of`). Endpoints use
the caller for later decisions: whether a stream begins a session, which sessions a list may contain, and how long a
stream may stay open.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from itertools import chain
from urllib.parse import parse_qsl

from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.types import Scope

from midstream.background_loops import spawn_loop
from midstream.engine.host import Host
from midstream.errors import AccessError, MidstreamError, OtherLoginError, UnauthorizedError
from midstream.server.api.request_bodies import BODY_BYTES_MAX, UNAUTHENTICATED_BYTES_MAX
from midstream.server.audit_log import AuditLog
from midstream.server.auth.access import Access
from midstream.server.auth.audit_trail import AuditTrail
from midstream.server.auth.authorizer import Authorizer, has_credential
from midstream.server.auth.caller import CALLER, Counters, KnownCaller, LiveCallers, UnauthenticatedCaller
from midstream.server.auth.credential_sources import source_of
from midstream.server.auth.issued_credentials import (
    LOGIN_LINK_S,
    CredentialIssuer,
    CredentialKind,
    StoredCredential,
)
from midstream.server.auth.local_user import LocalUser
from midstream.server.auth.origins import check_intent, check_origin, check_page, remote_address
from midstream.server.auth.ownership import Ownership, name_in_store
from midstream.server.auth.principals import OPERATOR, Action, Principal
from midstream.server.auth.revocations import WATCH_S, Revocations
from midstream.server.limits import Limits, address_of

SESSION_PATH = re.compile(r"/v1/sessions/(?P<session>[^/]+)(?P<what>/.*)?", re.DOTALL)
"""Paths of one session: its name, and the rest of the path."""
_PUBLIC_PATHS = re.compile(
    r"/|/health|/ready|/static/.*|/v1/login|/v1/challenge|/\.well-known/agent-card\.json"
    r"|/v1/stream/__ds/jwks\.json"
    r"|/v1/stream/__ds/subscriptions/[^/]+/(?:callback|ack|release)"
)
"""Paths without authentication: files of the pages, the agent card, health, login, and the public key of webhooks. Also
reports of workers, which the endpoint authenticates by the token of their wake."""
_READ_PATHS = re.compile(r"/records|/blobs/[^/]+|/events|/poll|/commands|/tickets|/stream")
"""Paths that need the right to read. Streams, frames and tickets that send commands are checked again."""
_SPEAK_PATHS = frozenset({"/cancel", "/resume", "/withdraw"})
_ANSWER_PATH = "/answer"
_TICKET_PATHS = frozenset({"/events", "/poll", "/stream"})
"""Paths that accept a ticket."""
_BEGIN_PATHS = frozenset({"/commands", "/events", "/poll", "/stream", "/tickets"})
"""Paths whose requests may begin a session."""

_ADVICE = (
    "Remove --no-auth, or pass `access=` to `midstream.asgi`; or `allow_unauthenticated=True` if an outer "
    "app authenticates."
)
TRAIL = "midstream.trail"
"""Key of the audit trail in an ASGI scope."""
_log = logging.getLogger(__name__)


def action_of(method: str, what: str) -> Action:
    """Return the action of a request on a session; `what` is the path after the session's name."""
    if what in _SPEAK_PATHS:
        return Action.SEND
    if what == _ANSWER_PATH:
        return Action.APPROVE
    if _READ_PATHS.fullmatch(what) or (what == "" and method in {"GET", "HEAD"}):
        return Action.READ
    return Action.OWN


class AuthMiddleware:
    """Admits or refuses requests.

    Args:
        host: Host of the sessions.
        access: Authentication and rights; None if an outer application authenticates.
        limits: Limits of callers.
        allowed_origins: Further origins whose pages may send requests.
        allow_unauthenticated: Serve other machines although `access` is None.
        audit: The audit log; None logs nothing.

    Raises:
        UsageError: The store has no key-value part, which `access` needs.
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
        self.counters = Counters(limits, host.world, host.awake.is_live)
        self._living = LiveCallers()
        self._watching: asyncio.Task[None] | None = None
        if access is None:
            return
        host.observers.add(self.counters)
        self.source = source_of(access.authenticate, access.still_valid)
        self.ownership = Ownership(host.store, host.world)
        self.revocations = Revocations(host.store, host.world)
        self.credentials = CredentialIssuer(host.store, host.world, self.revocations, self.source.is_current)
        self.authorizer = Authorizer(access, self.source, host.store, self.ownership, self.credentials)

    async def open(self) -> None:
        """Start, after the store was opened."""
        if self.access is not None:
            if self.access.login:
                await self._keep_login(self.access.login)
            await self.source.refresh(self._host.store, self._host.world)
            work = partial(self._watch, await self.revocations.newest())
            self._watching = spawn_loop(self._host.world, work, name="watch for revocations")
        else:
            clients = (
                "of this machine only" if self.is_local else "of every machine that can reach the server"
            )
            _log.warning(
                "no authentication is configured: every client %s has full access. %s", clients, _ADVICE
            )

    async def close(self) -> None:
        """Stop watching for revocations. Idempotent."""
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
            await asyncio.wait([watching])

    async def _keep_login(self, token: str) -> None:
        """Store the login code that is printed at the start, for the user of this machine."""
        operator = self.source.principal if isinstance(self.source, LocalUser) else OPERATOR
        now = self._host.world.now()
        await self.credentials.keep(
            token, StoredCredential(CredentialKind.LOGIN, operator, now, now + LOGIN_LINK_S)
        )

    async def _watch(self, seen: int) -> None:
        """Check open connections when another process changed rights, or a file of credentials has changed.

        Args:
            seen: Number of the last known change; see `Revocations.newest`.
        """
        store, world = self._host.store, self._host.world
        while True:
            await world.sleep(WATCH_S)
            newest = seen
            with suppress(MidstreamError):  # the store may be unavailable for a while
                await self.source.refresh(store, world)
                newest = await self.revocations.newest()
            has_changed = self.source.has_changed()
            if newest != seen or has_changed:
                seen = newest
                self.recheck()

    def check_scope(self, scope: Scope) -> None:
        """Check a request by its address, origin, headers and path, before the store is used.

        Raises:
            AccessError: The request comes from another machine, and this server has no authentication.
            ForeignOriginError: The request comes from a page of another site.
            LimitReachedError: The address sends too many requests.
            HTTPException: The headers are too large, or the path is invalid.
        """
        size = sum(map(len, chain.from_iterable(scope["headers"])))
        if size > self._limits.header_bytes_max > 0:
            raise HTTPException(
                431, f"the headers of a request may have at most {self._limits.header_bytes_max} bytes"
            )
        if not scope["path"].isprintable():
            # The regular expressions of a router may ignore a newline at the end.
            raise HTTPException(404)
        if self.is_local and (address := remote_address(scope)):
            raise AccessError(
                f"this app has no authentication, and refuses {address}: only clients of this machine are served. "
                f"{_ADVICE}"
            )
        check_origin(scope, self._allowed_origins)
        self.counters.requests.count(address_of(scope))

    async def admit(self, scope: Scope) -> Scope:
        """Authenticate and authorize a request; return a copy of the scope with the caller.

        Raises:
            MidstreamError: The request is refused.
        """
        address = address_of(scope)
        if self.access is None or _PUBLIC_PATHS.fullmatch(path_of(scope)):
            check_intent(scope)
            trail: AuditTrail = scope[TRAIL]
            trail.note_admission()
            limit = {} if self.access is None else {BODY_BYTES_MAX: UNAUTHENTICATED_BYTES_MAX}
            return {**scope, CALLER: UnauthenticatedCaller(self.counters, address, trail), **limit}
        return await self._authenticate(scope, path_of(scope), address)

    def trail_of(self, scope: Scope) -> AuditTrail:
        """Return the audit trail of a request."""
        return AuditTrail(self._audit, scope, path_of(scope))

    async def principal_of(self, scope: Scope) -> Principal:
        """Return the principal of a request by any credential except a ticket.

        Raises:
            UnauthorizedError: The caller is not authenticated.
            LimitReachedError: Too many wrong credentials came from the address.
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

    async def principal_by_link(self, token: str, scope: Scope, *, replaces: bool) -> Principal:
        """Consume a login code, and return its principal.

        Args:
            replaces: Whether to replace the login of another principal.

        Raises:
            UnauthorizedError: The code is unknown, used or expired.
            OtherLoginError: Another principal is logged in. The code stays valid.
            LimitReachedError: Too many wrong credentials came from the address.
        """
        address = address_of(scope)
        self.counters.refusals.check(address)
        try:
            current = await self.authorizer.principal_of_cookie(HTTPConnection(scope))
            coming = await self.authorizer.principal_of_link(token)
            if current is not None and current.key != coming.key and not replaces:
                raise OtherLoginError(
                    f"this browser is logged in as {current.name!r}; the link is for {coming.name!r}"
                )
            return await self.authorizer.by_link(token)
        except UnauthorizedError:
            self.counters.refusals.add(address)
            raise

    async def lock_out(self, principal: Principal) -> None:
        """End all credentials that were issued to a principal, the derived ones, and their streams.

        This process does so at once, others of the store within `WATCH_S` seconds and the time of the check.
        """
        await self.revocations.lock_out(principal.key)
        self.recheck()

    async def announce(self) -> None:
        """Check all open connections of all processes of the store after a change of rights."""
        await self.revocations.announce()
        self.recheck()

    def recheck(self) -> None:
        """Check all open streams of this process after a change of rights."""
        self._living.recheck()

    async def _authenticate(self, scope: Scope, path: str, address: str) -> Scope:
        found = SESSION_PATH.fullmatch(path)
        session, what = (found["session"], found["what"] or "") if found else ("", "")
        action = action_of(scope.get("method", "GET"), what)
        connection: HTTPConnection | None = HTTPConnection(scope)
        checks = self._living.checks
        ticket = _ticket_of(scope) if what in _TICKET_PATHS else ""
        if ticket:
            principal = await self._by_ticket(ticket, HTTPConnection(scope), session)
            connection = None
        else:
            principal = await self.principal_of(scope)
            check_page(scope, is_stream=what in _TICKET_PATHS)
        if session:
            inside = name_in_store(session, principal.tenant)
            scope = _rename_session(scope, session, inside)
            session = inside
        trail: AuditTrail = scope[TRAIL]
        trail.identify(principal, session)
        caller = self._known_caller(principal, session, connection, address, checks, trail)
        self.counters.requests.count(caller.counted_name)
        if what in _BEGIN_PATHS:
            await caller.require(action)
        elif session:
            await caller.require_existing(action)
        trail.note_admission()
        return {**scope, CALLER: caller}

    async def _by_ticket(self, ticket: str, connection: HTTPConnection, session: str) -> Principal:
        address = address_of(connection.scope)
        self.counters.refusals.check(address)
        try:
            return await self.authorizer.by_ticket(ticket, connection, session)
        except UnauthorizedError:
            self.counters.refusals.add(address)
            raise

    def _known_caller(
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
    """Return the path below the mount point of this app, as the router gets it."""
    root, path = scope.get("root_path", ""), str(scope["path"])
    is_below = bool(root) and path.startswith(f"{root}/")
    return path[len(root) :] if is_below else path


def _ticket_of(scope: Scope) -> str:
    query: list[tuple[str, str]] = parse_qsl(scope["query_string"].decode("latin-1"))
    return next((value for name, value in query if name == "ticket"), "")


def _rename_session(scope: Scope, session: str, inside: str) -> Scope:
    path: str = scope["path"]
    head = len(path) - len(path_of(scope)) + len("/v1/sessions/")
    return {**scope, "path": f"{path[:head]}{inside}{path[head + len(session) :]}"}
