"""The stream protocol over a WebSocket: each frame is one text message."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from starlette.requests import HTTPConnection
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from midstream.engine.host import Host
from midstream.errors import (
    DrainingError,
    FrameTooLargeError,
    InternalError,
    MidstreamError,
    ProtocolError,
)
from midstream.protocol.frames import Error, encode
from midstream.server.api.problems import INTERNAL
from midstream.server.auth.caller import caller_of
from midstream.server.transports.connection import Connection, Connections, FrameTransport
from midstream.server.transports.stream_headers import open_of

CLOSED = 1000
"""WebSocket close codes (RFC 6455, section 7.4): the client sent `close`."""
BROKEN_PROTOCOL = 1002
REFUSED = 1008
TOO_LARGE = 1009
RESTARTING = 1012
BUG = 1011
TRY_LATER = 1013

_CODES: tuple[tuple[type[MidstreamError], int], ...] = (
    (DrainingError, RESTARTING),
    (FrameTooLargeError, TOO_LARGE),
    (ProtocolError, BROKEN_PROTOCOL),
    (InternalError, BUG),
)


def close_code_of(failure: MidstreamError | None) -> int:
    """Return the close code that belongs to an `error` frame."""
    if failure is None:
        return CLOSED
    other = TRY_LATER if failure.retry in ("now", "later") else REFUSED
    return next((code for kind, code in _CODES if isinstance(failure, kind)), other)


class AcceptedWebSocket(FrameTransport):
    """Frames as text messages of an accepted WebSocket."""

    ends_with_turn = False
    gap_s = 0.0
    is_full = False

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send

    async def receive(self) -> bytes | None:
        """See `FrameTransport.receive`. A binary message is read as text."""
        message = await self._receive()
        if message["type"] != "websocket.receive":
            return None
        text: str | None = message.get("text")
        body: bytes = message["bytes"] if text is None else text.encode("utf-8", "surrogatepass")
        return body

    @override
    async def send(self, frames: Sequence[bytes]) -> None:
        for frame in frames:
            await self._send({"type": "websocket.send", "text": frame.decode()})


class WebSocketEndpoint:
    """`/v1/sessions/{id}/stream` as a plain ASGI callable."""

    def __init__(self, host: Host, connections: Connections) -> None:
        self._host = host
        self._connections = connections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one WebSocket.

        A handshake with a stream key or an event id is an `open`, and is refused with an HTTP status.
        """
        await receive()  # websocket.connect
        session_id = scope["path_params"]["session_id"]
        request = HTTPConnection(scope)
        opened = open_of(request)
        is_open = bool(opened.stream) or opened.event_id is not None  # STREAM-51, STREAM-98
        stream = self._connections.stream(self._host, headers=None if is_open else opened)
        transport = AcceptedWebSocket(receive, send)
        caller = caller_of(scope)
        with Connection(
            self._host, session_id, stream, transport, self._connections, caller, request=request
        ) as connection:
            if is_open:
                await connection.admit(encode(opened))
            await send({"type": "websocket.accept"})
            try:
                failure = await connection.run()
            except Exception:
                if not connection.is_gone:  # without an `error` frame, a close looks like a bad network
                    bug = InternalError(INTERNAL)
                    await _close(send, bug, Error(bug.code, bug.message, bug.retry))
                raise
        if not connection.is_gone:
            await _close(send, failure)


async def _close(send: Send, failure: MidstreamError | None, last: Error | None = None) -> None:
    """Close the socket with the code for `failure`; `last` is its `error` frame, if not sent yet."""
    with contextlib.suppress(OSError):  # the client may disconnect now
        if last is not None:
            await send({"type": "websocket.send", "text": encode(last).decode()})
        reason = failure.code if failure else ""
        await send({"type": "websocket.close", "code": close_code_of(failure), "reason": reason})
