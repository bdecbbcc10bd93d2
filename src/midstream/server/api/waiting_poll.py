"""One long poll, which ends with what it waits for, after a time, with its client, or with the server."""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

from starlette.types import Receive

from midstream.errors import MidstreamError
from midstream.server.api.event_body import CountedReader

T = TypeVar("T")

LONG_POLL_S = 20.0
"""Seconds that a long poll waits for more."""


class ClientLeftError(Exception):
    """The client of a long poll has gone: its answer has no reader."""


class WaitingPoll(CountedReader, Generic[T]):
    """A request that waits, and has one answer."""

    async def wait(self, more: Coroutine[Any, Any, T], receive: Receive) -> T | None:
        """Return what `more` returns, or None once the time is over.

        Raises:
            ClientLeftError: The client has gone.
            MidstreamError: The server is about to stop, the caller may not wait any longer, or `more` raised it.
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
