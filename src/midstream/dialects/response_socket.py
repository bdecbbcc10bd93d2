"""Responses over a WebSocket: sequential requests, and their events as messages.

The socket is another transport of `POST /v1/responses`, with the same rules. In addition, a request can continue the
socket's newest response with `previous_response_id`, although it is not stored.
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
from midstream.dialects.gateway_bodies import BODY_BYTES_MAX, Arrived, RefusedError, refusal_in
from midstream.dialects.live_responses import LiveResponse, LiveResponses
from midstream.dialects.request_fields import bad_field, field, fields_of
from midstream.dialects.response_reader import ResponseReader
from midstream.environment import World
from midstream.errors import MidstreamError

OPEN_MAX_S = 3600.0
"""Seconds for which a socket accepts requests: the limit in the API's documentation."""
WAITING_MAX, WAITING_BYTES_MAX = 16, 2 * BODY_BYTES_MAX
"""Waiting requests, and their bytes; a client with more is disconnected."""
CREATE = "response.create"
_NORMAL, _REFUSED = 1000, 1008
"""Close codes of WebSockets (RFC 6455, section 7.4)."""
_OK = 200
_OF_HTTP = ("type", "stream", "stream_options")
_LIMIT = ApiError(
    400, "websocket_connection_limit_reached", "this socket has been open for an hour; open another one"
)


class ResponseSocket:
    """One socket, served by `run`.

    Args:
        accepting: Begins the responses.
        check: Called before each request: returns the caller, or raises a refusal, such as for a revoked key.
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
        """The newest response, if it is not stored."""
        self._waiting: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._waiting_bytes = 0
        self._gone = asyncio.Event()

    async def run(self, handshake: Arrived) -> None:
        """Accept the socket, and answer its requests until the client disconnects or the time limit.

        Args:
            handshake: The handshake; its headers apply to each request.
        """
        await self._send({"type": "websocket.accept"})
        reading = self._world.spawn(self._read(), name="requests of a socket")
        try:
            async with asyncio.timeout(OPEN_MAX_S) as limit:
                while (message := await self._waiting.get()) is not None:
                    self._waiting_bytes -= len(message)
                    until = limit.when()
                    limit.reschedule(None)  # a response may continue to its end
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
            await self._fail(BUG)  # without an error event, a close looks like a bad network
            raise

    async def _respond(self, arrived: Arrived) -> None:
        reply = await self._accepting.response_to(RESPONSES, arrived, self._newest)
        live = reply.live
        reader = ResponseReader(
            live,
            self._responses,
            self._world,
            self._wait_for_disconnect,
            _EventSender(self._send),
            form=reply.form,
            shows_upstream_calls=self._shows_upstream_calls,
        )
        async with reader:
            await reader.stream({})
        if reader.projection.refusal is not None:
            self._newest = None  # a failed chain cannot be continued
        elif not live.found.form.is_stored:
            self._newest = live

    async def _fail(self, refusal: ApiError) -> None:
        self._newest = None
        await self._refuse(refusal)

    async def _refuse(self, refusal: ApiError) -> None:
        event = {"type": "error", "status": RESPONSES.status(refusal), **RESPONSES.error(refusal)}
        with contextlib.suppress(OSError):  # the client may disconnect now
            await self._send({"type": "websocket.send", "text": msgspec.json.encode(event).decode()})

    async def _close(self, code: int, reason: str) -> None:
        with contextlib.suppress(OSError):
            await self._send({"type": "websocket.close", "code": code, "reason": reason})

    async def _wait_for_disconnect(self) -> Message:
        await self._gone.wait()
        return {"type": "http.disconnect"}


class _EventSender:
    """Sends the events of an HTTP stream as messages of a socket, without comments."""

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
    """Return the body of the equivalent streaming POST for a message.

    Raises:
        MidstreamError: The message is not a JSON object, not a request, or requests a background response.
    """
    fields = fields_of(message)
    if field(fields, "type", object) != CREATE:
        raise bad_field("type", f"a message of this socket must have the type `{CREATE}`")
    if field(fields, "background", bool):
        raise bad_field("background", "a response over a WebSocket cannot be a background response")
    request = {name: raw for name, raw in fields.items() if name not in _OF_HTTP}
    return msgspec.json.encode({**request, "stream": True})
