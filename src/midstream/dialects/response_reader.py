"""One reader of a response over HTTP: as a stream of events, or as one body."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import aclosing
from typing import Self

from starlette.types import Message, Receive, Scope, Send

from midstream.dialects.api_errors import BUG, ApiError, final, refusal_of
from midstream.dialects.dialect import Dialect, Form
from midstream.dialects.live_responses import LiveResponse, LiveResponses
from midstream.engine.conversation import follow
from midstream.environment import Cancellable, World
from midstream.errors import MidstreamError

QUIET_S = 15.0
"""Seconds without events after which a stream gets a comment: proxies and some clients end silent connections after 30
to 60 s."""
BUFFER_BYTES_MAX = 1024 * 1024
"""Bytes of events that are buffered for one client; further ones are read from the journal."""
_JSON = "application/json"
EVENT_STREAM = {
    "content-type": "text/event-stream; charset=utf-8",
    # A proxy that stores, compresses or buffers would delay events.
    "cache-control": "no-store, no-transform",
    "x-accel-buffering": "no",
}
_log = logging.getLogger(__name__)


async def send_whole(
    send: Send, body: bytes, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> None:
    """Send one JSON body."""
    given = {"content-type": _JSON, "cache-control": "no-store", **(headers or {})}
    given |= {"content-length": str(len(body)), "x-content-type-options": "nosniff"}
    await send({"type": "http.response.start", "status": status, "headers": encode_headers(given)})
    await send({"type": "http.response.body", "body": body})


async def refuse(
    send: Send, dialect: Dialect, refusal: ApiError, headers: Mapping[str, str] | None = None
) -> None:
    """Send a refusal in the form of its dialect."""
    given = {**(headers or {}), **refusal.headers()}
    await send_whole(send, dialect.error_body(refusal), status=dialect.status(refusal), headers=given)


async def refuse_socket(scope: Scope, send: Send, dialect: Dialect, refusal: ApiError) -> None:
    """Refuse a WebSocket handshake, with a body if the ASGI server supports it."""
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 1008, "reason": refusal.code})
        return

    async def send_in_handshake(message: Message) -> None:
        await send({**message, "type": f"websocket.{message['type']}"})

    await refuse(send_in_handshake, dialect, refusal)


class ResponseReader:
    """Follows one response for one client, and detects its disconnect.

    Use it as an async context, for a reader that `LiveResponses.join` has counted. No other code may call `receive`
    meanwhile.
    """

    def __init__(
        self,
        live: LiveResponse,
        responses: LiveResponses,
        world: World,
        receive: Receive,
        send: Send,
        *,
        form: Form,
        shows_upstream_calls: bool,
    ) -> None:
        self.projection = live.projection(form, shows_upstream_calls=shows_upstream_calls)
        self._live = live
        self._responses = responses
        self._world = world
        self._receive = receive
        self._send = send
        self._events: list[bytes] = []
        """Events that were not sent yet."""
        self._bytes = 0
        self._is_ended = False
        self._watch: asyncio.Task[None] | None = None
        self._follower: asyncio.Task[None] | None = None
        self._news: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._timer: Cancellable | None = None
        self._sent_at = 0.0
        self._is_quiet = False

    async def __aenter__(self) -> Self:
        self._watch = self._world.spawn(self._wait_for_disconnect(), name=f"client of {self._live.id}")
        self._watch.add_done_callback(lambda _: self._wake())
        self._follower = self._world.spawn(self._follow(), name=f"reader of {self._live.id}")
        self._follower.add_done_callback(lambda _: self._wake())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        tasks = [task for task in (self._watch, self._follower) if task is not None]
        for task in tasks:
            task.cancel()
        try:
            await asyncio.wait(tasks)
        finally:  # another cancellation must not leave a reader that is counted for ever
            self._watch = None
            self._responses.leave(self._live)

    async def stream(self, headers: Mapping[str, str], *, after: int = 0) -> None:
        """Send the events after number `after`; an error before the first event is an ordinary error response."""
        self._sent_at = self._world.monotonic()
        self._check_silence()
        while not (self._events or self._is_ended or self._is_gone or self._is_quiet):
            await self._wait()
        if self._is_gone:
            return
        projection = self.projection
        if self._is_ended and projection.refusal is not None and not projection.is_open:
            if projection.refusal.code not in self._live.dialect.streamed_codes:
                await self._refuse(headers)
                return
            self._publish([*projection.open(), *projection.fail(projection.refusal)])
        self._is_quiet = False
        if not self._events:
            self._publish(projection.open())
        given = encode_headers({**headers, **EVENT_STREAM})
        await self._send({"type": "http.response.start", "status": 200, "headers": given})
        while not self._is_gone:
            if events := self._take():
                events, after = events[after:], max(0, after - len(events))
                is_last = self._is_ended and not self._events
                if events or is_last:
                    await self._send_events(b"".join(events), is_last=is_last)
                if is_last:
                    self._live.is_delivered = True
                    return
            elif self._is_ended:
                await self._send_events(b"", is_last=True)
                self._live.is_delivered = True
                return
            elif self._is_quiet:
                await self._send_events(self._live.dialect.keep_alive, is_last=False)
            else:
                await self._wait()

    async def state(self, headers: Mapping[str, str]) -> None:
        """Send the current state of the response as one body."""
        while not (self._is_ended or self._is_gone or self.projection.is_open):
            await self._wait()
        if self._is_ended and self.projection.refusal is not None and not self.projection.is_open:
            await self._refuse(headers)
        elif not self._is_gone:
            await send_whole(self._send, self.projection.whole(), headers=headers)

    async def whole(self, headers: Mapping[str, str]) -> None:
        """Wait for the end, and send the response as one body."""
        while not (self._is_ended or self._is_gone):
            self._take()
            await self._wait()
        if self._is_gone:
            return
        if self.projection.refusal is not None:
            await self._refuse(headers)
            return
        await send_whole(self._send, self.projection.whole(), headers=headers)
        self._live.is_delivered = True

    @property
    def _is_gone(self) -> bool:
        return self._watch is None or self._watch.done()

    async def _refuse(self, headers: Mapping[str, str]) -> None:
        refusal = self.projection.refusal
        assert refusal is not None  # the caller has checked it
        await refuse(self._send, self._live.dialect, refusal, headers)
        self._live.is_delivered = True

    async def _follow(self) -> None:
        """Convert new records to events, at the client's pace."""
        projection, found = self.projection, self._live.found
        try:
            async with aclosing(
                follow(self._live.sessions.host, found.session, found.response.position)
            ) as records:
                async for record in records:
                    events = projection.take(record)
                    if projection.is_over:
                        await self._live.settle(projection.model_response, self._world)
                        self._is_ended = True
                    self._publish(events)
                    if projection.is_over:
                        return
                    while self._bytes > BUFFER_BYTES_MAX:
                        self._room = asyncio.get_running_loop().create_future()
                        await self._room
        except MidstreamError as error:
            refusal = refusal_of(error)
            events = projection.fail(refusal)
            if projection.has_begun and not self._live.sessions.is_durable:
                # Otherwise the next process continues the response, and a retry joins it.
                projection.refusal = final(refusal)
            self._publish(events)
        except Exception:  # noqa: BLE001 - the client gets an error, and the log the reason
            _log.exception("a response cannot be read", extra={"response": self._live.id})
            self._publish(projection.fail(BUG))
        self._is_ended = True
        self._wake()

    def _publish(self, events: list[bytes]) -> None:
        self._events += events
        self._bytes += sum(map(len, events))
        if events or self._is_ended:
            self._wake()

    def _take(self) -> list[bytes]:
        events, self._events, self._bytes = self._events, [], 0
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        return events

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def _wait(self) -> None:
        self._news = asyncio.get_running_loop().create_future()
        await self._news

    async def _send_events(self, body: bytes, *, is_last: bool) -> None:
        self._is_quiet = False
        self._sent_at = self._world.monotonic()
        await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})

    def _check_silence(self) -> None:
        """Check for silence periodically: a timer for each event would cost more than sending the event."""
        left_s = self._sent_at + QUIET_S - self._world.monotonic()
        if left_s <= 0:
            self._is_quiet = True
            self._wake()
            left_s = QUIET_S
        self._timer = self._world.later(left_s, self._check_silence)

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


def encode_headers(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Encode headers for ASGI."""
    return [
        (name.encode("latin-1", "replace"), value.encode("latin-1", "replace"))
        for name, value in headers.items()
    ]
