"""HTTP/1.1 without TLS over one kept connection: what a model on this machine or in the same network is asked by.

A transport for httpx2 with half of the work per piece of its own one, which shows where a hundred replies stream at
once. It knows what a server of models does: an answer with a length, in chunks, or up to the end of the connection.
Anything else is a broken connection, and the same errors are raised as by httpx2's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import urllib.request
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

import httpx2

T = TypeVar("T")

IDLE_S = 5.0
"""Seconds that an idle connection is trusted; servers close theirs after 5 s or more."""
HEAD_BYTES_MAX = 64 * 1024
"""Of the status and the headers of an answer, and of a chunk's size."""
PIECE_BYTES = 64 * 1024
_END = b"\r\n\r\n"
_FIRST_FINAL = 200
_NO_BODY = frozenset({204, 304})
_HEX = frozenset(b"0123456789abcdefABCDEF")


def is_plain(url: httpx2.URL) -> bool:
    """Whether an address is asked without TLS and without any proxy that the environment names."""
    return url.scheme == "http" and not urllib.request.getproxies()


class PlainTransport(httpx2.AsyncBaseTransport):
    """One connection to one server, kept between requests; one request at a time."""

    def __init__(self) -> None:
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._used_at = 0.0

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request and read the head of its answer; the body is read from the response's stream.

        Raises:
            httpx2.HTTPError: There is no connection, it broke, or what came is no HTTP.
        """
        limits = request.extensions.get("timeout", {})
        reader, writer = await self._connected(request.url, limits.get("connect"))
        try:
            writer.write(_head_of(request) + await request.aread())
            await _within(writer.drain(), limits.get("write"), httpx2.WriteTimeout)
            status, version, headers = await self._head(reader, limits.get("read"))
        except OSError as error:
            await self.aclose()
            raise httpx2.WriteError(str(error)) from error
        except BaseException:
            await self.aclose()
            raise
        response = httpx2.Headers(headers)
        is_kept = version == b"HTTP/1.1" and "close" not in response.get("connection", "").lower()
        body = _Body(self, reader, response, status, limits.get("read"), is_kept=is_kept)
        return httpx2.Response(status, headers=headers, stream=body)

    async def aclose(self) -> None:
        """Close the connection."""
        writer, self._reader, self._writer = self._writer, None, None
        if writer is not None:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def rest(self) -> None:
        """Say that the last answer was read to its end."""
        self._used_at = asyncio.get_running_loop().time()

    async def _connected(
        self, url: httpx2.URL, within_s: float | None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = self._reader, self._writer
        if reader is not None and writer is not None:
            is_fresh = asyncio.get_running_loop().time() - self._used_at < IDLE_S
            if is_fresh and not reader.at_eof() and not writer.is_closing():
                return reader, writer
            await self.aclose()
        opening = asyncio.open_connection(url.host, url.port or 80, limit=HEAD_BYTES_MAX)
        try:
            opened = await _within(opening, within_s, httpx2.ConnectTimeout)
        except OSError as error:
            raise httpx2.ConnectError(str(error)) from error
        self._reader, self._writer = opened
        return opened

    async def _head(
        self, reader: asyncio.StreamReader, within_s: float | None
    ) -> tuple[int, bytes, list[tuple[bytes, bytes]]]:
        """Read the status and the headers of the answer, past those that only announce it."""
        while True:
            raw = await _read(reader.readuntil(_END), within_s)
            first, *lines = raw[: -len(_END)].split(b"\r\n")
            version, _, rest = first.partition(b" ")
            code = rest[:3]
            if not version.startswith(b"HTTP/1.") or not code.isdigit():
                raise httpx2.RemoteProtocolError("what the server sent is no HTTP/1.1")
            headers = [
                (name.strip(), value.strip()) for name, _, value in (line.partition(b":") for line in lines)
            ]
            if int(code) >= _FIRST_FINAL:
                return int(code), version, headers


class _Body(httpx2.AsyncByteStream):
    """The body of an answer as it comes."""

    def __init__(
        self,
        transport: PlainTransport,
        reader: asyncio.StreamReader,
        headers: httpx2.Headers,
        status: int,
        within_s: float | None,
        *,
        is_kept: bool,
    ) -> None:
        self._transport = transport
        self._reader = reader
        self._within_s = within_s
        self._is_chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        length = headers.get("content-length", "")
        self._left = 0 if status in _NO_BODY else int(length) if length.isdigit() else -1
        """Bytes still to come; -1 for all up to the end of the connection."""
        self._is_kept = is_kept
        self._is_whole = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        pieces = self._chunks() if self._is_chunked else self._plain()
        async for piece in pieces:
            yield piece
        self._is_whole = True
        self._transport.rest()

    async def aclose(self) -> None:
        """Keep the connection if all of the body was read, else close it: who knows what is still to come."""
        if not (self._is_whole and self._is_kept):
            await self._transport.aclose()

    async def _plain(self) -> AsyncIterator[bytes]:
        if self._left < 0:
            self._is_kept = False
        while self._left:
            piece = await _read(
                self._reader.read(min(self._left, PIECE_BYTES) if self._left > 0 else PIECE_BYTES),
                self._within_s,
            )
            if not piece:
                if self._left < 0:
                    return
                raise httpx2.RemoteProtocolError("the answer broke off")
            self._left = max(-1, self._left - len(piece)) if self._left > 0 else self._left
            yield piece

    async def _chunks(self) -> AsyncIterator[bytes]:
        while True:
            line = await _read(self._reader.readuntil(b"\r\n"), self._within_s)
            size = _size_of(line)
            left = size
            while left:
                piece = await _read(self._reader.read(min(left, PIECE_BYTES)), self._within_s)
                if not piece:
                    raise httpx2.RemoteProtocolError("the answer broke off")
                left -= len(piece)
                yield piece
            if not size:
                break
            await _read(self._reader.readexactly(2), self._within_s)
        while await _read(self._reader.readuntil(b"\r\n"), self._within_s) != b"\r\n":
            pass  # trailers say nothing that matters here


def _size_of(line: bytes) -> int:
    digits = line.partition(b";")[0].strip()
    if not digits or not _HEX.issuperset(digits):
        raise httpx2.RemoteProtocolError("a chunk of the answer has no size")
    return int(digits, 16)


def _head_of(request: httpx2.Request) -> bytes:
    lines = [b"%b: %b" % (name, value) for name, value in request.headers.raw]
    return b"\r\n".join([b"%b %b HTTP/1.1" % (request.method.encode(), request.url.raw_path), *lines]) + _END


async def _read(reading: Coroutine[Any, Any, bytes], within_s: float | None) -> bytes:
    """Read something from a connection; whatever goes wrong is one of httpx2's errors."""
    try:
        return await _within(reading, within_s, httpx2.ReadTimeout)
    except asyncio.IncompleteReadError as error:
        raise httpx2.RemoteProtocolError("the server closed the connection") from error
    except asyncio.LimitOverrunError as error:
        raise httpx2.RemoteProtocolError("a line of the answer is too long") from error
    except OSError as error:
        raise httpx2.ReadError(str(error)) from error


async def _within(
    work: Coroutine[Any, Any, T], within_s: float | None, kind: type[httpx2.TimeoutException]
) -> T:
    try:
        async with asyncio.timeout(within_s):
            return await work
    except TimeoutError as error:
        raise kind("the server did not answer in time") from error
