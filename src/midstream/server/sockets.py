"""A WebSocket below ASGI: the frames of `websockets`, without I/O, and as little beside them as one of thousands needs.

uvicorn's own class reads each handshake a second time and keeps what it read, a parser and four queues for as long as
the socket is open: most of what it costs a reader to come back, and a third of what an idle one holds.

    asked ──accept──▶ open ──close, of either side──▶ over
      └──close, or a status: refused──────────────────▲
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import logging
from collections import deque
from contextlib import suppress
from enum import Enum
from http import HTTPStatus
from urllib.parse import unquote

import msgspec
from starlette.exceptions import HTTPException
from starlette.types import Message, Scope
from uvicorn.config import Config
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.server import ServerState
from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import Protocol, Side

from midstream.server.problems import MEDIA_TYPE, Problem, internal_problem, problem_of_http

KEY_BYTES = 16
CLOSE_S = 10.0
"""Seconds for the client's half of a closing handshake."""
CORKED_MAX = 8
"""Pieces that go out with the answer to the handshake: a welcome, a snapshot, the events in memory."""
_MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"

_log = logging.getLogger("uvicorn.error")


def answer_to(scope: Scope) -> bytes | None:
    """Return what answers the key of a handshake; None where it is none (RFC 6455, section 4.2.1)."""
    keys = [value for name, value in scope["headers"] if name == b"sec-websocket-key"]
    versions = [value for name, value in scope["headers"] if name == b"sec-websocket-version"]
    if (scope["method"], scope["http_version"], versions) != ("GET", "1.1", [b"13"]) or len(keys) != 1:
        return None
    try:
        is_key = len(base64.b64decode(keys[0], validate=True)) == KEY_BYTES
    except binascii.Error:
        return None
    return (
        base64.b64encode(hashlib.sha1(keys[0] + _MAGIC, usedforsecurity=False).digest()) if is_key else None
    )


def scope_of(scope: Scope, target: bytes) -> Scope:
    """Return the scope of a WebSocket.

    Args:
        scope: That of the request.
        target: What it asked for.
    """
    raw_path, _, query = target.partition(b"?")
    root: str = scope["root_path"]
    offered = b",".join(value for name, value in scope["headers"] if name == b"sec-websocket-protocol")
    what_was_asked = {name: value for name, value in scope.items() if name != "method"}
    return {
        **what_was_asked,
        "type": "websocket",
        "asgi": {**scope["asgi"], "spec_version": "2.4"},
        "scheme": "wss" if scope["scheme"] == "https" else "ws",
        "path": root + unquote(raw_path.decode("ascii")),
        "raw_path": root.encode("ascii") + raw_path,
        "query_string": query,
        "subprotocols": [each.strip() for each in offered.decode("latin-1").split(",") if each.strip()],
        "extensions": {"websocket.http.response": {}},
    }


class _Stage(Enum):
    ASKED = "asked"
    OPEN = "open"
    OVER = "over"


class _Frames(Protocol):
    def recv_frame(self, frame: Frame) -> None:
        """Take a frame; a close may come between the fragments of a message, which is then none (RFC 6455, 5.4).

        The library calls that a broken rule and closes with 1002, where the client is to hear its own code.
        """
        if frame.opcode is Opcode.CLOSE:
            self.current_size = None
        super().recv_frame(frame)


class AsgiSocket(asyncio.Protocol):
    """One WebSocket from its handshake to its end; uvicorn knows it by `shutdown`.

    Nothing is compressed: that is half the client's time and much memory, for words that come a few at a time.

    Args:
        config, state: uvicorn's. `ws_ping_interval` is between two pings, and for the answer to one.
        transport: Where the handshake came; it is this one's from now on.
        scope: `scope_of` the handshake.
        answer: `answer_to` it.
    """

    __slots__ = (
        "_answer",
        "_arrival",
        "_config",
        "_corked",
        "_frames",
        "_heard",
        "_is_paused",
        "_is_text",
        "_pieces",
        "_pinged",
        "_pings",
        "_refusal",
        "_scope",
        "_stage",
        "_state",
        "_timer",
        "_transport",
        "_writable",
    )

    def __init__(
        self, config: Config, state: ServerState, transport: asyncio.Transport, scope: Scope, answer: bytes
    ) -> None:
        self._config = config
        self._state = state
        self._transport = transport
        self._scope = scope
        self._answer = answer
        self._frames = _Frames(Side.SERVER, max_size=config.ws_max_size, logger=_log)
        self._stage = _Stage.ASKED
        self._heard: deque[Message] = deque([{"type": "websocket.connect"}])
        self._arrival: asyncio.Future[None] | None = None
        self._is_paused = False
        self._writable: asyncio.Event | None = None
        """Set when more may be written; None while it may."""
        self._pieces: list[bytes] = []
        self._is_text = False
        self._refusal: Message = {}
        self._corked: list[bytes] = []
        """The answer to the handshake, and what is said before the loop has turned: one packet."""
        self._pings = 0
        self._pinged = b""
        """What the client has not answered yet."""
        self._timer: asyncio.TimerHandle | None = None

        transport.set_protocol(self)
        state.connections.add(self)  # type: ignore[arg-type]  # uvicorn names its own classes
        task = asyncio.get_running_loop().create_task(self._serve())
        state.tasks.add(task)
        task.add_done_callback(self._served)

    # --- what the app asks for ----------------------------------------------------------------------------------

    async def receive(self) -> Message:
        """Return what happened next, as ASGI says. Cancelling loses nothing."""
        while not self._heard:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        message = self._heard.popleft()
        if self._is_paused and not self._heard:
            self._is_paused = False
            self._transport.resume_reading()
        return message

    async def send(self, message: Message) -> None:
        """Do what an ASGI message says, when the client has taken enough of what was written before.

        Raises:
            ClientDisconnected: The client has gone, or the socket was closed here.
        """
        if self._writable is not None:
            await self._writable.wait()
        if self._stage is _Stage.OVER:
            raise ClientDisconnected
        if self._stage is _Stage.OPEN:
            self._say(message)
        else:
            self._reply(message)

    # --- what the network brings ---------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._frames.receive_data(data)
        for frame in self._frames.events_received():
            assert isinstance(frame, Frame), "the handshake is over"
            if self._stage is not _Stage.OVER:
                self._take(frame)
        if self._frames.parser_exc is not None:
            assert self._frames.close_sent is not None, "the library says why it reads no further"
            self._end(self._frames.close_sent.code)
        self._write()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's shape
        """See `asyncio.Protocol`."""
        self._is_paused = False
        self._corked.clear()
        self._end(CloseCode.ABNORMAL_CLOSURE)
        if self._timer is not None:
            self._timer.cancel()
        self.resume_writing()
        self._state.connections.discard(self)

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._writable = asyncio.Event()

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        if self._writable is not None:
            self._writable.set()
            self._writable = None

    def shutdown(self) -> None:
        """Say goodbye: the server ends."""
        if self._stage is _Stage.ASKED:
            self._refuse(internal_problem())
        elif self._stage is _Stage.OPEN:
            self._frames.send_close(CloseCode.SERVICE_RESTART)
            self._end(CloseCode.SERVICE_RESTART)
            self._write()
        self._hang_up()

    # --- how -------------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        with suppress(ClientDisconnected):
            await self._config.loaded_app(self._scope, self.receive, self.send)

    def _served(self, task: asyncio.Task[None]) -> None:
        self._state.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("Exception in ASGI application", exc_info=error)
        if self._stage is _Stage.ASKED:
            self._refuse(internal_problem())
        elif self._stage is _Stage.OPEN and self._writable is not None:
            self._transport.abort()  # who does not read is not waited for
        elif self._stage is _Stage.OPEN:
            self._hang_up()  # without a word: whoever reads knows that this was no end

    def _reply(self, message: Message) -> None:
        match message["type"]:
            case "websocket.accept":
                self._accept(message)
            case "websocket.close":
                self._refuse(problem_of_http(HTTPException(HTTPStatus.FORBIDDEN)))
            case "websocket.http.response.start":
                self._refusal = {**message, "body": b""}
            case "websocket.http.response.body":
                self._refusal["body"] += message.get("body", b"")
                if not message.get("more_body"):
                    self._answer_with(
                        self._refusal["status"], self._refusal["headers"], self._refusal["body"]
                    )
            case other:
                raise RuntimeError(f"{other!r} before the handshake was answered")

    def _accept(self, message: Message) -> None:
        lines = [
            b"HTTP/1.1 101 Switching Protocols",
            b"upgrade: websocket\r\nconnection: Upgrade\r\nsec-websocket-accept: " + self._answer,
        ]
        if chosen := message.get("subprotocol"):
            lines.append(b"sec-websocket-protocol: " + chosen.encode("latin-1"))
        headers = [*self._state.default_headers, *message.get("headers", ())]
        lines += [name + b": " + value for name, value in headers]
        self._corked = [b"\r\n".join((*lines, b"\r\n"))]
        asyncio.get_running_loop().call_soon(self._uncork)
        self._stage = _Stage.OPEN
        self._ping_later()

    def _refuse(self, problem: Problem) -> None:
        headers = {**problem.headers, "content-type": MEDIA_TYPE}
        told = [(name.encode(), value.encode()) for name, value in headers.items()]
        self._answer_with(problem.status, told, msgspec.json.encode(problem))

    def _answer_with(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        told = [*self._state.default_headers, *headers, (b"content-length", str(len(body)).encode())]
        lines = [b"HTTP/1.1 %d %b" % (status, HTTPStatus(status).phrase.encode()), b"connection: close"]
        lines += [name + b": " + value for name, value in told]
        self._transport.write(b"\r\n".join((*lines, b"", body)))
        self._end(CloseCode.ABNORMAL_CLOSURE)
        self._hang_up()

    def _say(self, message: Message) -> None:
        match message:
            case {"type": "websocket.send", "text": str(text)}:
                self._frames.send_text(text.encode())
            case {"type": "websocket.send"}:
                self._frames.send_binary(message["bytes"])
            case {"type": "websocket.close"}:
                self._frames.send_close(
                    message.get("code", CloseCode.NORMAL_CLOSURE), message.get("reason") or ""
                )
                self._end(CloseCode.NORMAL_CLOSURE)
                self._timer = asyncio.get_running_loop().call_later(CLOSE_S, self._hang_up)
            case _:
                raise RuntimeError(f"{message['type']!r} on an open socket")
        self._write()

    def _write(self) -> None:
        said = self._frames.data_to_send()
        if self._corked:
            self._corked += said
            if len(self._corked) > CORKED_MAX:
                self._uncork()
        else:
            self._transport.write(b"".join(said))
        if self._frames.eof_sent:
            self._hang_up()

    def _uncork(self) -> None:
        if self._corked:
            self._transport.write(b"".join(self._corked))
            self._corked.clear()

    def _hang_up(self) -> None:
        self._uncork()
        self._transport.close()

    def _take(self, frame: Frame) -> None:
        match frame.opcode:
            case Opcode.TEXT | Opcode.BINARY | Opcode.CONT:
                if frame.opcode is not Opcode.CONT:
                    self._is_text = frame.opcode is Opcode.TEXT
                self._pieces.append(bytes(frame.data))
                if frame.fin:
                    self._hear_message()
            case Opcode.PONG if frame.data == self._pinged:
                self._pinged = b""
            case Opcode.CLOSE:
                assert self._frames.close_rcvd is not None, "it was read"
                self._end(self._frames.close_rcvd.code)
            case _:
                pass  # the library answers pings, and nobody has to answer a pong

    def _hear_message(self) -> None:
        body = b"".join(self._pieces)
        self._pieces.clear()
        if not self._is_text:
            self._hear({"type": "websocket.receive", "bytes": body})
        else:
            try:
                self._hear({"type": "websocket.receive", "text": body.decode()})
            except UnicodeDecodeError:
                self._frames.fail(CloseCode.INVALID_DATA)
                self._end(CloseCode.INVALID_DATA)
                return
        if not self._is_paused:  # one message at a time: what the app has not taken waits on the other side
            self._is_paused = True
            self._transport.pause_reading()

    def _hear(self, message: Message) -> None:
        self._heard.append(message)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def _end(self, code: int) -> None:
        """Let the app do no more but hear of the end. Calling it again is harmless."""
        if self._stage is _Stage.OVER:
            return
        self._stage = _Stage.OVER
        if self._timer is not None:
            self._timer.cancel()
        if self._is_paused:  # the client's half of a close is to be read
            self._is_paused = False
            self._transport.resume_reading()
        self._hear({"type": "websocket.disconnect", "code": code})

    def _ping_later(self) -> None:
        if self._config.ws_ping_interval:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._config.ws_ping_interval, self._ping)

    def _ping(self) -> None:
        if self._pinged:
            self._frames.fail(CloseCode.INTERNAL_ERROR, "keepalive ping timeout")
            self._end(CloseCode.INTERNAL_ERROR)
        else:
            self._pings += 1
            self._pinged = b"%d" % self._pings
            self._frames.send_ping(self._pinged)
            self._ping_later()
        self._write()
