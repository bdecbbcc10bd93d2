"""Routes for known users: cookies and tickets, and the sharing of a session."""

from __future__ import annotations

from http.cookies import SimpleCookie
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from midstream.errors import AccessError, MalformedFrameError, SessionNotFoundError
from midstream.server.api.http_endpoints import NO_STORE, json_response
from midstream.server.auth.authorizer import cookie_name, cookie_of
from midstream.server.auth.caller import visit_of
from midstream.server.auth.middleware import AuthMiddleware
from midstream.server.auth.origins import page_of
from midstream.server.auth.ownership import Owner
from midstream.server.auth.principals import ID_CHARS_MAX, Action, Principal
from midstream.server.auth.tokens import COOKIE_S, LOGIN_LINK_S, TICKET_S, TokenKind


class TicketRequest(Struct, forbid_unknown_fields=True):
    """Request for a ticket."""

    action: Literal["read", "speak"] = "read"


class LoginRequest(Struct, forbid_unknown_fields=True):
    """A link to log in with; without one the request shows a credential of its own."""

    login: str = ""


class CallerDescription(Struct, frozen=True):
    """The principal of the caller."""

    id: str
    tenant: str
    is_operator: bool
    session: str


class Issued(Struct, frozen=True):
    """Credential that was issued, and the seconds it is valid for."""

    word: str
    for_s: float


class Owned(Struct, frozen=True):
    """Owner of a session, and the others who may read it."""

    tenant: str
    principal: str
    readers: tuple[str, ...]


class AccessRoutes:
    """The endpoints of access. All but `login` require authentication."""

    def __init__(self, door: AuthMiddleware) -> None:
        self._door = door

    async def me(self, request: Request) -> CallerDescription:
        """Return the principal of the caller."""
        return _describe_caller(visit_of(request.scope).principal)

    async def login(self, request: Request, body: LoginRequest) -> Response:
        """Set the login cookie of a browser, for a login link or any other credential."""
        if body.login:
            principal = await self._door.principal_by_link(body.login, request.scope)
        else:
            principal = await self._door.principal_of(request.scope)
        if not principal.session:  # else the cookie is good as long as the viewer's pass
            principal = replace(principal, via="")
        word = await self._door.access_tokens.issue(TokenKind.COOKIE, principal, for_s=COOKIE_S)
        told = json_response(_describe_caller(principal))
        told.headers["set-cookie"] = _set_cookie(request, word, for_s=COOKIE_S)
        return told

    async def login_link(self, request: Request) -> Issued:
        """Issue a token that logs one browser in, once, as the caller."""
        principal = visit_of(request.scope).principal
        _require_whole(principal)
        word = await self._door.access_tokens.issue(TokenKind.LOGIN, principal, for_s=LOGIN_LINK_S)
        return Issued(word, LOGIN_LINK_S)

    async def logout(self, request: Request) -> Response:
        """Delete the login cookie of this browser, and end its connections."""
        await self._door.access_tokens.withdraw(cookie_of(request))
        self._door.recheck()
        parting = Response(status_code=204, headers=NO_STORE)
        parting.headers["set-cookie"] = _set_cookie(request, "", for_s=0)
        return parting

    async def ticket(self, request: Request, body: TicketRequest) -> Issued:
        """Issue a ticket for one connection to this session, from the page of the request."""
        visit = visit_of(request.scope)
        await visit.require(Action(body.action))
        word = await self._door.access_tokens.issue(
            TokenKind.TICKET,
            visit.principal,
            for_s=TICKET_S,
            session=visit.session,
            action=body.action,
            origin=page_of(request.scope),
        )
        return Issued(word, TICKET_S)

    async def owner(self, request: Request) -> Owned:
        """Return the owner of this session, and its readers."""
        return _describe_owner(await owner_of(self._door, visit_of(request.scope).session))

    async def add_reader(self, request: Request) -> Owned:
        """Allow a principal of the same tenant to read this session."""
        session, reader = visit_of(request.scope).session, _reader_of(request)
        owner = await owner_of(self._door, session)
        readers = [each for each in owner.readers if each != reader]
        return _describe_owner(await self._door.ownership.share(session, [*readers, reader]))

    async def remove_reader(self, request: Request) -> Owned:
        """Stop sharing this session with a principal, and end its streams."""
        session, reader = visit_of(request.scope).session, _reader_of(request)
        owner = await owner_of(self._door, session)
        owner = await self._door.ownership.share(session, [each for each in owner.readers if each != reader])
        self._door.recheck()
        return _describe_owner(owner)


async def owner_of(door: AuthMiddleware, session: str) -> Owner:
    """Return whose a session is.

    Raises:
        SessionNotFoundError: It has no owner.
    """
    owner = await door.ownership.owner_of(session)
    if owner is None:
        raise SessionNotFoundError(f"no session {session!r} with an owner")
    return owner


def _reader_of(request: Request) -> str:
    reader: str = request.path_params["reader"]
    if len(reader) > ID_CHARS_MAX:
        raise MalformedFrameError(f"a principal's id has {ID_CHARS_MAX} characters at most")
    return reader


def _require_whole(principal: Principal) -> None:
    if principal.session:
        raise AccessError("a viewer's pass permits only reading one session")


def _describe_owner(owner: Owner) -> Owned:
    return Owned(owner.tenant, owner.principal, owner.readers)


def _describe_caller(principal: Principal) -> CallerDescription:
    return CallerDescription(principal.id, principal.tenant, principal.is_operator, principal.session)


def _set_cookie(connection: HTTPConnection, word: str, *, for_s: float) -> str:
    name = cookie_name(connection)
    cookie: SimpleCookie = SimpleCookie()
    cookie[name] = word
    cookie[name].update({"path": "/", "max-age": str(int(for_s)), "samesite": "Strict"})
    cookie[name]["httponly"] = True
    if name.startswith("__Host-"):
        cookie[name]["secure"] = True
    return cookie[name].OutputString()
