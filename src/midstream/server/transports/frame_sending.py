"""Frames of one connection on their way to its client: one write at a time, and how long it has lasted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from midstream.environment import World

SEND_S = 30.0
"""Seconds a client may leave one write unread before it counts as gone."""


class FrameSink(Protocol):
    """The sending side of a transport."""

    def send(self, frames: Sequence[bytes]) -> Awaitable[None]:
        """Send frames in order; raises `OSError` where the client is gone."""


class FrameSending:
    """Sends the frames that are queued for a client.

    Args:
        queued: Returns the frames that are queued, once.
    """

    def __init__(self, transport: FrameSink, queued: Callable[[], Sequence[bytes]], world: World) -> None:
        self.is_gone = False
        """Whether the client has gone or stopped reading: it gets no last frame."""
        self._transport = transport
        self._queued = queued
        self._world = world
        self._since: float | None = None
        self._sent: asyncio.Future[None] | None = None
        """Done with the current write, for others that have frames meanwhile."""

    @property
    def is_sending(self) -> bool:
        """Whether the client has not taken a write yet."""
        return self._since is not None

    @property
    def late_at(self) -> float:
        """When the client counts as gone, if it has not taken the current write."""
        assert self._since is not None
        return self._since + SEND_S

    async def flush(self) -> None:
        """Send what is queued; return when the client has taken it, or is gone."""
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
