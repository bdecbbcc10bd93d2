"""CORS: pages of allowed origins may read answers of this server, including errors.

A browser withholds an answer from a page of another origin unless the answer allows that origin. Before a request that
a form cannot send, it sends a preflight request. Cookies are never allowed across origins: such a page sends a token or
a ticket. Requests of other origins are refused in `origins.py`, not here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
REQUEST_HEADERS = (
    "a2a-extensions",
    "a2a-version",
    "authorization",
    "content-type",
    "idempotency-key",
    "if-none-match",
    "last-event-id",
    "mcp-method",
    "mcp-name",
    "mcp-protocol-version",
    "mcp-session-id",
    "producer-epoch",
    "producer-id",
    "producer-seq",
    "stream-closed",
    "stream-expires-at",
    "stream-fork-offset",
    "stream-fork-sub-offset",
    "stream-forked-from",
    "stream-seq",
    "stream-ttl",
    "x-idempotency-cancel-after",
    "x-idempotency-connection",
    "x-idempotency-event-id",
    "x-idempotency-key",
    "x-idempotency-next-seqno",
    "x-idempotent-encryption-key",
    "x-idempotent-encryption-key-old",
    "x-midstream",
    "x-midstream-connection",
)
ANSWER_HEADERS = (
    "allow",
    "etag",
    "location",
    "mcp-session-id",
    "producer-epoch",
    "producer-expected-seq",
    "producer-received-seq",
    "producer-seq",
    "retry-after",
    "stream-closed",
    "stream-cursor",
    "stream-expires-at",
    "stream-next-offset",
    "stream-sse-data-encoding",
    "stream-ttl",
    "stream-up-to-date",
    "www-authenticate",
    "x-midstream-replayed",
    "x-workflow-run-id",
    "x-workflow-stream-tail-index",
)
"""Headers that a page may read in addition to those that CORS always permits."""
PREFLIGHT_S = 600
"""Seconds for which a browser caches the answer to a preflight."""

_PREFLIGHT = [
    (b"access-control-allow-methods", ", ".join(METHODS).encode()),
    (b"access-control-allow-headers", ", ".join(REQUEST_HEADERS).encode()),
    (b"access-control-max-age", str(PREFLIGHT_S).encode()),
]
_EXPOSED = (b"access-control-expose-headers", ", ".join(ANSWER_HEADERS).encode())
_VARY = (b"vary", b"Origin")


class Cors:
    """Adds CORS headers to the answers of an app.

    Args:
        app: The app, which also answers errors.
        origins: Allowed origins, such as `https://app.example`, from `origins_of`. If empty, no header is added.
    """

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        self._app = app
        self._origins = frozenset(origin.encode("latin-1") for origin in origins)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serve a request. CORS does not apply to WebSockets."""
        applies = scope["type"] == "http" and bool(self._origins)
        return (self._answer if applies else self._app)(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        cors_headers = self._headers_for(scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *cors_headers]}
            await send(message)

        await self._app(scope, receive, send_with_headers)

    def is_preflight(self, scope: Scope) -> bool:
        """Return whether a request is a preflight for a page of an allowed origin."""
        if scope["type"] != "http" or scope["method"] != "OPTIONS":
            return False
        names = {name for name, _ in scope["headers"]}
        return b"access-control-request-method" in names and bool(self._origins & _origins_in(scope))

    async def allow(self, send: Send) -> None:
        """Answer a preflight with all permitted methods and headers."""
        headers = [*_PREFLIGHT, (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 204, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    def _headers_for(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        # The headers differ by origin: `Vary` informs caches in between.
        named = [(b"access-control-allow-origin", origin) for origin in self._origins & _origins_in(scope)]
        return [*named, _EXPOSED, _VARY] if len(named) == 1 else [_VARY]


def _origins_in(scope: Scope) -> set[bytes]:
    return {value for name, value in scope["headers"] if name == b"origin"}
