"""Responses over a WebSocket: requests one after the other, and the events of each as messages.

The socket is another transport of `POST /v1/responses` and has its rules. Beyond it, the newest response that is not
stored can be continued here with `previous_response_id`, as long as the socket is open.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import msgspec
from msgspec.structs import replace
from starlette.types import Message, Receive, Send

from midstream.dialects.accepted_requests import Accepting
from midstream.dialects.api_callers import ApiCaller
from midstream.dialects.api_errors import BUG, ApiError
from midstream.dialects.dialect_registry import RESPONSES
from midstream.dialects.fields import bad_field, field, fields_of
from midstream.dialects.gateway_bodies import BODY_BYTES_MAX, Arrived, RefusedError, refusal_in
from midstream.dialects.live_responses import LiveResponse, LiveResponses
from midstream.dialects.response_reader import ResponseReader
from midstream.environment import World
from midstream.errors import MidstreamError

OPEN_MAX_S = 3600.0
"""Seconds that a socket takes requests: the limit that the API documents."""
WAITING_MAX, WAITING_BYTES_MAX = 16, 2 * BODY_BYTES_MAX
"""Requests that wait for the one before, and their bytes; a client with more is cut off."""
CREATE = "response.create"
_NORMAL, _REFUSED = 1000, 1008
"""Close codes of WebSockets (RFC 6455, section 7.4)."""
_OK = 200
_OF_HTTP = ("type", "stream", "stream_options")
_LIMIT = ApiError(
    400, "websocket_connection_limit_reached", "this socket has been open for an hour; open another one"
)


class ResponseSocket:
    """One socket. `run` serves it until it is closed.

    Args:
        accepting: Begins the responses.
        check: Called before each request: returns who sends it, and raises where none is accepted now, such as with a
            key that was withdrawn.
    """

    def __init__(
        self,
        accepting: Accepting,
        responses: LiveResponses,
        world: World,
        receive: Receive,
        send: Send,
        *,
        shows_upstream_calls: bool,
        check: Callable[[], ApiCaller],
    ) -> None:
        self._accepting = accepting
        self._responses = responses
        self._world = world
        self._receive = receive
        self._send = send
        self._shows_upstream_calls = shows_upstream_calls
        self._check = check
        self._newest: LiveResponse | None = None
        """The newest response, where it is not stored."""
        self._waiting: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._waiting_bytes = 0
        self._gone = asyncio.Event()

    async def run(self, handshake: Arrived) -> None:
        """Accept the socket, and answer its requests until the client leaves or the time is over.

        Args:
            handshake: The request that opened it; its headers count for each request.
        """
        await self._send({"type": "websocket.accept"})
        reading = self._world.spawn(self._read(), name="requests of a socket")
        try:
            async with asyncio.timeout(OPEN_MAX_S) as limit:
                while (message := await self._waiting.get()) is not None:
                    self._waiting_bytes -= len(message)
                    until = limit.when()
                    limit.reschedule(None)  # a response goes on to its end
                    await self._answer(handshake, message)
                    limit.reschedule(until)
        except TimeoutError:
            await self._refuse(_LIMIT)
            await self._close(_NORMAL, _LIMIT.code)
        finally:
            reading.cancel()
            await asyncio.wait([reading])

    async def _read(self) -> None:
        while (message := await self._receive())["type"] == "websocket.receive":
            text = message.get("text")
            request: bytes = message["bytes"] if text is None else text.encode("utf-8", "replace")
            self._waiting.put_nowait(request)
            self._waiting_bytes += len(request)
            if self._waiting.qsize() > WAITING_MAX or self._waiting_bytes > WAITING_BYTES_MAX:
                await self._close(_REFUSED, "too_many_requests")
                break
        self._gone.set()
        self._waiting.put_nowait(None)

    async def _answer(self, handshake: Arrived, message: bytes) -> None:
        try:
            caller = self._check()
            await self._respond(replace(handshake, method="POST", body=_body_of(message), caller=caller))
        except (RefusedError, MidstreamError) as error:
            await self._fail(refusal_in(error))
        except Exception:
            await self._fail(BUG)  # a socket that only closes looks like a bad network
            raise

    async def _respond(self, arrived: Arrived) -> None:
        reply = await self._accepting.response_to(RESPONSES, arrived, self._newest)
        live = reply.live
        reader = ResponseReader(
            live,
            self._responses,
            self._world,
            self._until_gone,
            _EventSender(self._send),
            form=reply.form,
            shows_upstream_calls=self._shows_upstream_calls,
        )
        async with reader:
            await reader.stream({})
        if reader.projection.refusal is not None:
            self._newest = None  # a chain that failed is begun anew
        elif not live.found.form.is_stored:
            self._newest = live

    async def _fail(self, refusal: ApiError) -> None:
        self._newest = None
        await self._refuse(refusal)

    async def _refuse(self, refusal: ApiError) -> None:
        event = {"type": "error", "status": RESPONSES.status(refusal), **RESPONSES.error(refusal)}
        with contextlib.suppress(OSError):  # the client may go at this very moment
            await self._send({"type": "websocket.send", "text": msgspec.json.encode(event).decode()})

    async def _close(self, code: int, reason: str) -> None:
        with contextlib.suppress(OSError):
            await self._send({"type": "websocket.close", "code": code, "reason": reason})

    async def _until_gone(self) -> Message:
        await self._gone.wait()
        return {"type": "http.disconnect"}


class _EventSender:
    """Sends a streamed answer of HTTP as messages of a socket: one for each event, none for a comment."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._status = _OK

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            return
        body: bytes = message.get("body", b"")
        if self._status != _OK:
            error = {"type": "error", "status": self._status, **msgspec.json.decode(body)}
            events = [msgspec.json.encode(error)]
        else:
            events = [event.partition(b"\ndata: ")[2] for event in body.split(b"\n\n")]
        for event in filter(None, events):
            await self._send({"type": "websocket.send", "text": event.decode()})


def _body_of(message: bytes) -> bytes:
    """Return the body of a POST that requests the same as a message, with a stream.

    Raises:
        MidstreamError: It is no JSON object, no request, or one for the background.
    """
    fields = fields_of(message)
    if field(fields, "type", object) != CREATE:
        raise bad_field("type", f"a message of this socket has the type `{CREATE}`")
    if field(fields, "background", bool):
        raise bad_field("background", "a response over a WebSocket is not made in the background")
    asked = {name: raw for name, raw in fields.items() if name not in _OF_HTTP}
    return msgspec.json.encode({**asked, "stream": True})
