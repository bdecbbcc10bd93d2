"""Heartbeats of a node whose event loop is late, from a thread.

A node with a tool that blocks the event loop for a minute is not frozen, and must keep its sessions. While the loop
beats, the thread only reads a clock. When the loop is late, the thread beats on a connection of its own. If the
interpreter or the process is blocked, the thread is blocked, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable

from midstream.environment import World
from midstream.errors import MidstreamError
from midstream.extras import extra
from midstream.store.postgres.postgres_connections import Postgres
from midstream.store.postgres.postgres_errors import FAILURES

with extra("postgres"):
    import asyncpg

LATE_BEATS = 2
"""Beats that the event loop may miss before the thread beats instead."""

_log = logging.getLogger(__name__)


class HeartbeatThread:
    """Beats instead of a late event loop, from `start` to `close`.

    Args:
        beat_s: Seconds between two beats.
        beaten_at: Returns the time of the event loop's last beat, on the monotonic clock.
        beat: Beats on a connection.
    """

    def __init__(
        self,
        postgres: Postgres,
        world: World,
        *,
        beat_s: float,
        beaten_at: Callable[[], float],
        beat: Callable[[asyncpg.Connection], Awaitable[object]],
    ) -> None:
        self._postgres = postgres
        self._world = world
        self._beat_s = beat_s
        self._beaten_at = beaten_at
        self._beat = beat
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="midstream-late-beats", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    async def close(self) -> None:
        """End the thread."""
        self._is_over.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    def _work(self) -> None:
        while not self._is_over.wait(self._beat_s):
            if self._is_late():
                try:
                    asyncio.run(self._beat_until_in_time())
                except Exception:  # noqa: BLE001 - such as no file left for a loop; the next beat tries again
                    _log.exception("late heartbeats were not sent")

    def _is_late(self) -> bool:
        return self._world.monotonic() - self._beaten_at() > LATE_BEATS * self._beat_s

    async def _beat_until_in_time(self) -> None:
        try:
            connection = await self._postgres.connect("late beat")
        except MidstreamError:
            return  # the server cannot be reached, and the loop may be waiting for it, too
        _log.warning("the event loop is late: a thread sends the heartbeats")
        try:
            while self._is_late() and not self._is_over.is_set():
                await self._beat(connection)
                await asyncio.to_thread(self._is_over.wait, self._beat_s)
        except FAILURES as error:
            _log.debug("a late beat failed: %s", error)
        finally:
            with contextlib.suppress(*FAILURES):
                await connection.close(timeout=1.0)
