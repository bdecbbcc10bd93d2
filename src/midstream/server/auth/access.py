"""How a server finds out who asks, as an application sets it: one value, and the ready-made ways to make it.

    asgi(agent, access=Access(bearer(verify)))

`authenticate` is asked at each request and handshake, at each resume, and again every `recheck_s` seconds while a
stream lives. It gets the request without its body (`starlette.requests.HTTPConnection`) and returns a `Principal`, or
None for a stranger.
"""

from __future__ import annotations

import hashlib
import hmac
import inspect
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import TypeVar

from msgspec import Struct
from starlette.requests import HTTPConnection

from midstream.errors import UsageError
from midstream.local_keys import token_for
from midstream.server.auth.ownership import Owner
from midstream.server.auth.principals import OPERATOR, Action, Principal

T = TypeVar("T")
Authenticate = Callable[[HTTPConnection], Principal | Awaitable[Principal | None] | None]
"""Return who makes this request; None for a stranger."""
Verify = Callable[[str], Principal | Awaitable[Principal | None] | None]
"""Return who shows this token or cookie; None where it is not good."""
Authorize = Callable[[Principal, Action, str, Owner | None], bool | Awaitable[bool]]
"""Return whether one may do something with a session (its name in the store), which has this owner or none yet."""

RECHECK_S = 300.0
"""Seconds after which a living stream is asked again whether it may live."""
TOKEN_CHARS_MAX = 8192
TOKEN_CHARS_MIN = 16
"""Shortest token taken from a file: what is shorter can be guessed."""


class Access(Struct, frozen=True, kw_only=True):
    """Authentication and authorization of a server.

    Args:
        authenticate: Who asks; see the text of this module.
        authorize: Decides instead of "the owner everything, its readers may look, an operator everything". Access
            across tenants is refused, whatever it returns.
        recheck_s: Seconds between two looks at whether a living stream may live.
        login: A word drawn by `World.new_id("login")` that lets an operator log in once, within an hour.
    """

    authenticate: Authenticate
    authorize: Authorize | None = None
    recheck_s: float = RECHECK_S
    login: str = ""

    def __repr__(self) -> str:
        return "Access(...)"


def bearer(verify: Verify) -> Authenticate:
    """Ask `verify` for the token of the header `Authorization: Bearer …`."""

    async def authenticate(connection: HTTPConnection) -> Principal | None:
        token = bearer_token(connection)
        return await settle(verify(token)) if token else None

    return authenticate


def cookie(name: str, verify: Verify) -> Authenticate:
    """Ask `verify` for the value of a cookie, which an application in front of this one has set.

    Set it `HttpOnly`, `Secure` and `SameSite=Strict`, under a name that begins with `__Host-`. What changes something
    then also needs a header that no foreign page can send, such as `x-midstream`.
    """

    async def authenticate(connection: HTTPConnection) -> Principal | None:
        value = connection.cookies.get(name, "")
        return await settle(verify(value)) if 0 < len(value) <= TOKEN_CHARS_MAX else None

    return authenticate


def tokens(known: Mapping[str, Principal]) -> Authenticate:
    """Authenticate each principal by its own bearer token. Kept are digests of the tokens.

    Raises:
        UsageError: A token is shorter than 16 characters.
    """
    if any(len(token) < TOKEN_CHARS_MIN for token in known):
        raise UsageError(f"a token has {TOKEN_CHARS_MIN} characters at least: shorter ones can be guessed")
    principals = {_digest_of(token): principal for token, principal in known.items()}
    return bearer(lambda token: principals.get(_digest_of(token)))


def token_file(path: Path) -> Authenticate:
    """Authenticate by a file with a line `TOKEN SUBJECT [TENANT]` for each principal; read again when it has changed.

    `*` instead of a tenant is an operator. Lines that begin with `#` are skipped. A line that is taken out ends its
    streams within `recheck_s`.

    Raises:
        UsageError: It cannot be read, others than its owner may read it, or a line has another form.
    """
    read_at: tuple[int, int] = _stamp_of(path)
    known = tokens(_tokens_in(path))

    async def authenticate(connection: HTTPConnection) -> Principal | None:
        nonlocal read_at, known
        stamp = _stamp_of(path)
        if stamp != read_at:
            known, read_at = tokens(_tokens_in(path)), stamp
        return await settle(known(connection))

    return authenticate


def this_user(key: str) -> Authenticate:
    """Authenticate the user of this machine, the operator, by a token derived from their key. See
    `midstream.local_keys`.
    """

    def authenticate(connection: HTTPConnection) -> Principal | None:
        server = connection.scope.get("server")
        expected = token_for(key, server[1] if server else 0)
        is_theirs = hmac.compare_digest(expected.encode(), bearer_token(connection).encode())
        return OPERATOR if is_theirs else None

    return authenticate


def proxy_user(header: str, *, proxies: Collection[str] = ("127.0.0.1", "::1")) -> Authenticate:
    """Believe a proxy with a login of its own, which names the user in a header (and removes it from what comes in).

    Args:
        header: Such as `x-forwarded-user`.
        proxies: Addresses whose word is taken. On a machine that others use too, one of them is not enough: let the
            proxy show a token.
    """
    trusted = frozenset(proxies)

    def authenticate(connection: HTTPConnection) -> Principal | None:
        values = connection.headers.getlist(header)
        is_from_proxy = connection.client is not None and connection.client.host in trusted
        return Principal(values[0]) if is_from_proxy and len(values) == 1 and values[0] else None

    return authenticate


def first_of(*ways: Authenticate) -> Authenticate:
    """Try one after the other, until one authenticates the caller."""

    async def authenticate(connection: HTTPConnection) -> Principal | None:
        for way in ways:
            principal = await settle(way(connection))
            if principal is not None:
                return principal
        return None

    return authenticate


def bearer_token(connection: HTTPConnection) -> str:
    """Return the bearer token of a request, "" where it has none or several."""
    values = connection.headers.getlist("authorization")
    scheme, _, token = values[0].partition(" ") if len(values) == 1 else ("", "", "")
    token = token.strip()
    return token if scheme.lower() == "bearer" and len(token) <= TOKEN_CHARS_MAX else ""


async def settle(value: T | Awaitable[T]) -> T:
    """Return what a function of the application returned, which may be a coroutine."""
    return await value if inspect.isawaitable(value) else value


def _tokens_in(path: Path) -> dict[str, Principal]:
    known: dict[str, Principal] = {}
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) not in (2, 3) or len(words[0]) < TOKEN_CHARS_MIN:
            raise UsageError(
                f"line {number} of {path} is not TOKEN SUBJECT [TENANT], with a token of {TOKEN_CHARS_MIN} characters"
            )
        is_operator = words[2:] == ["*"]
        tenant = "" if is_operator else "".join(words[2:])
        known[words[0]] = Principal(words[1], tenant=tenant, is_operator=is_operator)
    return known


def _stamp_of(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError as error:
        raise UsageError(f"the tokens in {path} cannot be read: {error.strerror}") from error
    if found.st_mode & 0o077:
        raise UsageError(
            f"the tokens in {path} are readable by other users; restrict the file with chmod 600"
        )
    return found.st_mtime_ns, found.st_size


def _digest_of(token: str) -> bytes:
    # Looked up by digest, so that its duration does not reveal how much was right.
    return hashlib.blake2b(token.encode("utf-8", "surrogatepass"), digest_size=32).digest()
