"""Transports of a client's connections, and their shared parts.

Every fault of the network becomes `ConnectionLostError`, after which the stream reconnects. An HTTP refusal becomes the
corresponding error.
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
"""Largest accepted frame. Results in records have up to 64 KiB; older servers wrote up to 512 Ki characters, which is 3
MiB if all are escaped. The longest response of a model is below the rest."""
CLOSE_S = 1.0
"""Seconds to wait for the answer to a close, which the stream does not need."""
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
PROBLEM_TYPE = "urn:midstream:error:"
"""Prefix of the `type` of a midstream server's problem."""
_TRY_AGAIN = frozenset((408, 421, 425, 429))
_NEVER_THERE = frozenset((501, 505))
"""Statuses from 500 on that are permanent, for example for a WebSocket."""
_REDIRECTS = range(300, 400)
_SERVER_ERRORS = 500


class Transport(Protocol):
    """Transport of the frames of one connection."""

    @property
    def received_bytes(self) -> int:
        """Number of bytes received so far, including incomplete frames (STREAM-46)."""

    async def receive(self) -> bytes:
        """Return the next frame. Cancellation loses no frame.

        Raises:
            MidstreamError: The connection has ended; `retry` of the error determines whether to reconnect.
        """

    async def send(self, frames: Sequence[bytes]) -> None:
        """Send frames in order; `receive` reports a lost connection."""

    async def close(self) -> None:
        """Close the connection within a time limit. Idempotent."""


class RefusalProblem(Struct, frozen=True):
    """The relevant fields of a problem detail (RFC 9457)."""

    type: str
    code: str
    detail: str = ""
    retry: str = "never"
    retry_after_s: float | None = None
    expected: int | None = None


def base_url(server: str) -> str:
    """Return the URL `http(s)://host[:port][/path]` of a server, without a slash at the end.

    Raises:
        UsageError: The URL has another form.
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
    """Return the WebSocket URL for a URL of `base_url`."""
    return f"ws{base.removeprefix('http')}"


def session_path(session: str) -> str:
    """Return the path of a session below the base URL.

    Raises:
        UsageError: The id is empty.
    """
    if not session:
        raise UsageError("a session needs an id of at least one character")
    return f"/v1/sessions/{quote(session, safe='')}"


def require_headers(headers: Mapping[str, str]) -> None:
    """Refuse invalid headers, which would fail again with each connection.

    Raises:
        UsageError: A name or a value has characters that HTTP does not permit. The message does not contain the value.
    """
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name):
            raise UsageError(f"{name!r} cannot be the name of a header")
        if not (value.isascii() and value.isprintable()):
            raise UsageError(f"the header {name!r} has characters that HTTP does not permit")


def problem_in(body: bytes) -> RefusalProblem | None:
    """Decode the problem detail of a midstream server; return None for any other body."""
    try:
        problem = msgspec.json.decode(body, type=RefusalProblem)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return problem if problem.type.startswith(PROBLEM_TYPE) else None


def refusal_of(status: int, body: bytes, wait_s: float | None = None) -> MidstreamError:
    """Convert an HTTP refusal to an error: by its problem detail, else by its status (STREAM-107, SEC-73).

    Args:
        wait_s: Seconds to wait from a header of the refusal.
    """
    if (problem := problem_in(body)) is not None:
        return error_of(
            Error(problem.code, problem.detail, problem.retry, retry_after_s=problem.retry_after_s)
        )
    refusal = _refusal_by_status(status, wait_s)
    refusal.is_foreign = True
    return refusal


def _refusal_by_status(status: int, wait_s: float | None) -> MidstreamError:
    message = f"the server refused the connection with HTTP status {status}"
    if status in _TRY_AGAIN or (status >= _SERVER_ERRORS and status not in _NEVER_THERE):
        return ConnectionLostError(message, retry_after_s=wait_s)
    if status in _REDIRECTS:
        return ProtocolError(
            f"{message}, a redirect; redirects are not followed: give the address of the server itself"
        )
    if status in {401, 407}:
        return UnauthorizedError(message)
    if status in {403, 451}:
        return AccessError(message)
    if status in {404, 410}:
        return NotFoundError(f"{message}; check that a midstream server is at this address")
    return ProtocolError(message)
