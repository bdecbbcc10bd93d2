"""The ASGI lifespan of an app, for apps that run in or are mounted on another server."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from types import FrameType

from starlette.types import Receive, Send

from midstream.errors import MidstreamError


async def live(
    start: Callable[[], Awaitable[None]], stop: Callable[[], Awaitable[None]], receive: Receive, send: Send
) -> None:
    """Start and stop an app with its server. A failed start is reported with its reason.

    Args:
        start: Starts the app; it raises a `MidstreamError` with the reason of a failure.
        stop: Stops the app, within its own time limit. It is not called if `start` failed.
        receive, send: The channels of the scope `lifespan`.
    """
    await receive()  # lifespan.startup
    try:
        await start()
    except MidstreamError as error:
        await send({"type": "lifespan.startup.failed", "message": f"{error.code}: {error.message}"})
        return
    await send({"type": "lifespan.startup.complete"})
    await receive()  # lifespan.shutdown
    await stop()
    await send({"type": "lifespan.shutdown.complete"})


@contextlib.contextmanager
def on_end_signal(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` on the running event loop at SIGTERM and SIGINT, before the handlers of the server.

    A server ends the lifespan after its connections have ended, and streams end only when they are drained. `act` is
    never called outside the main thread, which gets no signals, or if the server has no handlers: it ends at once.
    """
    loop = asyncio.get_running_loop()
    former: dict[int, Callable[[int, FrameType | None], object]] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(act)
        former[number](number, frame)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            handler = signal.getsignal(number)
            if callable(handler):
                former[number] = handler
                signal.signal(number, handle)
    try:
        yield
    finally:
        for taken, handler in former.items():
            if signal.getsignal(taken) is handle:
                signal.signal(taken, handler)
