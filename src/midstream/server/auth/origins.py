"""Checks of a request's origin: pages of this server, programs without an origin, named origins and hosts.

A local server is a target for every web page its user visits. A browser sends the page's origin (`Origin`), which
keeps foreign pages out; and it sends the host name of the server (`Host`), which keeps out a page whose name was
pointed at this machine after it was loaded (DNS rebinding).
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from midstream.errors import ForeignOriginError, UsageError
from midstream.server.api.problems import problem_of, refuse
from midstream.server.limits import address_of, counted_address

ANY_HOST = "*"
_HOST = re.compile(r"(?:\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[^:,\[\]]+))(?::[0-9]+)?")
_ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://(?:\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]+)?")
_USUAL_PORTS = {"http": ":80", "https": ":443"}
DELIBERATE = (
    b"authorization",
    b"x-midstream",
    b"x-api-key",
    b"x-idempotency-key",
    b"idempotency-key",
    b"x-idempotent-encryption-key",
    b"x-midstream-connection",
)
"""Headers that make a browser ask before it sends them to another site."""
_HARMLESS = frozenset({"GET", "HEAD", "OPTIONS"})
_ENCRYPTED = frozenset({"https", "wss"})
_FORWARDED = (b"x-forwarded-for", b"x-real-ip", b"forwarded")
"""Headers in which a proxy names its client. They are believed only against the client."""
_ADDRESS = re.compile(r"[0-9]+(?:\.[0-9]+){3}|[0-9A-Fa-f]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f.]*")
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


def origins_of(names: Collection[str]) -> frozenset[str]:
    """Return origins as browsers write them: in small letters, without the port that a scheme has anyway.

    Raises:
        UsageError: One is none: it has a path, or is a pattern such as `*`, which would be every page there is.
    """
    for name in names:
        if not _ORIGIN.fullmatch(name):
            raise UsageError(
                f"an origin must look like 'https://app.example' or 'http://localhost:5173'; got {name!r}"
            )
    small = (name.lower() for name in names)
    return frozenset(name.removesuffix(_USUAL_PORTS.get(_parts_of(name)[0], "")) for name in small)


def check_origin(scope: Scope, allowed: Collection[str]) -> None:
    """Let a request pass that no page of another site has made.

    Args:
        scope: The request or handshake.
        allowed: Origins (`https://app.example`) beside our own that may ask.

    Raises:
        ForeignOriginError: It comes from another site's page, or from a page without a name.
    """
    origin = _header(scope, b"origin")
    if not origin or origin in allowed:
        return
    scheme, place = _parts_of(origin)
    # Whoever stands between can make pages of plain HTTP; TLS that ends in front of us is not known here.
    is_plain = scheme == "http" and scope.get("scheme") in _ENCRYPTED
    if is_plain or not place or place != _header(scope, b"host").lower():
        raise ForeignOriginError("a page of another site may not use this server")


def page_of(scope: Scope) -> str:
    """Return the host (and port) of the page that asks: ours too, where the browser shows that without an `Origin`."""
    if origin := _header(scope, b"origin"):
        return _parts_of(origin)[1]
    return _header(scope, b"host").lower() if _header(scope, b"sec-fetch-site") == "same-origin" else ""


def check_page(scope: Scope, *, is_stream: bool) -> None:
    """Let a request pass that cannot be a trick of a foreign page with a credential that browsers add by themselves.

    What changes something, or opens a stream, has a header that no page can send elsewhere without being asked for
    first (`DELIBERATE`); a stream may come from a page of ours instead, or of an allowed origin.

    Raises:
        ForeignOriginError: It has none.
    """
    is_change = scope["type"] == "http" and scope["method"] not in _HARMLESS
    if not (is_change or is_stream) or _is_deliberate(scope) or (is_stream and page_of(scope)):
        return
    message = (
        "this needs a header that foreign pages cannot send, such as `x-midstream: 1` or `Authorization`"
    )
    raise ForeignOriginError(message)


def check_intent(scope: Scope) -> None:
    """As `check_page` for changes, at a server without authentication: for pages alone, since programs are not tricked.

    Raises:
        ForeignOriginError: A page asks for a change, by a request that a form could have sent.
    """
    if _header(scope, b"origin") or _header(scope, b"sec-fetch-site"):
        check_page(scope, is_stream=False)


def remote_address(scope: Scope) -> str:
    """Return the address of a client on another machine, as the server or a proxy on this machine names it.

    "" is a client of this machine: a loopback address, or a Unix socket without a proxy's header.
    """
    if address := address_of(scope):
        return address
    named = ",".join(_header(scope, name) for name in _FORWARDED)
    return next(filter(None, map(counted_address, _ADDRESS.findall(named))), "") if named else ""


def _parts_of(origin: str) -> tuple[str, str]:
    """Return the scheme of an origin, and its host and port; "" each where it has none. It may be anything."""
    scheme, _, place = origin.lower().partition("://")
    return scheme, place


def _is_deliberate(scope: Scope) -> bool:
    media_type = _header(scope, b"content-type").partition(";")[0].strip().lower()
    return media_type == "application/json" or any(_header(scope, name) for name in DELIBERATE)


class HostGuard:
    """Serve an app only under the names it is known by.

    Args:
        app: What to guard.
        names: Host names without port; `*` for any.
    """

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self._app = app
        self._names = names
        self._usual: list[bytes] = []
        """What the last request that was let pass had as its `Host`: most have the same."""

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Pass a request on, or refuse it."""
        if scope["type"] == "lifespan" or ANY_HOST in self._names or self._is_ours(scope):
            return self._app(scope, receive, send)
        error = ForeignOriginError("the host name of the request is not permitted at this server")
        return refuse(problem_of(error), scope, receive, send)

    def _is_ours(self, scope: Scope) -> bool:
        hosts = [value for key, value in scope["headers"] if key == b"host"]
        if hosts and hosts == self._usual:
            return True
        found = _HOST.fullmatch(_header(scope, b"host").lower())
        if found is None or (found["address"] or found["name"]) not in self._names:
            return False
        self._usual = hosts
        return True


def _header(scope: Scope, name: bytes) -> str:
    """Return a header's value; "" where it is missing. Two of them are as foreign as any other wrong value."""
    values: list[bytes] = [value for key, value in scope["headers"] if key == name]
    return b",".join(values).decode("latin-1") if values else ""
