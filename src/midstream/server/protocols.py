"""What uvicorn's protocols do below ASGI, where no app is asked, and what they lack there.

- What is no HTTP, or no handshake, or has no end, is refused by a problem, not in plain text or never.
- An answer that is cut looks cut, in HTTP/1.0 too (STREAM-27), where a body has no chunks.
- Of a handshake nothing is kept while its WebSocket lasts, and what belongs together goes in one write.

It stands in methods that uvicorn calls, and in attributes that it has: `tests/server/test_protocols.py` asks for each.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from websockets.protocol import State
from websockets.server import ServerProtocol

from midstream.server.bodies import WHOLE
from midstream.server.problems import MEDIA_TYPE, Problem, internal_problem, problem_of_http

try:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as HttpProtocol
except ImportError:  # an install without compiled parts
    from uvicorn.protocols.http.h11_impl import H11Protocol as HttpProtocol  # type: ignore[assignment]

HEADERS_S = 10.0
"""Seconds for the headers of a request: who sends them a byte at a time holds a connection, and is nobody yet."""
HELD_BYTES_MAX = 64 * 1024
"""Bytes of a request line and its headers, or of trailers, that wait for their end: what is sent without one would
fill the memory. h11 has the same limit by itself; what an app may be asked is less (`Limits.header_bytes_max`)."""
_LENGTH = b"\r\ncontent-length: "
_CHUNKED = b"\r\ntransfer-encoding: chunked"
_CLOSE = b"\r\nconnection: close"
_LINGER = "ii" if os.name == "posix" else "hh"
_RESET = struct.pack(_LINGER, 1, 0)
_END = struct.pack(_LINGER, 0, 0)
"""What becomes of a connection that is closed, by us or by the system when this process dies."""


class PlainHttp(HttpProtocol):
    """HTTP/1.1 of uvicorn."""

    url = b""
    """As much of the address as came."""
    _late: asyncio.TimerHandle | None = None
    _held_bytes = 0
    """Bytes that came since the last request or piece of a body was read."""
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
        before: Any = self.cycle  # None before the first request
        read = len(before.body) if before is not None else 0
        super().data_received(data)
        if self.transport.get_protocol() is not self:
            self._let_go()
            return
        begun: Any = self.cycle
        has_read = begun is not before or (begun is not None and len(begun.body) > read)
        self._held_bytes = 0 if has_read else self._held_bytes + len(data)
        if self._held_bytes > HELD_BYTES_MAX and not self.transport.is_closing():
            is_address = len(self.url) > HELD_BYTES_MAX // 2
            self._refuse(HTTPStatus(414 if is_address else 431))
        if begun is not None and begun.transport is self.transport and not begun.response_started:
            if begun.scope["http_version"] == "1.0":
                begun.transport = _Unframed(begun)
            begun.transport = _HeadFirst(begun)
            if not begun.more_body:
                begun.scope[WHOLE] = True
        if begun is None or begun.response_complete:
            self._watch()
            return
        if self._late is not None:
            self._late.cancel()
            self._late = None
        if not self._is_reset_at_end and begun.scope["http_version"] == "1.0":
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

    def _let_go(self) -> None:
        """End with the handshake: the parser and this hold each other, for as long as nobody collects garbage."""
        if self._late is not None:
            self._late.cancel()
        self.parser: Any = None

    @property
    def _awaits_headers(self) -> bool:
        return self._is_answered and self.timeout_keep_alive_task is None

    def _watch(self) -> None:
        if self._late is None and self._awaits_headers:
            self._late = self.loop.call_later(HEADERS_S, self._give_up)

    def _give_up(self) -> None:
        self._late = None
        if self._awaits_headers and self.transport.get_protocol() is self:  # else it is a WebSocket by now
            self.transport.close()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's words
        """Answer what is no HTTP."""
        self._refuse(HTTPStatus.BAD_REQUEST)

    def _refuse(self, status: HTTPStatus) -> None:
        """Answer and close, unless an answer to what came before is under way: that one is cut."""
        under_way: Any = self.cycle
        if under_way is None or under_way.response_complete or not under_way.response_started:
            self.transport.write(_refusal(status))
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


class _Unframed:
    """What an answer in HTTP/1.0 is written to: its body has no chunks, and ends with the connection (RFC 9112, 6.1).

    uvicorn cuts a body of unknown length into chunks whoever asks (h11 does not).
    """

    def __init__(self, cycle: Any) -> None:  # noqa: ANN401 - of one of uvicorn's two kinds
        self._cycle = cycle
        self._transport: asyncio.Transport = cycle.transport
        self._has_chunks: bool | None = None
        self.is_closing = self._transport.is_closing
        self.close = self._transport.close

    def write(self, data: bytes) -> None:
        """Write the head, or what is in the chunks of a body."""
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
    """Return what whole chunks carry."""
    pieces: list[bytes] = []
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        pieces.append(data[:length])
        data = data[length + 2 :]
    return b"".join(pieces)


class WebSockets(WebSocketsSansIOProtocol):
    """WebSockets of uvicorn, of which less is kept as long as one lasts."""

    def __init__(self, config: Config, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - handed on
        super().__init__(config, *args, **kwargs)
        # A second one in its place would leave the first to the garbage collector.
        self.conn.__class__ = _Protocol
        self.queue: Any = _Inbox()

    def start_keepalive(self) -> None:
        """Begin to ping, and forget what was said in the handshake, which is over."""
        super().start_keepalive()
        self.request.headers.clear()
        self.response.headers.clear()

    def data_received(self, data: bytes) -> None:
        """Take what came. A handshake comes whole: one that is none by now is refused, where uvicorn would wait."""
        super().data_received(data)
        if not self.handshake_initiated:
            # Its words for what is too long; for the rest it has none.
            self.transport.write(b"".join(self.conn.data_to_send()) or _refusal(HTTPStatus.BAD_REQUEST))
            self.transport.close()

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


class _Inbox:
    """What an app is to be told, in order: what uvicorn uses of an `asyncio.Queue`, which has 3 KiB while empty."""

    __slots__ = ("_arrival", "_waiting")

    def __init__(self) -> None:
        self._waiting: list[Any] = []
        self._arrival: asyncio.Future[None] | None = None

    def empty(self) -> bool:
        return not self._waiting

    def put_nowait(self, message: Any) -> None:  # noqa: ANN401 - uvicorn's
        self._waiting.append(message)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def get(self) -> Any:  # noqa: ANN401 - uvicorn's
        while not self._waiting:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        return self._waiting.pop(0)


def _refusal(status: HTTPStatus) -> bytes:
    """Return a whole answer that is a problem, after which the connection is closed."""
    return _told(problem_of_http(HTTPException(status))).serialize()


def _told(problem: Problem) -> Response:
    body = msgspec.json.encode(problem)
    headers = Headers(problem.headers)
    headers.update({"connection": "close", "content-type": MEDIA_TYPE, "content-length": str(len(body))})
    return Response(problem.status, HTTPStatus(problem.status).phrase, headers, body)


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
        return _told(internal_problem() if is_ours else problem_of_http(HTTPException(int(status))))


HTTP: type[asyncio.Protocol] = PlainHttp
WEBSOCKETS: type[asyncio.Protocol] = WebSockets
