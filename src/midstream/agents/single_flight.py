"""Requests on their way to an upstream and not yet answered, so that closing the upstream ends them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from midstream.environment import World
from midstream.errors import ModelUnavailableError, UpstreamFailedError

T = TypeVar("T")


class SingleFlight:
    """The requests of one upstream that wait for their first answer.

    Closing connections below such a request leaves some packages waiting for ever; a cancelled one ends.
    """

    def __init__(self, name: str, world: World = World()) -> None:
        self._name = name
        self._world = world
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    async def answer(
        self,
        request: Coroutine[Any, Any, T],
        let_go: Callable[[T], Coroutine[Any, Any, object]] | None = None,
    ) -> T:
        """Wait for an answer.

        Args:
            let_go: Called with an answer that came although its waiter was cancelled: no other task has it.
                Never raises.

        Raises:
            ModelUnavailableError: The upstream was closed before. Nothing was asked.
            UpstreamFailedError: It was closed meanwhile; whether the request arrived is unknown.
        """
        if self._is_closed:
            request.close()
            raise ModelUnavailableError(f"{self._name} was closed")
        task = self._world.spawn(request, name=f"opening {self._name}")
        self._tasks.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if let_go is not None and task.done() and not task.cancelled() and task.exception() is None:
                await asyncio.shield(self._world.spawn(let_go(task.result()), name=f"leaving {self._name}"))
            waiting = asyncio.current_task()
            if waiting is None or waiting.cancelling():
                raise
            raise UpstreamFailedError(f"{self._name} was closed") from None
        finally:
            self._tasks.discard(task)

    def close(self) -> None:
        """End what waits, and let nothing begin any more. Calling it twice is harmless."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
