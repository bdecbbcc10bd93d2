"""Authorizer: all decisions about callers, for single requests and for long streams.

Credentials are tried in this order: a ticket, a viewer token, a cookie of this server, and the application's
`authenticate`. For a caller without any right on a session, the session does not exist.
"""

from __future__ import annotations

from enum import IntEnum

from msgspec.structs import replace
from starlette.requests import HTTPConnection

from midstream.errors import AccessError, SessionNotFoundError, UnauthorizedError
from midstream.server.auth.access import Access
from midstream.server.auth.bearer_tokens import bearer_token
from midstream.server.auth.credential_sources import CredentialSource, settle
from midstream.server.auth.issued_credentials import CredentialIssuer, CredentialKind, key_of
from midstream.server.auth.origins import page_of
from midstream.server.auth.ownership import Owner, Ownership, is_of_tenant, name_in_store, name_outside
from midstream.server.auth.principals import Action, Principal
from midstream.session.child_names import root_of
from midstream.store.contract import Store

COOKIE = "midstream"
HOST_COOKIE = f"__Host-{COOKIE}"
"""Name over HTTPS: no other host or path can set it."""


class AccessLevel(IntEnum):
    """Rights of a principal on a session."""

    NONE = 0
    """The session does not exist for the principal."""
    READ = 1
    APPROVE = 2
    """Read the session, and answer its questions."""
    FULL = 3
    BEGIN = 4
    """The session does not exist and has no owner: its first sender becomes the owner."""


_NEEDED = {
    Action.READ: AccessLevel.READ,
    Action.APPROVE: AccessLevel.APPROVE,
    Action.SEND: AccessLevel.FULL,
    Action.OWN: AccessLevel.FULL,
}


class Authorizer:
    """Authenticates callers, and decides about their rights."""

    def __init__(
        self,
        access: Access,
        source: CredentialSource,
        store: Store,
        ownership: Ownership,
        credentials: CredentialIssuer,
    ) -> None:
        self._access = access
        self._source = source
        self._store = store
        self._ownership = ownership
        self._credentials = credentials

    async def principal_of(self, connection: HTTPConnection) -> Principal | None:
        """Authenticate a request by any credential except a ticket; return None without a known one.

        Raises:
            UnauthorizedError: A viewer token is not valid, or no longer valid.
        """
        token = bearer_token(connection)
        if token.startswith(f"{CredentialKind.VIEWER.value}-"):
            return await self._by_issued(CredentialKind.VIEWER, token)
        principal = await self._source(connection)
        if principal is None and not token and (kept := cookie_of(connection)):
            return await self._by_issued(CredentialKind.COOKIE, kept)
        return principal

    async def by_ticket(self, ticket: str, connection: HTTPConnection, session: str) -> Principal:
        """Consume a ticket, and return its principal.

        Raises:
            UnauthorizedError: The ticket is unknown, used, expired, or for another session or page.
        """
        taken = await self._credentials.take(CredentialKind.TICKET, ticket)
        requested = (name_in_store(session, taken.principal.tenant), page_of(connection.scope))
        if requested != (taken.session, taken.origin):
            raise UnauthorizedError("this ticket is for another session or page")
        if taken.action == Action.READ:  # a read ticket limits its principal to reading
            return replace(taken.principal, session=root_of(taken.session))
        return taken.principal

    async def by_link(self, token: str) -> Principal:
        """Consume a login code, and return its principal.

        Raises:
            UnauthorizedError: The code is unknown, used or expired.
        """
        return (await self._credentials.take(CredentialKind.LOGIN, token)).principal

    async def principal_of_link(self, token: str) -> Principal:
        """Return the principal of a login code without consuming the code.

        Raises:
            UnauthorizedError: The code is unknown, used or expired.
        """
        return (await self._credentials.show(CredentialKind.LOGIN, token)).principal

    async def principal_of_cookie(self, connection: HTTPConnection) -> Principal | None:
        """Return the principal of a request's login cookie; None without a valid one."""
        try:
            return await self._by_issued(CredentialKind.COOKIE, cookie_of(connection))
        except UnauthorizedError:
            return None

    @property
    def is_application_decided(self) -> bool:
        """Whether the application's `authorize` decides instead of the stored owners."""
        return self._access.authorize is not None

    async def level_of(self, principal: Principal, session: str, action: Action) -> AccessLevel:
        """Return the rights of a principal on a session (stored name) for an action."""
        if not is_of_tenant(session, principal.tenant) or (
            principal.session and principal.session != root_of(session)
        ):
            return AccessLevel.NONE
        if not principal.scope.covers(name_outside(session, principal.tenant)):
            return AccessLevel.NONE
        owner = await self._ownership.owner_of(session)
        if owner is not None and owner.tenant != principal.tenant and not _runs_everything(principal):
            return AccessLevel.NONE
        if owner is not None and principal.claim not in ("", owner.claim):
            return AccessLevel.NONE  # the viewer token is for an earlier session of this name
        level = await self._level_by_owner(principal, session, owner)
        if self._access.authorize is not None:
            decided = await self._level_by_application(principal, session, action, owner)
            is_allowed = decided >= _NEEDED[action]
            level = level if level is AccessLevel.BEGIN and is_allowed else decided
        return min(level, AccessLevel.READ) if principal.session else level

    async def require(self, principal: Principal, session: str, action: Action) -> AccessLevel:
        """Return the rights of a principal if they include the action.

        Raises:
            SessionNotFoundError: The principal has no right on the session.
            AccessError: The principal has other rights only.
        """
        level = await self.level_of(principal, session, action)
        if level is AccessLevel.NONE:
            raise SessionNotFoundError(f"no session {session!r}")
        if level < _NEEDED[action]:
            allowed = "read" if level is AccessLevel.READ else "read and answer the questions of"
            raise AccessError(f"you may only {allowed} this session")
        if action not in principal.scope.actions:
            permitted = ", ".join(principal.scope.actions) or "nothing"
            raise AccessError(f"the scope of this credential is {permitted}; this needs {action}")
        return level

    async def require_valid(self, principal: Principal, since: float, now: float) -> None:
        """Require that a principal, which connected at `since` (seconds since 1970), still has access.

        Raises:
            UnauthorizedError: Its credential has ended, or the principal was locked out.
        """
        if principal.expires_at is not None and principal.expires_at <= now:
            raise UnauthorizedError("the credential of this connection has expired; send a new one")
        await self._credentials.require_unrevoked(principal, since)

    async def _level_by_owner(self, principal: Principal, session: str, owner: Owner | None) -> AccessLevel:
        if owner is None and await self._store.find(root_of(session)) is None:
            return AccessLevel.BEGIN
        if principal.is_operator:
            return AccessLevel.FULL
        if owner is None:
            return AccessLevel.NONE
        if principal.session:
            return AccessLevel.READ
        if principal.id == owner.principal:
            return AccessLevel.FULL
        if principal.is_approver:
            return AccessLevel.APPROVE
        return AccessLevel.READ if principal.id in owner.readers else AccessLevel.NONE

    async def _level_by_application(
        self, principal: Principal, session: str, action: Action, owner: Owner | None
    ) -> AccessLevel:
        authorize = self._access.authorize
        assert authorize is not None
        if await settle(authorize(principal, action, session, owner)):
            return _NEEDED[action]
        may_look = action is not Action.READ and await settle(
            authorize(principal, Action.READ, session, owner)
        )
        return AccessLevel.READ if may_look else AccessLevel.NONE

    async def _by_issued(self, kind: CredentialKind, token: str) -> Principal:
        shown = await self._credentials.show(kind, token)
        return replace(shown.principal, expires_at=shown.expires_at, via=key_of(token))


def _runs_everything(principal: Principal) -> bool:
    return principal.is_operator and not principal.tenant


def has_credential(connection: HTTPConnection) -> bool:
    """Return whether a request has a credential, valid or not."""
    return "authorization" in connection.headers or bool(cookie_of(connection))


def cookie_of(connection: HTTPConnection) -> str:
    """Return the value of the login cookie; "" without one."""
    return connection.cookies.get(HOST_COOKIE) or connection.cookies.get(cookie_name(connection)) or ""


def cookie_name(connection: HTTPConnection) -> str:
    """Return the name of the login cookie. Without TLS it includes the port: browsers share cookies between ports."""
    if connection.url.scheme in {"https", "wss"}:
        return HOST_COOKIE
    return f"{COOKIE}-{connection.url.port or 80}"
