"""Protocols of uvicorn with additional limits below ASGI.

- Endless headers, trailers and handshakes are refused; uvicorn would wait for them and store them.
- A refusal below the app is a problem detail that quotes no input.
- Connections and held bytes are counted before authentication (`raw_connections`).
- A client can detect an answer that was cut, also in HTTP/1.0 (STREAM-27), where a body has no chunks.

uvicorn has no public hook for these, so this module overrides its methods and uses its attributes. Each change has a
test in `tests/server/test_uvicorn_protocols.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import msgspec
from starlette.exceptions import HTTPException
from uvicorn.config import Config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.datastructures import Headers
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.server import ServerProtocol

from midstream.server.api.problems import MEDIA_TYPE, Problem, internal_problem, problem_of_http
from midstream.server.raw_connections import RawConnections

try:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as HttpProtocol
except ImportError:  # uvicorn is installed without httptools
    from uvicorn.protocols.http.h11_impl import H11Protocol as HttpProtocol  # type: ignore[assignment]

HEADERS_S = 10.0
"""Seconds for the headers of a request. A slow sender would hold an unauthenticated connection."""
HELD_BYTES_MAX = 64 * 1024
"""Bytes of an incomplete request line with headers, or of incomplete trailers. h11 has the same limit; the app accepts
less (`Limits.header_bytes_max`)."""
_CHUNKED = b"\r\ntransfer-encoding: chunked"
_CLOSE = b"\r\nconnection: close"
_LINGER = "ii" if os.name == "posix" else "hh"
_RESET = struct.pack(_LINGER, 1, 0)
_END = struct.pack(_LINGER, 0, 0)
"""How the system closes a connection, also when this process dies: by a reset, or by an ordinary end."""


class PlainHttp(HttpProtocol):
    """HTTP/1.1 of uvicorn."""

    url = b""
    """The received part of the URL."""
    _late: asyncio.TimerHandle | None = None
    _held_bytes = 0
    """Bytes received since the last complete request head or piece of a body."""
    _is_reset_at_end = False

    def __init__(self, *args: Any, raw: RawConnections, **kwargs: Any) -> None:  # noqa: ANN401 - handed on
        super().__init__(*args, **kwargs)
        self._raw = raw

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request, or refuse the connection if a limit is reached."""
        super().connection_made(transport)
        if self._raw.enter(transport, self.client[0] if self.client else ""):
            self._watch()
        else:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting for headers, and stop counting the connection."""
        if self._is_reset_at_end and self._is_answered:
            self._close_with(_END)
        super().connection_lost(exc)
        self._raw.leave(self.transport)
        self._stop_watching()

    def on_headers_complete(self) -> None:
        """Begin a request; refuse transfer codings other than `chunked`."""
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        if any(coding != b"chunked" for coding in codings):
            raise ValueError(
                "only the transfer coding `chunked` is accepted"
            )  # uvicorn refuses what it cannot parse
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, enforce the limits, and start or stop the timer for the rest of the headers."""
        before: Any = self.cycle  # None before the first request
        read = len(before.body) if before is not None else 0
        super().data_received(data)
        if self.transport.get_protocol() is not self:
            self._stop_watching()
            self._raw.hold(self.transport, 0)
            self.parser: Any = None  # breaks a reference cycle of protocol and parser
            return
        begun: Any = self.cycle
        has_read = begun is not before or (begun is not None and len(begun.body) > read)
        self._held_bytes = 0 if has_read else self._held_bytes + len(data)
        if not self._raw.hold(self.transport, self._held_bytes) and not self.transport.is_closing():
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE)
        if self._held_bytes > HELD_BYTES_MAX and not self.transport.is_closing():
            is_address = len(self.url) > HELD_BYTES_MAX // 2
            self._refuse(HTTPStatus(414 if is_address else 431))
        if begun is None or begun.response_complete:
            self._watch()
            return
        self._stop_watching()
        if not self._is_reset_at_end and begun.scope["http_version"] == "1.0":
            # The end of the connection is the end of the body. An interrupted answer needs a reset instead (STREAM-27).
            self._is_reset_at_end = True
            self._close_with(_RESET)
            begun.transport = _Unframed(begun)

    def _close_with(self, linger: bytes) -> None:
        with contextlib.suppress(OSError):  # already closed
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    @property
    def _is_answered(self) -> bool:
        under_way: Any = self.cycle  # None before the first request
        return under_way is None or bool(under_way.response_complete)

    @property
    def _awaits_headers(self) -> bool:
        return self._is_answered and self.timeout_keep_alive_task is None

    def _watch(self) -> None:
        if self._late is None and self._awaits_headers:
            self._late = self.loop.call_later(HEADERS_S, self._give_up)

    def _stop_watching(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _give_up(self) -> None:
        self._late = None
        if (
            self._awaits_headers and self.transport.get_protocol() is self
        ):  # else the connection is a WebSocket
            self.transport.close()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's terms
        """Refuse bytes that are not HTTP, or an address that is too long for uvicorn's parser."""
        is_too_long = len(self.url) >= HELD_BYTES_MAX
        self._refuse(HTTPStatus.REQUEST_URI_TOO_LONG if is_too_long else HTTPStatus.BAD_REQUEST)

    def _refuse(self, status: HTTPStatus) -> None:
        """Send a refusal and close. If an earlier answer is in progress, interrupt it instead."""
        under_way: Any = self.cycle
        if under_way is None or under_way.response_complete or not under_way.response_started:
            self.transport.write(_refusal(status))
        self.transport.close()


class _Unframed:
    """Transport of an HTTP/1.0 answer: the body has no chunks, and ends with the connection (RFC 9112, 6.1).

    uvicorn with httptools sends chunks to every client (h11 does not).
    """

    def __init__(self, cycle: Any) -> None:  # noqa: ANN401 - of one of uvicorn's two kinds
        self._cycle = cycle
        self._transport: asyncio.Transport = cycle.transport
        self._has_chunks: bool | None = None
        self.is_closing = self._transport.is_closing
        self.close = self._transport.close

    def write(self, data: bytes) -> None:
        """Write the head, or the contents of chunks."""
        if self._has_chunks is None:
            head, end, body = data.partition(b"\r\n\r\n")
            self._has_chunks = _CHUNKED in head
            if self._has_chunks:
                head = head.replace(_CHUNKED, b"" if _CLOSE in head else _CLOSE)
                self._cycle.keep_alive = False
            self._transport.write(head + end + body)
        elif self._has_chunks:
            self._transport.write(_within_chunks(data))
        else:
            self._transport.write(data)


def _within_chunks(data: bytes) -> bytes:
    pieces: list[bytes] = []
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        pieces.append(data[:length])
        data = data[length + 2 :]
    return b"".join(pieces)


class WebSockets(WebSocketsSansIOProtocol):
    """WebSockets of uvicorn."""

    def __init__(self, config: Config, *args: Any, raw: RawConnections, **kwargs: Any) -> None:  # noqa: ANN401 - handed on
        super().__init__(config, *args, **kwargs)
        self._raw = raw
        self.conn = _Protocol(max_size=config.ws_max_size, logger=self.logger)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop counting the connection."""
        super().connection_lost(exc)
        self._raw.leave(self.transport)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes. Refuse an incomplete handshake, for which uvicorn would wait."""
        super().data_received(data)
        if not self.handshake_initiated:
            # The library has a refusal only for a handshake that is too long.
            self.transport.write(b"".join(self.conn.data_to_send()) or _refusal(HTTPStatus.BAD_REQUEST))
            self.transport.close()


def _refusal(status: HTTPStatus) -> bytes:
    """Return a complete response with a problem detail that closes the connection."""
    return _response_of(problem_of_http(HTTPException(status))).serialize()


def _response_of(problem: Problem) -> Response:
    body = msgspec.json.encode(problem)
    headers = Headers(problem.headers)
    headers.update({"connection": "close", "content-type": MEDIA_TYPE, "content-length": str(len(body))})
    return Response(problem.status, HTTPStatus(problem.status).phrase, headers, body)


class _Protocol(ServerProtocol):
    def recv_frame(self, frame: Frame) -> None:
        """Handle a frame. A close frame may come between the fragments of a message (RFC 6455, 5.4).

        The library treats that as an error and closes with 1002; the client must receive its own code instead.
        """
        if frame.opcode is Opcode.CLOSE:
            self.current_size = None
        super().recv_frame(frame)

    def reject(self, status: HTTPStatus | int, text: str) -> Response:  # noqa: ARG002 - may quote the request
        """Return a problem detail instead of the library's text."""
        is_ours = status == HTTPStatus.INTERNAL_SERVER_ERROR
        return _response_of(internal_problem() if is_ours else problem_of_http(HTTPException(int(status))))


def protocols(raw: RawConnections) -> tuple[type[asyncio.Protocol], type[asyncio.Protocol]]:
    """Return factories of the HTTP and WebSocket protocols of one server, typed as the classes that uvicorn expects."""
    http, websockets = partial(PlainHttp, raw=raw), partial(WebSockets, raw=raw)
    return cast("type[asyncio.Protocol]", http), cast("type[asyncio.Protocol]", websockets)
