"""Routes for authenticated users: cookies, tickets, credentials, and sharing of sessions."""

from __future__ import annotations

from http.cookies import SimpleCookie
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from midstream.errors import (
    AccessError,
    EntryDamagedError,
    MalformedFrameError,
    NotFoundError,
    SessionNotFoundError,
)
from midstream.server.api.http_endpoints import NO_STORE, json_response
from midstream.server.auth.audit_trail import AuditTrail
from midstream.server.auth.authorizer import cookie_name, cookie_of
from midstream.server.auth.caller import known_caller_of
from midstream.server.auth.credential_sources import ServerProof
from midstream.server.auth.issued_credentials import (
    COOKIE_IDLE_S,
    COOKIE_S,
    ID_LENGTH,
    LOGIN_LINK_S,
    TICKET_S,
    CredentialKind,
    StoredCredential,
    key_of,
)
from midstream.server.auth.middleware import TRAIL, AuthMiddleware
from midstream.server.auth.origins import page_of
from midstream.server.auth.ownership import UNREADABLE, Owner
from midstream.server.auth.principals import EVERYTHING, ID_CHARS_MAX, Action, Principal, Scope
from midstream.server.auth.revocations import EVERYONE

CREDENTIALS_MAX = 1000
"""Greatest number of credentials in one answer."""


class TicketRequest(Struct, forbid_unknown_fields=True):
    """Request for a ticket."""

    action: Literal["read", "send"] = "read"


class LoginRequest(Struct, forbid_unknown_fields=True):
    """A login code; without one, the request has another credential."""

    login: str = ""
    replace: bool = False
    """Log in although another principal is logged in with this browser."""


class ChallengeRequest(Struct, forbid_unknown_fields=True):
    """Request of a local client for the proof that the server has the user's key."""

    nonce: Annotated[str, Meta(min_length=22, max_length=128)]


class CallerDescription(Struct, frozen=True):
    """The principal of the caller, and the rights of their credential."""

    id: str
    tenant: str
    is_operator: bool
    session: str
    is_approver: bool
    scope: Scope


class Issued(Struct, frozen=True):
    """An issued credential, and the seconds for which it is valid."""

    token: str
    for_s: float


class CredentialLine(Struct, frozen=True):
    """A credential that this server issued; times in seconds since 1970.

    `principal` is the bearer, `issued_by` the issuing principal, and `parent` the id of the credential from which it
    was derived. `session` is the only permitted session.
    """

    id: str
    kind: CredentialKind
    principal: str
    issued_by: str
    issued_at: float
    used_at: float
    ends_at: float
    expires_at: float
    parent: str
    session: str
    scope: Scope


class CredentialPage(Struct, frozen=True):
    """Credentials, newest write first; `is_complete` unless there are more than `CREDENTIALS_MAX`."""

    credentials: list[CredentialLine]
    is_complete: bool


class RevokeAllQuery(Struct, frozen=True):
    """Principal whose credentials are revoked: the caller by default, `*` for all. Only an operator may give others."""

    principal: str | UnsetType = UNSET


class RevokedCredentials(Struct, frozen=True):
    """Number of revoked credentials, including derived ones."""

    count: int


class Owned(Struct, frozen=True):
    """Owner and readers of a session."""

    tenant: str
    principal: str
    readers: tuple[str, ...]


class AccessRoutes:
    """The endpoints of access. All but `login` require authentication."""

    def __init__(self, auth: AuthMiddleware) -> None:
        self._auth = auth

    async def me(self, request: Request) -> CallerDescription:
        """Return the principal of the caller."""
        return _describe_caller(known_caller_of(request.scope).principal)

    async def challenge(self, request: Request, body: ChallengeRequest) -> ServerProof:
        """Prove to a client of this machine that this server has the key of its user."""
        proof = self._auth.source.prove(body.nonce, request)
        if proof is None:
            raise NotFoundError("this server does not authenticate users of its machine by their key")
        return proof

    async def login(self, request: Request, body: LoginRequest) -> Response:
        """Set the login cookie of a browser, for a login code or any other credential."""
        if body.login:
            principal = await self._auth.principal_by_link(body.login, request.scope, replaces=body.replace)
        else:
            principal = await self._auth.principal_of(request.scope)
        trail: AuditTrail = request.scope[TRAIL]
        trail.note_login(principal)
        former = cookie_of(request)
        if former and principal.via == key_of(former):
            # The new cookie replaces the old one, so it has the same parent.
            principal = await self._auth.credentials.above_cookie(principal)
        token = await self._auth.credentials.issue(
            CredentialKind.COOKIE, principal, for_s=COOKIE_S, idle_s=COOKIE_IDLE_S
        )
        if former:
            await self._auth.credentials.withdraw(former)
            await self._auth.announce()
        response = json_response(_describe_caller(principal))
        response.headers["set-cookie"] = _set_cookie(request, token, for_s=COOKIE_S)
        return response

    async def login_link(self, request: Request) -> Issued:
        """Issue a one-time login code for the caller."""
        principal = known_caller_of(request.scope).principal
        _require_whole(principal)
        token = await self._auth.credentials.issue(CredentialKind.LOGIN, principal, for_s=LOGIN_LINK_S)
        return Issued(token, LOGIN_LINK_S)

    async def logout(self, request: Request) -> Response:
        """Delete the login cookie of this browser with all derived credentials, and end its connections."""
        await self._auth.credentials.withdraw(cookie_of(request))
        await self._auth.announce()
        parting = Response(status_code=204, headers=NO_STORE)
        parting.headers["set-cookie"] = _set_cookie(request, "", for_s=0)
        return parting

    async def credentials(self, request: Request) -> CredentialPage:
        """List the credentials that were issued by the caller; an operator gets those of all principals."""
        found = await self._manageable(request)
        lines = [_line_of(key, credential) for key, credential in found[:CREDENTIALS_MAX]]
        return CredentialPage(lines, is_complete=len(found) <= CREDENTIALS_MAX)

    async def revoke(self, request: Request) -> RevokedCredentials:
        """Revoke one credential with all derived ones, and end their connections."""
        name: str = request.path_params["credential"]
        keys = [key for key, _ in await self._manageable(request) if key[:ID_LENGTH] == name]
        if not keys:
            raise NotFoundError(f"no credential {name!r} that you issued")
        count = await self._auth.credentials.revoke(keys)
        await self._auth.announce()
        return RevokedCredentials(count)

    async def revoke_all(self, request: Request, query: RevokeAllQuery) -> RevokedCredentials:
        """Revoke all credentials of a principal with all derived ones, and end their connections.

        A token that this server did not issue stays valid. For a line of a token file, remove the line.
        """
        principal = known_caller_of(request.scope).principal
        _require_unscoped(principal)
        keys = [principal.key] if query.principal is UNSET else _keys_of_name(query.principal)
        keys = [key for key in keys if key == principal.key or _may_manage(principal, key)]
        if not keys:
            raise AccessError("only an operator may revoke the credentials of another principal")
        for key in keys:
            await self._auth.revocations.lock_out(key)
        found = await self._manageable(request)
        mine = [digest for digest, credential in found if EVERYONE in keys or credential.issued_by in keys]
        count = await self._auth.credentials.revoke(mine)
        await self._auth.announce()
        return RevokedCredentials(count)

    async def _manageable(self, request: Request) -> list[tuple[str, StoredCredential]]:
        principal = known_caller_of(request.scope).principal
        _require_unscoped(principal)
        rows = await self._auth.credentials.read_all()
        return [
            (key, credential)
            for key, credential in rows
            if credential.issued_by == principal.key or _may_manage(principal, credential.issued_by)
        ]

    async def ticket(self, request: Request, body: TicketRequest) -> Issued:
        """Issue a ticket for one connection to this session from the requesting page."""
        caller = known_caller_of(request.scope)
        await caller.require(Action(body.action))
        token = await self._auth.credentials.issue(
            CredentialKind.TICKET,
            caller.principal,
            for_s=TICKET_S,
            session=caller.session,
            action=body.action,
            origin=page_of(request.scope),
        )
        return Issued(token, TICKET_S)

    async def owner(self, request: Request) -> Owned:
        """Return the owner and the readers of this session."""
        return _describe_owner(await owner_of(self._auth, known_caller_of(request.scope).session))

    async def add_reader(self, request: Request) -> Owned:
        """Allow a principal of the same tenant to read this session."""
        session, reader = known_caller_of(request.scope).session, _reader_of(request)
        owner = await owner_of(self._auth, session)
        readers = [each for each in owner.readers if each != reader]
        return _describe_owner(await self._auth.ownership.share(session, [*readers, reader]))

    async def remove_reader(self, request: Request) -> Owned:
        """Stop sharing this session with a principal, and end its streams."""
        session, reader = known_caller_of(request.scope).session, _reader_of(request)
        owner = await owner_of(self._auth, session)
        owner = await self._auth.ownership.share(session, [each for each in owner.readers if each != reader])
        await self._auth.announce()
        return _describe_owner(owner)


async def owner_of(auth: AuthMiddleware, session: str) -> Owner:
    """Return the owner of a session.

    Raises:
        SessionNotFoundError: The session has no owner.
        EntryDamagedError: The owner cannot be read.
    """
    owner = await auth.ownership.owner_of(session)
    if owner is None:
        raise SessionNotFoundError(f"no session {session!r} with an owner")
    if owner == UNREADABLE:
        raise EntryDamagedError(f"the owner of session {session!r} cannot be read")
    return owner


def _reader_of(request: Request) -> str:
    reader: str = request.path_params["reader"]
    if len(reader) > ID_CHARS_MAX:
        raise MalformedFrameError(f"a principal's id may have at most {ID_CHARS_MAX} characters")
    return reader


def _require_whole(principal: Principal) -> None:
    if principal.session:
        raise AccessError("a viewer token permits only reading one session")


def _require_unscoped(principal: Principal) -> None:
    """Require a credential without a scope: a restricted credential must not end others."""
    _require_whole(principal)
    if principal.scope != EVERYTHING:
        raise AccessError("a credential with a scope cannot list or revoke credentials")


def _describe_owner(owner: Owner) -> Owned:
    return Owned(owner.tenant, owner.principal, owner.readers)


def _describe_caller(principal: Principal) -> CallerDescription:
    return CallerDescription(
        principal.id,
        principal.tenant,
        principal.is_operator,
        principal.session,
        principal.is_approver,
        principal.scope,
    )


def _line_of(key: str, credential: StoredCredential) -> CredentialLine:
    return CredentialLine(
        key[:ID_LENGTH],
        credential.kind,
        credential.principal.name,
        credential.issued_by.removeprefix(":"),
        credential.issued_at,
        credential.used_at,
        credential.ends_at,
        credential.expires_at,
        credential.parent[:ID_LENGTH],
        credential.session or credential.principal.session,
        credential.principal.scope,
    )


def _keys_of_name(name: str) -> list[str]:
    """Return the possible principal keys for a name: text before a colon is a tenant, or part of an id."""
    if name == EVERYONE:
        return [name]
    return [name, f":{name}"] if ":" in name else [f":{name}"]


def _may_manage(caller: Principal, key: str) -> bool:
    """Return whether a caller may revoke credentials that a principal issued."""
    is_in_tenant = key.partition(":")[0] == caller.tenant and key != EVERYONE
    return caller.is_operator and (not caller.tenant or is_in_tenant)


def _set_cookie(connection: HTTPConnection, token: str, *, for_s: float) -> str:
    name = cookie_name(connection)
    cookie: SimpleCookie = SimpleCookie()
    cookie[name] = token
    cookie[name].update({"path": "/", "max-age": str(int(for_s)), "samesite": "Strict"})
    cookie[name]["httponly"] = True
    if name.startswith("__Host-"):
        cookie[name]["secure"] = True
    return cookie[name].OutputString()
