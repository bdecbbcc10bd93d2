"""A lock for each key: first come, first served, with a limit of time."""

from __future__ import annotations

import asyncio
from collections import deque

from midstream.environment import World


class KeyLocks:
    """Locks that exist while they are held or awaited.

    Args:
        wait_s: Seconds after which a waiter gives up.
    """

    def __init__(self, world: World, *, wait_s: float) -> None:
        self._world = world
        self._wait_s = wait_s
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Waiting callers, for each key that is held."""

    def is_held(self, key: str) -> bool:
        """Whether a caller of `enter` would have to wait now."""
        return key in self._waiting

    async def enter(self, key: str) -> bool:
        """Acquire a key and return whether it was acquired in time. If so, the caller must call `leave`."""
        queue = self._waiting.get(key)
        if queue is None:
            self._waiting[key] = deque()
            return True
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(turn)
        patience = self._world.spawn(self._world.sleep(self._wait_s), name="wait for a key")
        try:
            await asyncio.wait({turn, patience}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if turn.done():
                self.leave(key)
            turn.cancel()
            raise
        finally:
            patience.cancel()
        is_ours = turn.done()
        turn.cancel()
        return is_ours

    def leave(self, key: str) -> None:
        """Pass a key to the caller that has waited longest."""
        queue = self._waiting[key]
        while queue:
            turn = queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        del self._waiting[key]
