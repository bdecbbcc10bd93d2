"""Counts and time limits of connections during their TLS handshake.

The event loop's own TLS passes a connection to the server only after the handshake. A peer that never completes the
handshake would hold a descriptor and TLS buffers without being counted.
"""

from __future__ import annotations

import asyncio
import ssl
from asyncio import sslproto
from collections.abc import Callable
from typing import Any, cast

from midstream.server.raw_connections import RawConnections

HANDSHAKE_S = 10
"""Time limit of a handshake in seconds."""


class CountedTls(sslproto.SSLProtocol):
    """TLS of one connection, counted from its accept. A connection beyond the limit is closed without an answer.

    Args:
        next_protocol: The protocol for the decrypted bytes. It counts the connection after the handshake.
        context: The certificate of the server.
        raw: The connections of the server.
    """

    def __init__(self, next_protocol: asyncio.Protocol, context: ssl.SSLContext, raw: RawConnections) -> None:
        self._raw = raw
        self._counted: asyncio.BaseTransport | None = None
        super().__init__(
            asyncio.get_running_loop(),
            _Handover(next_protocol, self.leave),
            context,
            None,  # type: ignore[arg-type]  # no task waits for the handshake
            server_side=True,
            ssl_handshake_timeout=HANDSHAKE_S,
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection, and begin the handshake."""
        peer = transport.get_extra_info("peername")
        if self._raw.enter(transport, peer[0] if isinstance(peer, tuple) else ""):
            self._counted = transport
            super().connection_made(transport)
        else:
            cast("asyncio.Transport", transport).abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Stop counting the connection."""
        self.leave()
        super().connection_lost(exc)

    def leave(self) -> None:
        """Stop counting the handshake. Idempotent."""
        counted, self._counted = self._counted, None
        if counted is not None:
            self._raw.leave(counted)


class _Handover(asyncio.Protocol):
    """Passes the connection to the next protocol after the handshake."""

    def __init__(self, next_protocol: asyncio.Protocol, leave: Callable[[], None]) -> None:
        self._next = next_protocol
        self._leave = leave

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._leave()
        cast("asyncio.Transport", transport).set_protocol(self._next)
        self._next.connection_made(transport)


def after_handshake(
    http: Callable[..., asyncio.Protocol], context: ssl.SSLContext, raw: RawConnections
) -> type[asyncio.Protocol]:
    """Return a factory of protocols with TLS, typed as the class that uvicorn expects."""

    def accept(*args: Any, **kwargs: Any) -> CountedTls:  # noqa: ANN401 - handed on
        return CountedTls(http(*args, **kwargs), context, raw)

    return cast("type[asyncio.Protocol]", accept)
