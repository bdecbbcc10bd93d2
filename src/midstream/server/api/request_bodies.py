"""The body and the query of a request.

A body has the size limit of a frame, unless its endpoint permits more, and a time limit for slow networks.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.types import Receive

from midstream.errors import ConnectionLostError, FrameTooLargeError, MalformedFrameError, UsageError
from midstream.protocol.frames import FRAME_BYTES_MAX, REASON_CHARS_MAX

_T = TypeVar("_T")

BODY_BYTES_MAX = "midstream.body_bytes_max"
"""Key of a scope for a lower limit of the body's bytes."""
UNAUTHENTICATED_BYTES_MAX = 4 * 1024
"""Bytes of a body of an unauthenticated sender: a login has a few hundred."""
MESSAGES_BYTES_MAX = 16 * 1024 * 1024
"""Bytes of a request with all messages of a chat. The new messages have at most the bytes of a frame."""
BODY_S = 30.0
"""Seconds for the body of a command: 1 MiB over a slow mobile network."""


def optional(value: _T | UnsetType) -> _T | None:
    """Return a parameter, or None if it is missing. A type with None would also accept the text `null`."""
    return None if value is UNSET else value


def decode_query(request: HTTPConnection, kind: type[_T]) -> _T:
    """Decode the query of a request; unknown parameters are ignored.

    Raises:
        UsageError: A parameter is invalid.
    """
    try:
        return msgspec.convert(dict(request.query_params), kind, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"the query of this request is invalid: {error}") from error


async def decode_body(request: Request, kind: type[_T]) -> _T:
    """Decode the body of a request; an empty body means `{}`.

    Raises:
        MalformedFrameError: The body is invalid.
        FrameTooLargeError, ConnectionLostError: As in `body_of`.
    """
    body = await body_of(request)
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = str(error)[:REASON_CHARS_MAX]
        raise MalformedFrameError(f"the body of this request is invalid: {reason}") from error


async def body_of(request: Request, bytes_max: int = FRAME_BYTES_MAX) -> bytes:
    """Read a body of at most `bytes_max` bytes; unauthenticated senders have a lower limit.

    Raises:
        FrameTooLargeError: The body is longer; the rest was not read.
        ConnectionLostError: The body was not complete within `BODY_S`.
        HTTPException: The body is compressed, which could hide its size.
    """
    most: int = request.scope.get(BODY_BYTES_MAX, bytes_max)
    for name, value in request.scope["headers"]:
        if name == b"content-encoding" and value.strip().lower() not in {b"", b"identity"}:
            raise HTTPException(
                415, "compressed bodies are not accepted", headers={"accept-encoding": "identity"}
            )
        if name == b"content-length" and value.isdigit() and int(value[:20]) > most:
            raise _too_large(most)
    try:
        async with asyncio.timeout(BODY_S):
            return await _read(request.receive, most)
    except TimeoutError as error:
        raise ConnectionLostError(f"the command did not arrive within {BODY_S:g} s") from error


async def _read(receive: Receive, most: int) -> bytes:
    pieces: list[bytes] = []
    size, is_whole = 0, False
    while not is_whole:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionLostError("the client disconnected before its command was complete")
        piece: bytes = message.get("body", b"")
        size += len(piece)
        if size > most:
            raise _too_large(most)
        pieces.append(piece)
        is_whole = not message.get("more_body", False)
    return b"".join(pieces)


def _too_large(most: int) -> FrameTooLargeError:
    return FrameTooLargeError(f"the body of this request may have at most {most} bytes")
