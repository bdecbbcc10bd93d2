"""How a client reaches a server: a WebSocket for each connection of a stream.

Every fault of the network becomes `ConnectionLostError`, which the stream answers with a reconnect; a server that
refuses in words of HTTP becomes the error those words stand for.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Protocol
from urllib.parse import quote, urlsplit

import msgspec
import websockets
from msgspec import Struct
from websockets.asyncio.client import ClientConnection

from midstream.core.client_stream import error_of
from midstream.core.frames import Error
from midstream.core.timing import retry_after_s
from midstream.errors import (
    AccessError,
    ConnectionLostError,
    MidstreamError,
    NotFoundError,
    ProtocolError,
    UsageError,
)
from midstream.world import World

SERVER_FRAME_BYTES_MAX = 16 * 1024 * 1024
"""Largest frame taken from a server. A result is in its record up to 64 KiB; servers of before wrote up to 512 Ki
characters, with every one escaped 3 MiB. The longest reply a model can make in its limits is below the rest."""
CONNECT_S = 10.0
"""Seconds for a connection to be made."""
CLOSE_S = 1.0
"""Seconds for a server to answer a close; the stream does not need the answer."""
_TRY_AGAIN = frozenset((408, 421, 425, 429, 500, 502, 503, 504))
"""HTTP statuses after which the same request may succeed."""


class Transport(Protocol):
    """What carries the frames of one connection."""

    async def receive(self) -> bytes:
        """Return the next frame. Cancelling loses no frame.

        Raises:
            ConnectionLostError: There will be none.
        """

    async def send(self, frames: Sequence[bytes]) -> None:
        """Send frames in order; a connection that is gone is told by `receive`."""

    async def close(self) -> None:
        """End the connection, within a bound. Calling it twice is harmless."""


class Problem(Struct, frozen=True):
    """What matters of a problem detail (RFC 9457) that a server refuses with."""

    code: str
    detail: str = ""
    retry: str = "never"
    retry_after_s: float | None = None


class WebSocketTransport:
    """One message, one frame."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection

    async def receive(self) -> bytes:
        """See `Transport.receive`."""
        try:
            return await self._connection.recv(decode=False)
        except websockets.ConnectionClosed as error:
            raise ConnectionLostError(f"the connection to the server broke: {error}") from error

    async def send(self, frames: Sequence[bytes]) -> None:
        """See `Transport.send`."""
        try:
            for frame in frames:
                await self._connection.send(frame, text=True)
        except websockets.ConnectionClosed:
            return

    async def close(self) -> None:
        """See `Transport.close`."""
        await self._connection.close()


def stream_url(server: str, session: str) -> str:
    """Return the WebSocket address of a session's stream at the server `http(s)://host[:port][/path]`.

    Raises:
        UsageError: It is no such address.
    """
    parts = urlsplit(server)
    scheme = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}.get(parts.scheme)
    if scheme is None or not parts.hostname:
        raise UsageError(f"a server's address looks like 'http://127.0.0.1:8000', not {server!r}")
    path = parts.path.rstrip("/")
    return f"{scheme}://{parts.netloc}{path}/v1/sessions/{quote(session, safe='')}/stream"


async def connect_websocket(
    url: str, *, headers: Mapping[str, str], world: World = World()
) -> WebSocketTransport:
    """Make a connection.

    Raises:
        MidstreamError: It could not be made; its `retry` says whether to try again.
    """
    try:
        connection = await websockets.connect(
            url,
            additional_headers=dict(headers),
            compression=None,  # tokens are short, and a shared window costs memory for each connection
            max_size=SERVER_FRAME_BYTES_MAX,
            open_timeout=CONNECT_S,
            close_timeout=CLOSE_S,
            ping_interval=None,  # the protocol's heartbeats say more
            proxy=None if is_loopback(urlsplit(url).hostname or "") else True,
        )
    except websockets.InvalidStatus as error:
        response = error.response
        wait_s = retry_after_s(response.headers.get("retry-after", ""), now=world.now())
        raise refusal_of(response.status_code, bytes(response.body or b""), wait_s) from error
    except (OSError, TimeoutError, websockets.InvalidHandshake) as error:
        reason = str(error) or type(error).__name__
        raise ConnectionLostError(f"the server cannot be reached: {reason}") from error
    return WebSocketTransport(connection)


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own, which no proxy can reach."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def refusal_of(status: int, body: bytes, wait_s: float | None = None) -> MidstreamError:
    """Return what an HTTP refusal means: the server's own words where it is ours, else what its status says.

    Args:
        wait_s: Seconds it asked to wait, beside its words.
    """
    try:
        problem = msgspec.json.decode(body, type=Problem)
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    else:
        return error_of(
            Error(problem.code, problem.detail, problem.retry, retry_after_s=problem.retry_after_s)
        )
    message = f"the server refused the connection with HTTP status {status}"
    if status in _TRY_AGAIN:
        return ConnectionLostError(message, retry_after_s=wait_s)
    if status in {401, 403, 407}:
        return AccessError(message)
    if status in {404, 410}:
        return NotFoundError(f"{message}: is a midstream server at this address?")
    return ProtocolError(message)
