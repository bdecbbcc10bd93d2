"""A connection over a WebSocket: each frame is one text message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

import websockets
from typing_extensions import override
from websockets.asyncio.client import ClientConnection
from websockets.frames import CloseCode

from midstream.client.transports import (
    CLOSE_S,
    SERVER_FRAME_BYTES_MAX,
    Transport,
    refusal_of,
)
from midstream.environment import World
from midstream.errors import ConnectionLostError, FrameTooLargeError
from midstream.local_keys import is_loopback
from midstream.retries import CONNECT_S, retry_after_s


class CountingConnection(ClientConnection):
    """A connection that counts received bytes, so that an incomplete long frame does not count as silence."""

    received_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Count and process received bytes."""
        self.received_bytes += len(data)
        super().data_received(data)


class DirectConnect(websockets.connect):
    """A connection without redirects: secrets must reach only the given server (SEC-73)."""

    @override
    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc


class WebSocketTransport(Transport):
    """Transport of frames as messages of a WebSocket."""

    def __init__(self, connection: CountingConnection) -> None:
        self._connection = connection

    @property
    @override
    def received_bytes(self) -> int:
        return self._connection.received_bytes

    @override
    async def receive(self) -> bytes:
        try:
            return await self._connection.recv(decode=False)
        except websockets.ConnectionClosed as error:
            if error.rcvd is not None and error.rcvd.code == CloseCode.MESSAGE_TOO_BIG:
                raise FrameTooLargeError("a message is larger than the server or a proxy accepts") from error
            if error.sent is not None and error.sent.code == CloseCode.MESSAGE_TOO_BIG:
                raise FrameTooLargeError(
                    f"the server sent a frame of more than {SERVER_FRAME_BYTES_MAX} bytes"
                ) from error
            raise ConnectionLostError(f"the connection to the server was lost: {error}") from error

    @override
    async def send(self, frames: Sequence[bytes]) -> None:
        try:
            for frame in frames:
                await self._connection.send(frame, text=True)
        except websockets.ConnectionClosed:
            return

    @override
    async def close(self) -> None:
        await self._connection.close()


async def connect_websocket(
    url: str, *, headers: Mapping[str, str], world: World = World()
) -> WebSocketTransport:
    """Open a connection.

    Raises:
        MidstreamError: The connection failed; `retry` of the error determines whether to try again.
    """
    try:
        connection = await DirectConnect(
            url,
            additional_headers=dict(headers),
            create_connection=CountingConnection,
            compression=None,  # messages are short, and a compression window costs memory for each connection
            max_size=SERVER_FRAME_BYTES_MAX,
            open_timeout=CONNECT_S,
            close_timeout=CLOSE_S,
            ping_interval=None,  # the protocol has its own heartbeats
            proxy=None if is_loopback(urlsplit(url).hostname or "") else True,
        )
    except websockets.InvalidStatus as error:
        response = error.response
        wait_s = retry_after_s(response.headers.get("retry-after", ""), now=world.now())
        raise refusal_of(response.status_code, bytes(response.body or b""), wait_s) from error
    except (OSError, TimeoutError, websockets.InvalidHandshake) as error:
        reason = str(error) or type(error).__name__
        raise ConnectionLostError(f"the server cannot be reached: {reason}") from error
    assert isinstance(connection, CountingConnection), "`create_connection` was set"
    return WebSocketTransport(connection)
