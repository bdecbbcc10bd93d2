"""What is refused below ASGI, where no app was asked: requests that are no HTTP, handshakes that are none.

uvicorn answers these in plain text; here they are problems as everywhere else. What is a handshake goes on as an
`AsgiSocket`.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.types import Scope

from midstream.server.problems import MEDIA_TYPE, problem_of_http
from midstream.server.sockets import AsgiSocket, answer_to, scope_of

try:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as HttpProtocol
except ImportError:  # an install without compiled parts
    from uvicorn.protocols.http.h11_impl import H11Protocol as HttpProtocol  # type: ignore[assignment]


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
        self._watch()

    def handle_websocket_upgrade(self, *event: Any) -> None:  # noqa: ANN401 - one of uvicorn's parsers gives what it read
        """Go on as a WebSocket, by what was read already."""
        self.connections.discard(self)
        asked: Scope = {**self.scope}
        answer = answer_to(asked)
        if answer is None:
            self.send_400_response("")
            return
        target: bytes = event[0].target if event else self.url
        AsgiSocket(self.config, self.server_state, self.transport, scope_of(asked, target), answer)

    @property
    def _awaits_headers(self) -> bool:
        under_way: Any = self.cycle  # None before the first request
        is_idle = under_way is None or under_way.response_complete
        is_http = self.transport.get_protocol() is self  # else it is a WebSocket by now
        return is_http and is_idle and self.timeout_keep_alive_task is None

    def _watch(self) -> None:
        if not self._awaits_headers:
            if self._late is not None:
                self._late.cancel()
                self._late = None
        elif self._late is None:
            self._late = self.loop.call_later(HEADERS_S, self._give_up)

    def _give_up(self) -> None:
        self._late = None
        if self._awaits_headers:
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


HTTP: type[asyncio.Protocol] = PlainHttp
WEBSOCKETS: type[asyncio.Protocol] = AsgiSocket
