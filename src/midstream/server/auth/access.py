"""Configuration of authentication and authorization: one value, and ready-made authenticators.

    asgi(agent, access=Access(bearer(verify)))

`authenticate` is called for each request and handshake, for each resume, and every `recheck_s` seconds while a stream
is open. It receives the request without its body (`starlette.requests.HTTPConnection`), and returns a `Principal`, or
None if it does not recognize the caller.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace
from starlette.requests import HTTPConnection

from midstream.errors import UsageError
from midstream.number_checks import require_seconds
from midstream.server.auth.bearer_tokens import TOKEN_CHARS_MAX, TOKEN_CHARS_MIN, bearer_token
from midstream.server.auth.credential_sources import Authenticate, FirstOf, StillValid, settle
from midstream.server.auth.local_user import LocalUser
from midstream.server.auth.ownership import Owner
from midstream.server.auth.principals import Action, Principal
from midstream.server.auth.token_file import KnownTokens, TokenFile, digest_of_token

Verify = Callable[[str], Principal | Awaitable[Principal | None] | None]
"""Returns the principal of a token or cookie value, or None if it is invalid."""
Authorize = Callable[[Principal, Action, str, Owner | None], bool | Awaitable[bool]]
"""Returns whether a principal may do an action on a session (its name in the store) with this owner, if any."""

RECHECK_S = 300.0
"""Seconds after which an open stream is checked again, unless a change of rights is announced earlier."""


class Access(Struct, frozen=True, kw_only=True):
    """Authentication and authorization of a server.

    Args:
        authenticate: Returns the principal of a request; see the module's docstring.
        authorize: Replaces the default rule: owner and operators have all rights, readers may read. Access across
            tenants is always refused.
        recheck_s: Seconds between two checks of an open stream.
        login: A one-time login code of an operator, from `World.new_id("login")`, valid for one hour.
        still_valid: Decides at each use whether a principal of your own `authenticate` may still use issued cookies,
            links, viewer tokens and tickets. Without it they end with `expires_at`, a lock-out, a revocation, or their
            own lifetime.

    Raises:
        UsageError: `recheck_s` is not above 0, or longer than 366 days.
    """

    authenticate: Authenticate
    authorize: Authorize | None = None
    recheck_s: float = RECHECK_S
    login: str = ""
    still_valid: StillValid | None = None

    def __post_init__(self) -> None:
        require_seconds("recheck_s", self.recheck_s, is_positive=True)

    def __repr__(self) -> str:
        return "Access(...)"


def bearer(verify: Verify) -> Authenticate:
    """Authenticate by the header `Authorization: Bearer …`: `verify` returns the principal of a token."""

    async def authenticate(connection: HTTPConnection) -> Principal | None:
        token = bearer_token(connection)
        return await settle(verify(token)) if token else None

    return authenticate


def cookie(name: str, verify: Verify) -> Authenticate:
    """Authenticate by a cookie that your application has set: `verify` returns the principal of its value.

    Set it `HttpOnly`, `Secure` and `SameSite=Strict`, under a name that begins with `__Host-`. Requests with effects
    then also need a header that no foreign page can send, such as `x-midstream`.
    """

    async def authenticate(connection: HTTPConnection) -> Principal | None:
        value = connection.cookies.get(name, "")
        return await settle(verify(value)) if 0 < len(value) <= TOKEN_CHARS_MAX else None

    return authenticate


def tokens(known: Mapping[str, Principal]) -> Authenticate:
    """Authenticate each principal by its own bearer token. Only digests of the tokens are kept in memory.

    Raises:
        UsageError: A token has fewer than 16 characters; or some principals have a tenant and others do not.
    """
    if any(len(token) < TOKEN_CHARS_MIN for token in known):
        raise UsageError(f"a token needs at least {TOKEN_CHARS_MIN} characters: a shorter one can be guessed")
    lines = {}
    for token, principal in known.items():
        digest = digest_of_token(token)
        source = hashlib.blake2b(f"{digest} {principal!r}".encode(), digest_size=16).hexdigest()
        lines[digest] = replace(principal, source=f"token:{source}")
    return KnownTokens(lines)


def token_file(path: Path) -> Authenticate:
    """Authenticate by a token file, as `token_file.py` describes; it is read again after a change.

    Removing a line ends its streams, and the credentials that were issued for it, within 10 s.

    Raises:
        UsageError: The file cannot be read, other users may read it, or a line is invalid.
    """
    return TokenFile(path)


def this_user(key: str, *, shares_port: bool = False, start: str = "") -> Authenticate:
    """Authenticate the user of this machine as the operator, by proofs with their key (SEC-10).

    Args:
        key: The key of `read_or_make_key`.
        shares_port: Other servers of this user share the port and the store.
        start: Id of the server's start, which its workers share; "" for a new one.
    """
    return LocalUser(key, shares_port=shares_port, start=start)


def proxy_user(header: str, *, proxies: Collection[str] = ("127.0.0.1", "::1")) -> Authenticate:
    """Trust the header in which a proxy with a login names the user. The proxy must remove it from incoming requests.

    Args:
        header: Name of the header, such as `x-forwarded-user`.
        proxies: Addresses of trusted proxies. On a shared machine, an address is not enough: use a token for the proxy.
    """
    trusted = frozenset(proxies)

    def authenticate(connection: HTTPConnection) -> Principal | None:
        values = connection.headers.getlist(header)
        is_from_proxy = connection.client is not None and connection.client.host in trusted
        return Principal(values[0]) if is_from_proxy and len(values) == 1 and values[0] else None

    return authenticate


def first_of(*ways: Authenticate) -> Authenticate:
    """Authenticate by the first of several authenticators that accepts the caller."""
    return FirstOf(ways)
