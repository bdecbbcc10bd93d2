"""A server for tests that may not run an event loop themselves."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator

WAIT_S = 60.0


@contextlib.contextmanager
def in_a_thread(serving: Callable[[], contextlib.AbstractAsyncContextManager[str]]) -> Iterator[str]:
    """Serve until the end of the block, in a thread of its own; the address is the value that `serving` yields."""
    address: list[str] = []
    is_up, loop, over = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def live() -> None:
        async with serving() as url:
            address.append(url)
            is_up.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(live(),))
    thread.start()
    try:
        assert is_up.wait(WAIT_S), "the server did not start"
        yield address[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(WAIT_S)
        loop.close()
