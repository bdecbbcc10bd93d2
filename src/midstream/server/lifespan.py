"""The life of an app as an ASGI server tells it, for apps that are run or mounted by a server of somebody else's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.types import Receive, Send

from midstream.errors import MidstreamError


async def live(
    start: Callable[[], Awaitable[None]], stop: Callable[[], Awaitable[None]], receive: Receive, send: Send
) -> None:
    """Start when the server does, stop when it does, and answer both; a start that fails is answered with its reason.

    Args:
        start: Makes the app ready; a `MidstreamError` says why it cannot be.
        stop: Ends it, within a bound of its own. Not called where `start` has failed.
        receive, send: Of the scope `lifespan`.
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
