"""Connections and calls of other frameworks' tools: one task for each connection, and a time limit of cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

from midstream.environment import World

GRACE_S = 1.0
"""Seconds for a cancelled tool to end; then it is abandoned."""


class HeldContext:
    """An open context. One task enters and leaves it, because MCP connections belong to the task that opened them."""

    def __init__(self, context: AbstractAsyncContextManager[Any], world: World) -> None:
        self._context = context
        self._world = world
        self._is_open = asyncio.Event()
        self._is_over = asyncio.Event()
        self._task = world.spawn(self._hold(), name="hold a connection of tools")

    @property
    def has_ended(self) -> bool:
        """Whether the context failed to open, or is closed."""
        return self._task.done()

    async def wait_until_open(self) -> None:
        """Wait until the context is open; raise the exception of a failed opening."""
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
        """Leave the context, or cancel its opening."""
        self._is_over.set()
        if not self._is_open.is_set():
            self._task.cancel()
        await asyncio.wait([self._task])  # unlike `gather`, without cancelling it together with the caller
        if not self._task.cancelled():
            self._task.exception()

    async def _hold(self) -> None:
        async with self._context:
            self._is_open.set()
            await self._is_over.wait()


async def run_bounded(running: Coroutine[Any, Any, object], world: World) -> object:
    """Await a call. After a cancellation, wait at most `GRACE_S` for a synchronous function in a thread.

    Frameworks wait for the end of such a thread, which would delay timeouts and cancellation.
    """
    task = world.spawn(running, name="run a tool")
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait([task], timeout=GRACE_S)
        raise
