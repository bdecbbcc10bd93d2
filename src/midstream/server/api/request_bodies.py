"""The body of a request: never more of it than a frame may have, and never later than a bad network brings it."""

from __future__ import annotations

import asyncio

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Receive

from midstream.errors import ConnectionLostError, FrameTooLargeError
from midstream.protocol.frames import FRAME_BYTES_MAX

BODY_S = 30.0
"""Seconds for the body of one command: 1 MiB over a bad mobile network."""


async def body_of(request: Request) -> bytes:
    """Read a body, and not more of it than a frame may have.

    Raises:
        FrameTooLargeError: The rest of it was not read.
        ConnectionLostError: It did not come whole in `BODY_S`.
        HTTPException: It is compressed: so little could become so much.
    """
    for name, value in request.scope["headers"]:
        if name == b"content-encoding" and value.strip().lower() not in {b"", b"identity"}:
            raise HTTPException(
                415, "compressed bodies are not accepted", headers={"accept-encoding": "identity"}
            )
        if name == b"content-length" and value.isdigit() and int(value[:20]) > FRAME_BYTES_MAX:
            raise _too_large()
    try:
        async with asyncio.timeout(BODY_S):
            return await _read(request.receive)
    except TimeoutError as error:
        raise ConnectionLostError(f"the command did not arrive within {BODY_S:g} s") from error


async def _read(receive: Receive) -> bytes:
    pieces: list[bytes] = []
    size, is_whole = 0, False
    while not is_whole:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionLostError("the client left before its command was complete")
        piece: bytes = message.get("body", b"")
        size += len(piece)
        if size > FRAME_BYTES_MAX:
            raise _too_large()
        pieces.append(piece)
        is_whole = not message.get("more_body", False)
    return b"".join(pieces)


def _too_large() -> FrameTooLargeError:
    return FrameTooLargeError(f"a frame has {FRAME_BYTES_MAX} bytes at most")
