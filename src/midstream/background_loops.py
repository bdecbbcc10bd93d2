"""Background loops that an unexpected exception does not end.

A loop handles the errors that it expects. Without this, any other error would end it silently for the rest of the
process, because its task is only awaited when the process stops.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from midstream.environment import World
from midstream.retries import RECONNECT_BACKOFF

_log = logging.getLogger(__name__)


def spawn_loop(
    world: World, loop: Callable[[], Coroutine[Any, Any, None]], *, name: str
) -> asyncio.Task[None]:
    """Start a task that runs a loop until it returns or is cancelled.

    After an unexpected exception the loop begins again; the log has the exception.

    Args:
        loop: Begins the loop; called again after each exception.
        name: Of the task; also in the log.
    """
    return world.spawn(_keep_running(world, loop, name), name=name)


async def _keep_running(world: World, loop: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
    failures = 0
    while True:
        began_at = world.monotonic()
        try:
            return await loop()
        except Exception:  # noqa: BLE001 - a defect must not end the loop for the rest of the process
            is_repeated = world.monotonic() - began_at < RECONNECT_BACKOFF.most_s
            failures = failures + 1 if is_repeated else 1
            wait_s = RECONNECT_BACKOFF.wait_s(failures, chance=world.chance())
            _log.exception(
                "%s: a defect stopped this background task; it begins again in %.1f s", name, wait_s
            )
        await world.sleep(wait_s)
