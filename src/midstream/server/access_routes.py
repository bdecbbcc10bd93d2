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
from midstream.server.bodies import body_of
from midstream.server.door import Door
from midstream.server.guards import page_of
from midstream.server.http import NO_STORE
from midstream.server.judge import cookie_name, cookie_of
from midstream.server.passes import COOKIE_S, LOGIN_LINK_S, TICKET_S, Kind
from midstream.server.rights import Owner
from midstream.server.subjects import ID_CHARS_MAX, Action, Subject
from midstream.server.visits import visit_of

T = TypeVar("T")


class TicketWish(Struct, forbid_unknown_fields=True):
    """Request for a ticket."""

    action: Literal["read", "speak"] = "read"


class LoginWish(Struct, forbid_unknown_fields=True):
    """A link to log in with; without one the request shows a credential of its own."""

    login: str = ""


class Known(Struct, frozen=True):
    """Caller, as the server knows them."""

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
    subject: str
    readers: tuple[str, ...]


class AccessRoutes:
    """The endpoints of access. All but `login` are for those the door knows."""

    def __init__(self, door: Door) -> None:
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
        """Say who asks."""
        subject = visit_of(request.scope).subject
        return answer(_told(subject))

    async def login(self, request: Request) -> Response:
        """Give a browser a cookie: for a link to log in with, or for any credential that it shows."""
        wish = await read_wish(request, LoginWish)
        if wish.login:
            subject = await self._door.subject_by_link(wish.login, request.scope)
        else:
            subject = await self._door.subject_of(request.scope)
        if not subject.session:  # else the cookie is good as long as the viewer's pass
            subject = replace(subject, via="")
        word = await self._door.passes.issue(Kind.COOKIE, subject, for_s=COOKIE_S)
        told = answer(_told(subject))
        told.headers["set-cookie"] = _set_cookie(request, word, for_s=COOKIE_S)
        return told

    async def login_link(self, request: Request) -> Response:
        """Give out a word that logs a browser in, once, as whoever asks for it."""
        subject = visit_of(request.scope).subject
        _require_whole(subject)
        word = await self._door.passes.issue(Kind.LOGIN, subject, for_s=LOGIN_LINK_S)
        return answer(Issued(word, LOGIN_LINK_S), status=201)

    async def logout(self, request: Request) -> Response:
        """Let the cookie of this browser be none, and end what came in by it."""
        await self._door.passes.withdraw(cookie_of(request))
        self._door.look_again()
        parting = Response(status_code=204, headers=NO_STORE)
        parting.headers["set-cookie"] = _set_cookie(request, "", for_s=0)
        return parting

    async def ticket(self, request: Request) -> Response:
        """Give out a ticket for one connection to this session, of the page that asks."""
        visit = visit_of(request.scope)
        wish = await read_wish(request, TicketWish)
        await visit.require(Action(wish.action))
        word = await self._door.passes.issue(
            Kind.TICKET,
            visit.subject,
            for_s=TICKET_S,
            session=visit.session,
            action=wish.action,
            origin=page_of(request.scope),
        )
        return answer(Issued(word, TICKET_S), status=201)

    async def owner(self, request: Request) -> Response:
        """Say whose this session is, and with whom it is shared."""
        return _owned(await owner_of(self._door, visit_of(request.scope).session))

    async def add_reader(self, request: Request) -> Response:
        """Let a subject of the same tenant look at this session."""
        session, reader = visit_of(request.scope).session, _reader_of(request)
        owner = await owner_of(self._door, session)
        readers = [each for each in owner.readers if each != reader]
        return _owned(await self._door.rights.share(session, [*readers, reader]))

    async def remove_reader(self, request: Request) -> Response:
        """Let a subject no longer look at this session, and end its streams."""
        session, reader = visit_of(request.scope).session, _reader_of(request)
        owner = await owner_of(self._door, session)
        owner = await self._door.rights.share(session, [each for each in owner.readers if each != reader])
        self._door.look_again()
        return _owned(owner)


async def owner_of(door: Door, session: str) -> Owner:
    """Return whose a session is.

    Raises:
        SessionNotFoundError: It is nobody's.
    """
    owner = await door.rights.owner_of(session)
    if owner is None:
        raise SessionNotFoundError(f"there is no session {session!r} that belongs to anybody")
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
            "the body of this request has another form: see docs/reference/http.md"
        ) from error


def _reader_of(request: Request) -> str:
    reader: str = request.path_params["reader"]
    if len(reader) > ID_CHARS_MAX:
        raise MalformedFrameError(f"a subject's id has {ID_CHARS_MAX} characters at most")
    return reader


def _require_whole(subject: Subject) -> None:
    if subject.session:
        raise AccessError("a viewer's pass is for looking at one session")


def _owned(owner: Owner) -> Response:
    return answer(Owned(owner.tenant, owner.subject, owner.readers))


def _told(subject: Subject) -> Known:
    return Known(subject.id, subject.tenant, subject.is_operator, subject.session)


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
    """Return a value as a JSON answer that nobody stores."""
    return Response(msgspec.json.encode(value), status, headers=NO_STORE, media_type="application/json")
