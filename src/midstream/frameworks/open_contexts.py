"""Connections and calls of foreign tools: one task per connection, and a limit to what a cancelled call waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

from midstream.environment import World

GRACE_S = 1.0
"""Seconds that a cancelled tool has to end; then it is abandoned."""


class HeldContext:
    """A context that is open. One task enters and leaves it: connections of MCP belong to the task that made them."""

    def __init__(self, context: AbstractAsyncContextManager[Any], world: World) -> None:
        self._context = context
        self._world = world
        self._is_open = asyncio.Event()
        self._is_over = asyncio.Event()
        self._task = world.spawn(self._hold(), name="hold a connection of tools")

    @property
    def has_ended(self) -> bool:
        """Whether the context could not be opened, or is closed."""
        return self._task.done()

    async def wait_until_open(self) -> None:
        """Wait until the context is open, or raise what its opening raised."""
        opening = self._world.spawn(self._is_open.wait(), name="await a connection of tools")
        try:
            await asyncio.wait([opening, self._task], return_when=asyncio.FIRST_COMPLETED)
        finally:
            opening.cancel()
        if self._task.cancelled():
            raise ConnectionError("the connection was closed while it was being opened")
        if self._task.done():
            self._task.result()

    async def close(self) -> None:
        """Leave the context, or give its opening up."""
        self._is_over.set()
        if not self._is_open.is_set():
            self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _hold(self) -> None:
        async with self._context:
            self._is_open.set()
            await self._is_over.wait()


async def run_bounded(running: Coroutine[Any, Any, object], world: World) -> object:
    """Await a call; where that is cancelled, wait `GRACE_S` at most for a plain function that runs in a thread.

    Frameworks wait for such a thread to its end: a timeout or a stop of the turn would have no effect until then.
    """
    task = world.spawn(running, name="run a tool")
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait([task], timeout=GRACE_S)
        raise
