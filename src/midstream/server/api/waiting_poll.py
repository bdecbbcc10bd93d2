"""One long poll. It ends with its result, a timeout, its client's disconnect, or the server's shutdown."""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

from starlette.types import Receive

from midstream.errors import MidstreamError
from midstream.server.api.event_body import CountedReader

T = TypeVar("T")

LONG_POLL_S = 20.0
"""Time limit of a long poll in seconds."""


class ClientLeftError(Exception):
    """The client of a long poll has disconnected."""


class WaitingPoll(CountedReader, Generic[T]):
    """A waiting request with one answer."""

    async def wait(self, more: Coroutine[Any, Any, T], receive: Receive) -> T | None:
        """Return the result of `more`, or None after the time limit.

        Raises:
            ClientLeftError: The client has disconnected.
            MidstreamError: The server shuts down, the caller lost its access, or `more` raised it.
        """
        try:
            with self._counted():
                gone, found, _, *ends = await self._until_first(
                    receive, more, self._host.world.sleep(LONG_POLL_S)
                )
        finally:
            more.close()
        if not isinstance(found, CancelledError):
            if isinstance(found, BaseException):
                raise found
            result: T = found
            return result
        if (failure := next((each for each in ends if isinstance(each, MidstreamError)), None)) is not None:
            raise failure
        if not isinstance(gone, CancelledError):
            raise ClientLeftError
        return None
