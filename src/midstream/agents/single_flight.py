"""Unanswered requests to an upstream, so that closing the upstream ends them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from midstream.environment import World
from midstream.errors import ModelUnavailableError, UpstreamFailedError

T = TypeVar("T")


class SingleFlight:
    """The requests of one upstream that wait for their first answer.

    If the connection of such a request is closed, some packages wait for ever; a cancelled request ends.
    """

    def __init__(self, name: str, world: World = World()) -> None:
        self._name = name
        self._world = world
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    async def answer(
        self,
        request: Coroutine[Any, Any, T],
        release: Callable[[T], Coroutine[Any, Any, object]] | None = None,
    ) -> T:
        """Wait for an answer.

        Args:
            release: Called with an answer whose waiter was cancelled, which no other task has. Never raises.

        Raises:
            ModelUnavailableError: The upstream was closed before. Nothing was sent.
            UpstreamFailedError: The upstream was closed meanwhile; the request may have arrived.
        """
        if self._is_closed:
            request.close()
            raise ModelUnavailableError(f"{self._name} was closed")
        task = self._world.spawn(request, name=f"opening {self._name}")
        self._tasks.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if release is not None and task.done() and not task.cancelled() and task.exception() is None:
                await asyncio.shield(
                    self._world.spawn(release(task.result()), name=f"releasing {self._name}")
                )
            waiting = asyncio.current_task()
            if waiting is None or waiting.cancelling():
                raise
            raise UpstreamFailedError(f"{self._name} was closed") from None
        finally:
            self._tasks.discard(task)

    def close(self) -> None:
        """End all waiting requests, and refuse new ones. A second call has no effect."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
