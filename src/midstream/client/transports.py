"""Transports of a client's connections, and the parts that all of them share.

Every fault of the network becomes `ConnectionLostError`, which the stream answers with a reconnect; a server that
refuses in words of HTTP becomes the error those words stand for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Protocol
from urllib.parse import quote, urlsplit

import msgspec
from msgspec import Struct

from midstream.errors import (
    AccessError,
    ConnectionLostError,
    MidstreamError,
    NotFoundError,
    ProtocolError,
    UnauthorizedError,
    UsageError,
)
from midstream.protocol.frame_errors import error_of
from midstream.protocol.frames import Error

SERVER_FRAME_BYTES_MAX = 16 * 1024 * 1024
"""Largest frame taken from a server. A result is in its record up to 64 KiB; servers of before wrote up to 512 Ki
characters, with every one escaped 3 MiB. The longest response a model can make in its limits is below the rest."""
CONNECT_S = 10.0
"""Seconds for a connection to be made."""
CLOSE_S = 1.0
"""Seconds for a server to answer a close; the stream does not need the answer."""
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
PROBLEM_TYPE = "urn:midstream:error:"
"""What the `type` of a problem begins with where a server of ours refuses."""
_TRY_AGAIN = frozenset((408, 421, 425, 429))
_NEVER_THERE = frozenset((501, 505))
"""Of the statuses from 500 on, those after which the same request will not succeed (as one for a WebSocket)."""
_REDIRECTS = range(300, 400)
_SERVER_ERRORS = 500


class Transport(Protocol):
    """Transport of the frames of one connection."""

    @property
    def received_bytes(self) -> int:
        """How many bytes came so far, also of a frame that is not whole: a sign of life (STREAM-46)."""

    async def receive(self) -> bytes:
        """Return the next frame. Cancelling loses no frame.

        Raises:
            MidstreamError: There will be none; its `retry` is whether another connection may have some.
        """

    async def send(self, frames: Sequence[bytes]) -> None:
        """Send frames in order; a connection that is gone is reported by `receive`."""

    async def close(self) -> None:
        """End the connection, within a bound. Calling it twice is harmless."""


class RefusalProblem(Struct, frozen=True):
    """Facts that matter of a problem detail (RFC 9457) that a server refuses with."""

    type: str
    code: str
    detail: str = ""
    retry: str = "never"
    retry_after_s: float | None = None
    expected: int | None = None


def base_url(server: str) -> str:
    """Return the address `http(s)://host[:port][/path]` of a server, without a slash at its end.

    Raises:
        UsageError: It is no such address.
    """
    wrong = f"a server's address must look like 'http://127.0.0.1:8000'; got {server!r}"
    try:
        parts = urlsplit(server)
        parts.port  # noqa: B018 - read, and refused where it is no port
    except ValueError as error:
        raise UsageError(f"{wrong} ({error})") from error
    scheme = {"http": "http", "https": "https", "ws": "http", "wss": "https"}.get(parts.scheme)
    if scheme is None or not parts.hostname:
        raise UsageError(wrong)
    return f"{scheme}://{parts.netloc}{parts.path.rstrip('/')}"


def websocket_url(base: str) -> str:
    """Return an address of `base_url` as that of a WebSocket."""
    return f"ws{base.removeprefix('http')}"


def session_path(session: str) -> str:
    """Return the path of a session below the address of a server."""
    return f"/v1/sessions/{quote(session, safe='')}"


def require_headers(headers: Mapping[str, str]) -> None:
    """Refuse headers that no request can carry: they would be refused again by each try to connect.

    Raises:
        UsageError: One has another name or other characters than HTTP allows. It is named without its value.
    """
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name):
            raise UsageError(f"{name!r} cannot be the name of a header")
        if not (value.isascii() and value.isprintable()):
            raise UsageError(f"the header {name!r} has characters that no request can carry")


def problem_in(body: bytes) -> RefusalProblem | None:
    """Return the problem that a refusal of our server's is; None where it is not a problem of our server."""
    try:
        problem = msgspec.json.decode(body, type=RefusalProblem)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return problem if problem.type.startswith(PROBLEM_TYPE) else None


def refusal_of(status: int, body: bytes, wait_s: float | None = None) -> MidstreamError:
    """Return what an HTTP refusal means: our server's own error, else one by its status (STREAM-107, SEC-73).

    Args:
        wait_s: Seconds it asked to wait, beside its words.
    """
    if (problem := problem_in(body)) is not None:
        return error_of(
            Error(problem.code, problem.detail, problem.retry, retry_after_s=problem.retry_after_s)
        )
    message = f"the server refused the connection with HTTP status {status}"
    if status in _TRY_AGAIN or (status >= _SERVER_ERRORS and status not in _NEVER_THERE):
        return ConnectionLostError(message, retry_after_s=wait_s)
    if status in _REDIRECTS:
        return ProtocolError(
            f"{message}, a redirect; none is followed: give the address of the server itself"
        )
    if status in {401, 407}:
        return UnauthorizedError(message)
    if status in {403, 451}:
        return AccessError(message)
    if status in {404, 410}:
        return NotFoundError(f"{message}; check that a midstream server is at this address")
    return ProtocolError(message)
