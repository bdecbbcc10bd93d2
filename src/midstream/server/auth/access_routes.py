"""Routes for known users: cookies and tickets, and the sharing of a session."""

from __future__ import annotations

from http.cookies import SimpleCookie
from typing import Literal, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import Route

from midstream.errors import AccessError, MalformedFrameError, SessionNotFoundError
from midstream.server.api.http_endpoints import NO_STORE
from midstream.server.api.request_bodies import body_of
from midstream.server.auth.authorizer import cookie_name, cookie_of
from midstream.server.auth.caller import visit_of
from midstream.server.auth.middleware import AuthMiddleware
from midstream.server.auth.origins import page_of
from midstream.server.auth.ownership import Owner
from midstream.server.auth.principals import ID_CHARS_MAX, Action, Principal
from midstream.server.auth.tokens import COOKIE_S, LOGIN_LINK_S, TICKET_S, TokenKind

T = TypeVar("T")


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

    def routes(self) -> list[Route]:
        """Return the routes, for a router."""
        one = "/v1/sessions/{session_id}"
        return [
            Route("/v1/me", self.me, methods=["GET"]),
            Route("/v1/login", self.login, methods=["POST"]),
            Route("/v1/login-links", self.login_link, methods=["POST"]),
            Route("/v1/logout", self.logout, methods=["POST"]),
            Route(f"{one}/tickets", self.ticket, methods=["POST"]),
            Route(f"{one}/owner", self.owner, methods=["GET"]),
            Route(f"{one}/readers/{{reader}}", self.add_reader, methods=["PUT"]),
            Route(f"{one}/readers/{{reader}}", self.remove_reader, methods=["DELETE"]),
        ]

    async def me(self, request: Request) -> Response:
        """Return the principal of the caller."""
        principal = visit_of(request.scope).principal
        return answer(_told(principal))

    async def login(self, request: Request) -> Response:
        """Give a browser a cookie: for a link to log in with, or for any credential that it shows."""
        wish = await read_wish(request, LoginRequest)
        if wish.login:
            principal = await self._door.principal_by_link(wish.login, request.scope)
        else:
            principal = await self._door.principal_of(request.scope)
        if not principal.session:  # else the cookie is good as long as the viewer's pass
            principal = replace(principal, via="")
        word = await self._door.access_tokens.issue(TokenKind.COOKIE, principal, for_s=COOKIE_S)
        told = answer(_told(principal))
        told.headers["set-cookie"] = _set_cookie(request, word, for_s=COOKIE_S)
        return told

    async def login_link(self, request: Request) -> Response:
        """Issue a token that logs a browser in, once, as the caller."""
        principal = visit_of(request.scope).principal
        _require_whole(principal)
        word = await self._door.access_tokens.issue(TokenKind.LOGIN, principal, for_s=LOGIN_LINK_S)
        return answer(Issued(word, LOGIN_LINK_S), status=201)

    async def logout(self, request: Request) -> Response:
        """Let the cookie of this browser be none, and end what came in by it."""
        await self._door.access_tokens.withdraw(cookie_of(request))
        self._door.look_again()
        parting = Response(status_code=204, headers=NO_STORE)
        parting.headers["set-cookie"] = _set_cookie(request, "", for_s=0)
        return parting

    async def ticket(self, request: Request) -> Response:
        """Give out a ticket for one connection to this session, of the page that asks."""
        visit = visit_of(request.scope)
        wish = await read_wish(request, TicketRequest)
        await visit.require(Action(wish.action))
        word = await self._door.access_tokens.issue(
            TokenKind.TICKET,
            visit.principal,
            for_s=TICKET_S,
            session=visit.session,
            action=wish.action,
            origin=page_of(request.scope),
        )
        return answer(Issued(word, TICKET_S), status=201)

    async def owner(self, request: Request) -> Response:
        """Return the owner of this session, and with whom it is shared."""
        return _owned(await owner_of(self._door, visit_of(request.scope).session))

    async def add_reader(self, request: Request) -> Response:
        """Let a principal of the same tenant look at this session."""
        session, reader = visit_of(request.scope).session, _reader_of(request)
        owner = await owner_of(self._door, session)
        readers = [each for each in owner.readers if each != reader]
        return _owned(await self._door.ownership.share(session, [*readers, reader]))

    async def remove_reader(self, request: Request) -> Response:
        """Let a principal no longer look at this session, and end its streams."""
        session, reader = visit_of(request.scope).session, _reader_of(request)
        owner = await owner_of(self._door, session)
        owner = await self._door.ownership.share(session, [each for each in owner.readers if each != reader])
        self._door.look_again()
        return _owned(owner)


async def owner_of(door: AuthMiddleware, session: str) -> Owner:
    """Return whose a session is.

    Raises:
        SessionNotFoundError: It has no owner.
    """
    owner = await door.ownership.owner_of(session)
    if owner is None:
        raise SessionNotFoundError(f"no session {session!r} with an owner")
    return owner


async def read_wish(request: Request, kind: type[T]) -> T:
    """Return what the body of a request asks for.

    Raises:
        MalformedFrameError: It has another form.
        FrameTooLargeError, ConnectionLostError: As `body_of` does.
    """
    body = await body_of(request)
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedFrameError(
            "the body of this request is malformed; see docs/reference/http.md"
        ) from error


def _reader_of(request: Request) -> str:
    reader: str = request.path_params["reader"]
    if len(reader) > ID_CHARS_MAX:
        raise MalformedFrameError(f"a principal's id has {ID_CHARS_MAX} characters at most")
    return reader


def _require_whole(principal: Principal) -> None:
    if principal.session:
        raise AccessError("a viewer's pass permits only reading one session")


def _owned(owner: Owner) -> Response:
    return answer(Owned(owner.tenant, owner.principal, owner.readers))


def _told(principal: Principal) -> CallerDescription:
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


def answer(value: object, *, status: int = 200) -> Response:
    """Return a value as a JSON answer that must not be cached."""
    return Response(msgspec.json.encode(value), status, headers=NO_STORE, media_type="application/json")
