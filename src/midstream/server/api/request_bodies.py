"""The body and the query of a request.

A body has at most the bytes of a frame, unless its endpoint takes more. It arrives within the time that a bad network
needs.
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
"""Where a scope has the limit of its body's bytes, where that is another one than of all senders."""
STRANGER_BYTES_MAX = 4 * 1024
"""Bytes of a body before its sender is authenticated: a login has a few hundred."""
MESSAGES_BYTES_MAX = 16 * 1024 * 1024
"""Bytes of a request that has all messages of a chat. What is new of them has at most those of a frame."""
BODY_S = 30.0
"""Seconds for the body of one command: 1 MiB over a bad mobile network."""


def optional(value: _T | UnsetType) -> _T | None:
    """Return a parameter, or None where it is missing; a type with None would take the text `null` for it."""
    return None if value is UNSET else value


def decode_query(request: HTTPConnection, kind: type[_T]) -> _T:
    """Decode the query of a request; parameters that the type does not have are ignored.

    Raises:
        UsageError: A parameter has another form, or is out of bounds.
    """
    try:
        return msgspec.convert(dict(request.query_params), kind, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"the query of this request has another form: {error}") from error


async def decode_body(request: Request, kind: type[_T]) -> _T:
    """Decode the body of a request; an empty one stands for `{}`.

    Raises:
        MalformedFrameError: It has another form.
        FrameTooLargeError, ConnectionLostError: As `body_of` does.
    """
    body = await body_of(request)
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = str(error)[:REASON_CHARS_MAX]
        raise MalformedFrameError(f"the body of this request has another form: {reason}") from error


async def body_of(request: Request, bytes_max: int = FRAME_BYTES_MAX) -> bytes:
    """Read a body, and not more of it than `bytes_max`, or than a sender that is not authenticated may send.

    Raises:
        FrameTooLargeError: The rest of it was not read.
        ConnectionLostError: It did not come whole in `BODY_S`.
        HTTPException: It is compressed: so little could become so much.
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
            raise ConnectionLostError("the client left before its command was complete")
        piece: bytes = message.get("body", b"")
        size += len(piece)
        if size > most:
            raise _too_large(most)
        pieces.append(piece)
        is_whole = not message.get("more_body", False)
    return b"".join(pieces)


def _too_large(most: int) -> FrameTooLargeError:
    return FrameTooLargeError(f"the body of this request has {most} bytes at most")
