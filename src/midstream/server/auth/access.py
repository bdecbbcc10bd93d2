"""How a server finds out who asks, as an application sets it: one value, and the ready-made ways to make it.

    asgi(agent, access=Access(bearer(verify)))

`authenticate` is asked at each request and handshake, at each resume, and again every `recheck_s` seconds while a
stream lives. It gets the request without its body (`starlette.requests.HTTPConnection`) and returns a `Principal`, or
None for a stranger.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace
from starlette.requests import HTTPConnection

from midstream.errors import UsageError
from midstream.server.auth.bearer_tokens import TOKEN_CHARS_MAX, TOKEN_CHARS_MIN, bearer_token
from midstream.server.auth.credential_sources import Authenticate, FirstOf, StillValid, settle
from midstream.server.auth.local_user import LocalUser
from midstream.server.auth.ownership import Owner
from midstream.server.auth.principals import Action, Principal
from midstream.server.auth.token_file import KnownTokens, TokenFile, digest_of_token

Verify = Callable[[str], Principal | Awaitable[Principal | None] | None]
"""Return who shows this token or cookie; None where it is not good."""
Authorize = Callable[[Principal, Action, str, Owner | None], bool | Awaitable[bool]]
"""Return whether one may do something with a session (its name in the store), which has this owner or none yet."""

RECHECK_S = 300.0
"""Seconds after which a living stream is checked again, where nothing announces a change of rights before."""


class Access(Struct, frozen=True, kw_only=True):
    """Authentication and authorization of a server.

    Args:
        authenticate: Who asks; see the text of this module.
        authorize: Decides instead of "the owner everything, its readers may look, an operator everything". Access
            across tenants is refused, whatever it returns.
        recheck_s: Seconds between two looks at whether a living stream may live.
        login: A word drawn by `World.new_id("login")` that lets an operator log in once, within an hour.
        still_valid: Decides whether a principal of your own `authenticate` may still use cookies, links, passes and
            tickets that were issued to them. Called at each use. Without it they end with `expires_at`, with a lock-out
            or a revocation, and with their own lifetime.
    """

    authenticate: Authenticate
    authorize: Authorize | None = None
    recheck_s: float = RECHECK_S
    login: str = ""
    still_valid: StillValid | None = None

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
        UsageError: A token is shorter than 16 characters; or some principals have a tenant and others have none.
    """
    if any(len(token) < TOKEN_CHARS_MIN for token in known):
        raise UsageError(f"a token has {TOKEN_CHARS_MIN} characters at least: shorter ones can be guessed")
    lines = {}
    for token, principal in known.items():
        digest = digest_of_token(token)
        source = hashlib.blake2b(f"{digest} {principal!r}".encode(), digest_size=16).hexdigest()
        lines[digest] = replace(principal, source=f"token:{source}")
    return KnownTokens(lines)


def token_file(path: Path) -> Authenticate:
    """Authenticate by a file with a line for each token, as `token_file.py` describes; read again when it has changed.

    A line that is removed ends its streams and all that was issued for it within 10 s.

    Raises:
        UsageError: It cannot be read, others than its owner may read it, or a line has another form.
    """
    return TokenFile(path)


def this_user(key: str, *, shares_port: bool = False, start: str = "") -> Authenticate:
    """Authenticate the user of this machine, the operator, by proofs under their key. See `midstream.local_keys`.

    Args:
        key: Of `read_or_make_key`.
        shares_port: Other servers of this user listen on the same port, on the same store.
        start: Name of the server's start, which its workers share; a new one where it is "".
    """
    return LocalUser(key, shares_port=shares_port, start=start)


def proxy_user(header: str, *, proxies: Collection[str] = ("127.0.0.1", "::1")) -> Authenticate:
    """Trust the header in which a proxy with a login names the user. The proxy must remove it from incoming requests.

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
    return FirstOf(ways)
