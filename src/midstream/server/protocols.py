"""What is refused below ASGI, where no app was asked: requests that are no HTTP, handshakes that are none.

uvicorn and `websockets` answer these in plain text; here they are problems as everywhere else.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from uvicorn.config import Config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.datastructures import Headers
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import State
from websockets.server import ServerProtocol

from midstream.server.problems import MEDIA_TYPE, internal_problem, problem_of_http

try:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as HttpProtocol
except ImportError:  # an install without compiled parts
    from uvicorn.protocols.http.h11_impl import H11Protocol as HttpProtocol  # type: ignore[assignment]


_LENGTH = b"\r\ncontent-length: "
HEADERS_S = 10.0
"""Seconds for the headers of a request: who sends them a byte at a time holds a connection, and is nobody yet."""


class PlainHttp(HttpProtocol):
    """HTTP/1.1 of uvicorn."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        super().connection_lost(exc)
        if self._late is not None:
            self._late.cancel()

    def data_received(self, data: bytes) -> None:
        """Take what came, and wait for the rest of a request's headers, or no longer."""
        super().data_received(data)
        begun: Any = self.cycle  # None before the first request
        if begun is not None and begun.transport is self.transport and not begun.response_started:
            begun.transport = _HeadFirst(begun)
        self._watch()

    @property
    def _awaits_headers(self) -> bool:
        under_way: Any = self.cycle  # None before the first request
        is_idle = under_way is None or under_way.response_complete
        return is_idle and self.timeout_keep_alive_task is None

    def _watch(self) -> None:
        if not self._awaits_headers:
            if self._late is not None:
                self._late.cancel()
                self._late = None
        elif self._late is None:
            self._late = self.loop.call_later(HEADERS_S, self._give_up)

    def _give_up(self) -> None:
        self._late = None
        if self._awaits_headers and self.transport.get_protocol() is self:  # else it is a WebSocket by now
            self.transport.close()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's words
        """Answer what is no HTTP, unless an answer to what came before it is under way: that one is cut."""
        under_way: Any = self.cycle
        if under_way is None or under_way.response_complete or not under_way.response_started:
            problem = problem_of_http(HTTPException(HTTPStatus.BAD_REQUEST))
            body = msgspec.json.encode(problem)
            told = {**problem.headers, "content-type": MEDIA_TYPE, "content-length": str(len(body))}
            lines = "".join(f"{name}: {value}\r\n" for name, value in told.items())
            self.transport.write(
                f"HTTP/1.1 400 Bad Request\r\n{lines}connection: close\r\n\r\n".encode() + body
            )
        self.transport.close()


class _HeadFirst:
    """What an answer is written to before its body: a head that tells the body's length goes in one write with it.

    uvicorn writes two: each is a system call here, and a packet and a wake-up there.
    """

    def __init__(self, cycle: Any) -> None:  # noqa: ANN401 - of one of uvicorn's two kinds
        self._cycle = cycle
        self._transport: asyncio.Transport = cycle.transport
        self._head = b""

    def write(self, data: bytes) -> None:
        """Keep the head of a whole answer; write anything else, and leave."""
        is_head = not self._head and self._cycle.response_started
        if is_head and _LENGTH in data and self._cycle.scope["method"] != "HEAD":
            self._head = data
        else:
            self._leave()
            self._transport.write(self._head + data)

    def is_closing(self) -> bool:
        """See `asyncio.Transport`."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Let the head go alone: the body will not come."""
        self._leave()
        self._transport.write(self._head)
        self._transport.close()

    def _leave(self) -> None:
        self._cycle.transport = self._transport


class WebSockets(WebSocketsSansIOProtocol):
    """WebSockets of uvicorn, without compression."""

    def __init__(self, config: Config, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - handed on
        super().__init__(config, *args, **kwargs)
        self.conn = _Protocol(max_size=config.ws_max_size, logger=logging.getLogger("uvicorn.error"))

    def send_receive_event_to_app(self) -> None:
        """Hand a message on. Reading stops where another one waits as well: stopping for each costs system calls."""
        is_first = self.queue.empty()
        self.read_paused = is_first or self.read_paused
        super().send_receive_event_to_app()
        if is_first:
            self.read_paused = False

    async def send(self, message: Any) -> None:  # noqa: ANN401 - ASGI's, with a key of ours
        """Send a message; one that says that `more` follows goes with that, in one write."""
        if message.get("more") and self.conn.state is State.OPEN:
            self.conn.send_text(message["text"].encode())
        else:
            await super().send(message)


class _Protocol(ServerProtocol):
    def recv_frame(self, frame: Frame) -> None:
        """Take a frame; a close may come between the fragments of a message, which is then none (RFC 6455, 5.4).

        The library calls that a broken rule and closes with 1002, where the client is to hear its own code.
        """
        if frame.opcode is Opcode.CLOSE:
            self.current_size = None
        super().recv_frame(frame)

    def reject(self, status: HTTPStatus | int, text: str) -> Response:  # noqa: ARG002 - may quote what was sent
        """Return a problem in the place of the library's text."""
        is_ours = status == HTTPStatus.INTERNAL_SERVER_ERROR
        problem = internal_problem() if is_ours else problem_of_http(HTTPException(int(status)))
        body = msgspec.json.encode(problem)
        headers = Headers(problem.headers)
        headers.update({"connection": "close", "content-type": MEDIA_TYPE, "content-length": str(len(body))})
        return Response(problem.status, HTTPStatus(problem.status).phrase, headers, body)


HTTP: type[asyncio.Protocol] = PlainHttp
WEBSOCKETS: type[asyncio.Protocol] = WebSockets
