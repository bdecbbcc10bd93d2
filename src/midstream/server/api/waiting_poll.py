"""One long poll, which ends with what it waits for, after a time, with its client, or with the server."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

from starlette.types import Receive

from midstream.dialects.gateway_bodies import wait_until_gone
from midstream.engine.host import Host
from midstream.errors import MidstreamError
from midstream.server.auth.caller import Caller
from midstream.server.transports.connection import Connections

T = TypeVar("T")

LONG_POLL_S = 20.0
"""Seconds that a long poll waits for more."""


class ClientLeftError(Exception):
    """The client of a long poll has gone: its answer has no reader."""


class WaitingPoll(Generic[T]):
    """A request that waits, and is counted and checked as a stream is.

    Args:
        session: What it reads, as the store names it.
    """

    def __init__(self, host: Host, connections: Connections, visitor: Caller, session: str) -> None:
        self._host = host
        self._connections = connections
        self._visitor = visitor
        self._session = session
        self._ending: asyncio.Future[MidstreamError] = asyncio.get_running_loop().create_future()

    @property
    def place(self) -> tuple[str, str]:
        """The stream or session that it reads; it speaks for no stream of a session."""
        return self._session, ""

    def end(self, error: MidstreamError) -> None:
        """End it without data: its client asks again, elsewhere."""
        if not self._ending.done():
            self._ending.set_result(error)

    async def wait(self, more: Coroutine[Any, Any, T], receive: Receive) -> T | None:
        """Return what `more` returns, or None once the time is over.

        Raises:
            ClientLeftError: The client has gone.
            MidstreamError: The server is about to stop, the caller may not wait any longer, or `more` raised it.
        """
        try:
            self._visitor.enter()
        except MidstreamError:
            more.close()
            raise
        try:
            self._connections.enter(self)
            try:
                return await self._wait(more, receive)
            finally:
                self._connections.leave(self)
        finally:
            more.close()
            self._visitor.leave()

    async def _wait(self, more: Coroutine[Any, Any, T], receive: Receive) -> T | None:
        spawn = self._host.world.spawn
        waiting = spawn(more, name=f"long poll of {self._session}")
        gone = spawn(wait_until_gone(receive), name="client of a long poll")
        over = spawn(self._host.world.sleep(LONG_POLL_S), name="end of a long poll")
        tasks: list[asyncio.Task[Any]] = [waiting, gone, over]
        if self._visitor.is_known:
            tasks.append(spawn(self._visitor.until_unwelcome(), name="rights of a long poll"))
        try:
            await asyncio.wait([*tasks, self._ending], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if not waiting.cancelled():
            return waiting.result()
        if self._ending.done():
            raise self._ending.result()
        if not gone.cancelled():
            raise ClientLeftError
        unwelcome = tasks.pop()
        if unwelcome is not over and not unwelcome.cancelled():
            raise unwelcome.result()
        return None
