"""Filter of uvicorn's log lines: peers cannot write there at will."""

from __future__ import annotations

import asyncio
import logging

from midstream.environment import World
from midstream.server.api.http_endpoints import StreamCutError

PEER_LINES_MAX = 10
"""Lines about broken requests of peers in one period; they could fill the disk otherwise."""
PERIOD_S = 60.0

_BY_PEERS = ("Invalid HTTP request", "Invalid UTF-8", "Unsupported upgrade request")
_NEVER = (
    # With the whole address, and what stands after its question mark.
    '%s - "WebSocket %s"',
    # uvicorn logs this for each handshake that was refused with a whole answer, as the standard has it.
    "ASGI callable returned without completing handshake.",
)


class PeerNoise(logging.Filter):
    """Drop what people wrote, the traceback of what was cut, and most of what malformed requests cause."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self._began_at = world.monotonic()
        self._lines = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a line is written; a peer's line loses its traceback."""
        if record.levelno < logging.INFO or str(record.msg).startswith(_NEVER):
            return False  # below INFO it writes whole frames
        if record.exc_info and isinstance(record.exc_info[1], StreamCutError | asyncio.CancelledError):
            return False  # who is cancelled was cut at the end of the server
        if not record.getMessage().startswith(_BY_PEERS):
            return True
        record.exc_info = None
        now = self._world.monotonic()
        if now >= self._began_at + PERIOD_S:
            self._began_at, self._lines = now, 0
        self._lines += 1
        return self._lines <= PEER_LINES_MAX
