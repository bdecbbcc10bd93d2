"""Sending of frames to a client: one write at a time, with a time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from midstream.environment import World

SEND_S = 30.0
"""Seconds for a client to take one write; then it counts as disconnected."""


class FrameSink(Protocol):
    """The sending side of a transport."""

    def send(self, frames: Sequence[bytes]) -> Awaitable[None]:
        """Send frames in order; raise `OSError` if the client has disconnected."""


class FrameSending:
    """Sends the queued frames of one connection.

    Args:
        queued: Removes the queued frames and returns them.
    """

    def __init__(self, transport: FrameSink, queued: Callable[[], Sequence[bytes]], world: World) -> None:
        self.is_gone = False
        """Whether the client has disconnected or stopped reading; no last frame is sent."""
        self._transport = transport
        self._queued = queued
        self._world = world
        self._since: float | None = None
        self._sent: asyncio.Future[None] | None = None
        """Completed at the end of the current write, for other callers of `flush`."""

    @property
    def is_sending(self) -> bool:
        """Whether a write is in progress."""
        return self._since is not None

    @property
    def late_at(self) -> float:
        """Time at which the client counts as disconnected if the current write is still in progress."""
        assert self._since is not None
        return self._since + SEND_S

    async def flush(self) -> None:
        """Send the queued frames; return when the client has taken them, or has disconnected."""
        while self._since is not None:
            self._sent = self._sent or asyncio.get_running_loop().create_future()
            await asyncio.shield(self._sent)
        try:
            while frames := self._queued():
                self._since = self._world.monotonic()
                await self._transport.send(frames)
        except OSError:
            self.is_gone = True
        finally:
            self._since = None
            if self._sent is not None:
                self._sent.set_result(None)
                self._sent = None
