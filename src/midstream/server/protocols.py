"""What is refused below ASGI, where no app was asked: requests that are no HTTP, handshakes that are none.

uvicorn and `websockets` answer these in plain text; here they are problems as everywhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from uvicorn.config import Config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.datastructures import Headers
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.server import ServerProtocol

from midstream.server.problems import MEDIA_TYPE, internal_problem, problem_of_http

try:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as HttpProtocol
except ImportError:  # an install without compiled parts
    from uvicorn.protocols.http.h11_impl import H11Protocol as HttpProtocol  # type: ignore[assignment]


HEADERS_S = 10.0
"""Seconds for the headers of a request: who sends them a byte at a time holds a connection, and is nobody yet."""


_LINGER = "ii" if os.name == "posix" else "hh"
_RESET = struct.pack(_LINGER, 1, 0)
_END = struct.pack(_LINGER, 0, 0)
"""What becomes of a connection that is closed, by us or by the system when this process dies."""


class PlainHttp(HttpProtocol):
    """HTTP/1.1 of uvicorn."""

    _late: asyncio.TimerHandle | None = None
    _is_reset_at_end = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer, and let a whole answer end as such."""
        if self._is_reset_at_end and self._is_answered:
            self._close_with(_END)
        super().connection_lost(exc)
        if self._late is not None:
            self._late.cancel()

    def data_received(self, data: bytes) -> None:
        """Take what came, and wait for the rest of a request's headers, or no longer."""
        super().data_received(data)
        self._watch()
        if not self._is_reset_at_end and not self._is_answered and self.cycle.scope["http_version"] == "1.0":
            # The end of its body is the end of the connection: one that is cut must not look like that (STREAM-27).
            self._is_reset_at_end = True
            self._close_with(_RESET)

    def _close_with(self, linger: bytes) -> None:
        with contextlib.suppress(OSError):  # it is gone
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    @property
    def _is_answered(self) -> bool:
        under_way: Any = self.cycle  # None before the first request
        return under_way is None or bool(under_way.response_complete)

    @property
    def _awaits_headers(self) -> bool:
        return self._is_answered and self.timeout_keep_alive_task is None

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


class WebSockets(WebSocketsSansIOProtocol):
    """WebSockets of uvicorn, without compression."""

    def __init__(self, config: Config, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - handed on
        super().__init__(config, *args, **kwargs)
        self.conn = _Protocol(max_size=config.ws_max_size, logger=logging.getLogger("uvicorn.error"))


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
