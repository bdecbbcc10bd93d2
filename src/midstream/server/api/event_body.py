"""Readers of a session: requests that wait, and bodies of answers that are streams of events."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from typing import Any

from starlette.types import Receive, Send
from typing_extensions import override

from midstream.dialects.gateway_bodies import wait_for_disconnect
from midstream.dialects.record_events import RecordEvents
from midstream.engine.conversation import follow_pages
from midstream.engine.host import Host
from midstream.errors import MidstreamError
from midstream.server.api.http_endpoints import NO_STORE, SSE_HEADERS, UNKNOWN, StreamCutError
from midstream.server.auth.caller import Caller
from midstream.server.transports.connection import Connections
from midstream.session.journal_reading import JournalReader

QUIET_S = 15.0
"""Seconds without events after which a stream gets a comment, as in the gateway."""
PACE_S = 0.03
"""Seconds between two writes: events in between are written together. Without this pause, 500 readers of an answer with
a token every 5 ms cost a third more (`python -m bench dialects`)."""
COMMENT = b": waiting\n\n"


class CountedReader:
    """A request that waits for changes, counted and checked like any reader of a stream.

    Args:
        session: Stored name of the session or stream.
        caller: The client.
    """

    def __init__(self, host: Host, connections: Connections, session: str, caller: Caller) -> None:
        self._host = host
        self._connections = connections
        self._session = session
        self._caller = caller
        self._ending: asyncio.Future[MidstreamError] = asyncio.get_running_loop().create_future()

    @property
    def place(self) -> tuple[str, str]:
        """The session, without a stream key."""
        return self._session, ""

    def end(self, error: MidstreamError) -> None:
        """Interrupt the request, for example at a shutdown. The client reconnects elsewhere."""
        if not self._ending.done():
            self._ending.set_result(error)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._caller.enter()
        try:
            self._connections.enter(self)
            try:
                yield
            finally:
                self._connections.leave(self)
        finally:
            self._caller.leave()

    async def _until_first(self, receive: Receive, *work: Coroutine[Any, Any, Any]) -> list[Any]:
        """Run coroutines until one of them is done, the client disconnects, or the reader is ended; cancel the rest.

        Returns:
            The result or exception of each, in order: the wait for the disconnect, `work`, and the waits for the end of
                the reader.
        """
        ends = [self._until_ended()]
        if self._caller.is_known:
            ends.append(self._caller.until_unauthorized())
        name = f"{type(self).__name__} {self._session}"
        parts: list[Coroutine[Any, Any, Any]] = [wait_for_disconnect(receive), *work, *ends]
        tasks = [self._host.world.spawn(each, name=name) for each in parts]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        return outcomes

    async def _until_ended(self) -> MidstreamError:
        return await self._ending


class EventBody(CountedReader, ABC):
    """Sends the events of one reader, and keeps its connection alive."""

    headers: Sequence[tuple[bytes, bytes]] = tuple(SSE_HEADERS)
    """Headers of the answer."""
    comment = COMMENT
    """Bytes that keep the connection alive."""
    _sent_at = 0.0

    async def send_to(
        self, receive: Receive, send: Send, more_headers: Sequence[tuple[str, str]] = ()
    ) -> bool:
        """Send the body; return whether it was sent completely.

        Raises:
            StreamCutError: The server ended the body early (draining, a failing store, a caller without rights). The
                connection is reset, so that the client reconnects.
        """
        with self._counted():
            return await self._send(receive, send, more_headers)

    @abstractmethod
    async def pump(self, send: Send) -> None:
        """Send events with `write` until the end of the body."""

    async def follow(self, send: Send, events: RecordEvents, position: int) -> None:
        """Convert the records after a position with a dialect, and send the events until the last one."""
        if await self._send_shown(send, events, events.begin()):
            return
        reader = JournalReader()
        async with aclosing(follow_pages(self._host, self._session, position)) as pages:
            async for page in pages:
                found = [] if page else events.rest()
                for stored in page:
                    found += events.take(reader.read(stored.body), epoch=stored.epoch)
                if await self._send_shown(send, events, found):
                    return

    async def _send_shown(self, send: Send, events: RecordEvents, found: list[bytes]) -> bool:
        """Send the shown part of events; return whether the last event was sent."""
        await self.write(send, self.shown(found))
        return events.is_over

    def shown(self, events: list[bytes]) -> list[bytes]:
        """Return the events to send for `events`; by default all."""
        return events

    async def write(self, send: Send, events: Sequence[bytes]) -> None:
        """Send events in one write, and wait until the next write is due."""
        if events:
            self._sent_at = self._host.world.monotonic()
            await send({"type": "http.response.body", "body": b"".join(events), "more_body": True})
            await self._host.world.sleep(PACE_S)

    async def _send(self, receive: Receive, send: Send, more_headers: Sequence[tuple[str, str]]) -> bool:
        more = [(name.encode(), value.encode()) for name, value in more_headers]
        await send({"type": "http.response.start", "status": 200, "headers": [*self.headers, *more]})
        self._sent_at = self._host.world.monotonic()
        gone, *others = await self._until_first(receive, self.pump(send), self._keep_alive(send))
        if others[0] is None:
            await send({"type": "http.response.body", "body": b""})
            return True
        if isinstance(gone, BaseException):
            failure = next((each for each in others if isinstance(each, MidstreamError)), None)
            with suppress(Exception):  # the send fails
                await send({"type": UNKNOWN})
            raise StreamCutError(failure.code if failure else "closed") from failure
        return False

    async def _keep_alive(self, send: Send) -> None:
        while True:
            await self._host.world.sleep(QUIET_S)
            if self._host.world.monotonic() - self._sent_at >= QUIET_S:
                await send({"type": "http.response.body", "body": self.comment, "more_body": True})


class RecordBody(EventBody):
    """Sends the records of a session as events of a dialect.

    Args:
        events: Converts the records for one reader.
        position: Position of the last record before the events.
    """

    def __init__(
        self,
        host: Host,
        connections: Connections,
        session: str,
        caller: Caller,
        events: RecordEvents,
        position: int,
    ) -> None:
        super().__init__(host, connections, session, caller)
        self._events = events
        self._position = position

    @override
    async def pump(self, send: Send) -> None:
        await self.follow(send, self._events, self._position)


class PieceBody(RecordBody):
    """Sends one JSON value when the records contain it; before, white space keeps the connection alive."""

    headers = (
        (b"content-type", b"application/json"),
        *((name.encode(), value.encode()) for name, value in NO_STORE.items()),
    )
    comment = b"\n"
