"""Filter of uvicorn's log lines, so that peers cannot flood the log."""

from __future__ import annotations

import asyncio
import logging

from midstream.environment import World
from midstream.server.api.http_endpoints import StreamCutError

PEER_LINES_MAX = 10
"""Lines about malformed requests in one period; otherwise peers could fill the disk."""
PERIOD_S = 60.0

_BY_PEERS = ("Invalid HTTP request", "Invalid UTF-8", "Unsupported upgrade request")
_NEVER = (
    # Contains the whole URL with its query.
    '%s - "WebSocket %s"',
    # Logged for each handshake that is refused with an HTTP response, which the ASGI specification permits.
    "ASGI callable returned without completing handshake.",
)


class PeerNoise(logging.Filter):
    """Drops contents of users, tracebacks of cancelled requests, and most lines about malformed requests."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self._began_at = world.monotonic()
        self._lines = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a line is written; remove the traceback of a line about a malformed request."""
        if record.levelno < logging.INFO or str(record.msg).startswith(_NEVER):
            return False  # below INFO uvicorn logs whole frames
        if record.exc_info and isinstance(record.exc_info[1], StreamCutError | asyncio.CancelledError):
            return False  # requests are cancelled when the server ends
        if not record.getMessage().startswith(_BY_PEERS):
            return True
        record.exc_info = None
        now = self._world.monotonic()
        if now >= self._began_at + PERIOD_S:
            self._began_at, self._lines = now, 0
        self._lines += 1
        return self._lines <= PEER_LINES_MAX
