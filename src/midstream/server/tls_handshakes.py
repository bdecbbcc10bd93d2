"""Connections from their accept to the end of their TLS handshake: counted, and bounded in time.

The event loop's own TLS shows a connection to a server only after the handshake. Peers that send nothing would be
neither counted nor refused until then, and each costs a descriptor and the buffers of TLS.
"""

from __future__ import annotations

import asyncio
import ssl
from asyncio import sslproto
from collections.abc import Callable
from typing import Any, cast

from midstream.server.raw_connections import RawConnections

HANDSHAKE_S = 10
"""Seconds for a handshake."""


class CountedTls(sslproto.SSLProtocol):
    """TLS of one connection, which is counted from its accept on; one that is too many is closed without an answer.

    Args:
        next_protocol: The protocol that reads what is decrypted. It counts the connection from the handshake on.
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
        """Count the connection no longer."""
        self.leave()
        super().connection_lost(exc)

    def leave(self) -> None:
        """Count the handshake no longer. Calling it again is harmless."""
        counted, self._counted = self._counted, None
        if counted is not None:
            self._raw.leave(counted)


class _Handover(asyncio.Protocol):
    """Gives the connection to the next protocol when its handshake is over."""

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
    """Return a protocol for uvicorn, which takes classes and only calls them: TLS first, then HTTP."""

    def accept(*args: Any, **kwargs: Any) -> CountedTls:  # noqa: ANN401 - handed on
        return CountedTls(http(*args, **kwargs), context, raw)

    return cast("type[asyncio.Protocol]", accept)
