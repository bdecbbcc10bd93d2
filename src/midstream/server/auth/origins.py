"""Checks of a request's origin and host name.

Any web page can send requests to a local server. Two headers of browsers protect it: `Origin` is the page's origin, and
identifies pages of other sites. `Host` is the host name of the server, and identifies a page whose host name was later
resolved to this machine (DNS rebinding).
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
"""Headers for which a browser sends a preflight before a request to another site."""
_HARMLESS = frozenset({"GET", "HEAD", "OPTIONS"})
_ENCRYPTED = frozenset({"https", "wss"})
_FORWARDED = (b"x-forwarded-for", b"x-real-ip", b"forwarded")
"""Headers with a proxy's client. They can only reduce the rights of a request: from local to remote."""
_ADDRESS = re.compile(r"[0-9]+(?:\.[0-9]+){3}|[0-9A-Fa-f]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f.]*")
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


def require_origins(names: Collection[str]) -> None:
    """Require that each name is an origin.

    Raises:
        UsageError: An entry is not an origin: it has a path, or is a pattern such as `*`.
    """
    for name in names:
        if not _ORIGIN.fullmatch(name):
            raise UsageError(
                f"an origin must look like 'https://app.example' or 'http://localhost:5173'; got {name!r}"
            )


def origins_of(names: Collection[str]) -> frozenset[str]:
    """Normalize origins like browsers: lower case, without the default port.

    Raises:
        UsageError: An entry is not an origin.
    """
    require_origins(names)
    small = (name.lower() for name in names)
    return frozenset(name.removesuffix(_USUAL_PORTS.get(_parts_of(name)[0], "")) for name in small)


def check_origin(scope: Scope, allowed: Collection[str]) -> None:
    """Refuse requests of pages of other sites.

    Args:
        scope: The request or handshake.
        allowed: Further allowed origins, such as `https://app.example`.

    Raises:
        ForeignOriginError: The request comes from a page of another site, or of an opaque origin.
    """
    origin = _header(scope, b"origin")
    if not origin or origin in allowed:
        return
    scheme, place = _parts_of(origin)
    # An attacker on the network can forge pages of plain HTTP. TLS of a proxy in front is not known here.
    is_plain = scheme == "http" and scope.get("scheme") in _ENCRYPTED
    if is_plain or not place or place != _header(scope, b"host").lower():
        raise ForeignOriginError("a page of another site may not use this server")


def page_of(scope: Scope) -> str:
    """Return the host (and port) of the requesting page, also of a same-origin request without an `Origin`."""
    if origin := _header(scope, b"origin"):
        return _parts_of(origin)[1]
    return _header(scope, b"host").lower() if _header(scope, b"sec-fetch-site") == "same-origin" else ""


def check_page(scope: Scope, *, is_stream: bool) -> None:
    """Refuse possible cross-site request forgery: a request of a foreign page with a cookie that the browser adds.

    A request with effects, or for a stream, needs a header of `DELIBERATE`, which needs a preflight on other sites. A
    stream may come from a page of this server, or of an allowed origin, instead.

    Raises:
        ForeignOriginError: The header is missing.
    """
    is_change = scope["type"] == "http" and scope["method"] not in _HARMLESS
    if not (is_change or is_stream) or _is_deliberate(scope) or (is_stream and page_of(scope)):
        return
    message = "this request needs a header that foreign pages cannot send, such as `x-midstream: 1` or `Authorization`"
    raise ForeignOriginError(message)


def check_intent(scope: Scope) -> None:
    """Refuse possible cross-site request forgery at a server without authentication; programs are not checked.

    Raises:
        ForeignOriginError: A page requests a change, and a form could have sent the request.
    """
    if _header(scope, b"origin") or _header(scope, b"sec-fetch-site"):
        check_page(scope, is_stream=False)


def remote_address(scope: Scope) -> str:
    """Return the address of a client on another machine, from the socket or the header of a local proxy.

    "" means a client of this machine: a loopback address, or a Unix socket without a proxy's header.
    """
    if address := address_of(scope):
        return address
    named = ",".join(_header(scope, name) for name in _FORWARDED)
    return next(filter(None, map(counted_address, _ADDRESS.findall(named))), "") if named else ""


def _parts_of(origin: str) -> tuple[str, str]:
    """Split any text as an origin into scheme, and host with port; each "" if missing."""
    scheme, _, place = origin.lower().partition("://")
    return scheme, place


def _is_deliberate(scope: Scope) -> bool:
    media_type = _header(scope, b"content-type").partition(";")[0].strip().lower()
    return media_type == "application/json" or any(_header(scope, name) for name in DELIBERATE)


class HostGuard:
    """Serves an app only under permitted host names.

    Args:
        app: The app.
        names: Permitted host names without port; `*` for any.
    """

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self._app = app
        self._names = names
        self._usual: list[bytes] = []
        """`Host` of the last accepted request, as a cache: most requests have the same."""

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
    """Return the value of a header; "" if it is missing. Several are joined, and match no valid value."""
    values: list[bytes] = [value for key, value in scope["headers"] if key == name]
    return b",".join(values).decode("latin-1") if values else ""
