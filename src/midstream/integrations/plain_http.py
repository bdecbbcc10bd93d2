"""HTTP/1.1 without TLS over one kept connection: what a model on this machine or in the same network is asked by.

A client as `httpx2.AsyncClient` is one, as far as `midstream.integrations.provider_http` uses it, with a few percent of
its work: that shows where a hundred replies stream at once, and before the first word of each. It knows what a server
of models does: an answer with a length, in chunks, or up to the end of the connection. Anything else is a broken
connection, and the same errors are raised as by httpx2.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import re
import urllib.request
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Self, cast

import httpx2
from msgspec import Struct

from midstream.version import __version__

IDLE_S = 5.0
"""Seconds that an idle connection is trusted; servers close theirs after 5 s or more."""
HEAD_BYTES_MAX = 64 * 1024
"""Of the status and the headers of an answer, of a chunk's size, and of what follows the last chunk."""
UNREAD_BYTES_MAX = 64 * 1024
"""Of an answer that came and that nobody has read; more is left with its server until somebody does."""
TARGETS_MAX = 64
"""Addresses whose request lines are kept written."""

_END = b"\r\n\r\n"
_LINE_END = b"\r\n"
_LINE_END_BYTES = 2
_STATUS = re.compile(rb"HTTP/1\.([0-9]) ([0-9]{3})(?: |$)")
_SIZE = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;[^\r\n]*)?\r\n")
_FIRST_FINAL = 200
_NO_BODY = frozenset({204, 304})
_UNKNOWN = 1 << 62
"""Bytes of a body that ends with its connection: more than there are."""


def is_plain(url: httpx2.URL) -> bool:
    """Whether an address is asked without TLS and without any proxy that the environment names."""
    return url.scheme == "http" and not urllib.request.getproxies()


class PlainClient:
    """One connection to one server, kept between requests; one request at a time.

    Args:
        timeout: For how long each step may be waited; a `read` is a silence.
    """

    def __init__(self, timeout: httpx2.Timeout) -> None:
        self._timeout = timeout
        self._line: _Line | None = None
        self._used_at = 0.0

    def stream(
        self,
        method: str,
        url: str,
        *,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: httpx2.Timeout | None = None,
    ) -> PlainAnswer:
        """Return an async context in which a request is answered; entering it sends the request.

        Args:
            timeout: The limits of this request, where they are not those of the client.

        Entering it, or reading the answer, raises:
            httpx2.HTTPError: There is no connection, it broke, or what came is no HTTP.
        """
        return PlainAnswer(self, method, url, content or b"", headers or {}, timeout or self._timeout)

    async def aclose(self) -> None:
        """Close the connection. Calling it twice is harmless."""
        line, self._line = self._line, None
        if line is not None:
            line.close()
            await line.closed.wait()

    async def line_to(self, host: str, port: int, timeout: httpx2.Timeout) -> _Line:
        """Return the connection, opened where it is not, for a request with these limits."""
        loop = asyncio.get_running_loop()
        if self._line is not None:
            if not self._line.is_over and loop.time() - self._used_at < IDLE_S:
                self._line.limit(timeout)
                return self._line
            await self.aclose()
        try:
            async with asyncio.timeout(timeout.connect):
                _, line = await loop.create_connection(lambda: _Line(loop, timeout), host, port)
        except TimeoutError as error:
            raise httpx2.ConnectTimeout("the server did not answer in time") from error
        except OSError as error:
            raise httpx2.ConnectError(str(error)) from error
        self._line = line
        return line

    def rest(self, line: _Line) -> None:
        """Keep the connection for the next request if it can serve one."""
        self._used_at = asyncio.get_running_loop().time()
        if not line.is_kept:
            self._line = None
            line.close()


class PlainAnswer:
    """The answer to one request, as an async context; see `PlainClient.stream`.

    Attributes:
        status_code: Its status, once the context is entered.
        headers: Its headers; their names are lower case.
    """

    def __init__(
        self,
        client: PlainClient,
        method: str,
        url: str,
        content: bytes,
        headers: Mapping[str, str],
        timeout: httpx2.Timeout,
    ) -> None:
        self._client = client
        self._request = (method, url, content, headers)
        self._timeout = timeout
        self._line: _Line | None = None
        self.status_code = 0
        self.headers: Mapping[str, str] = {}

    async def __aenter__(self) -> Self:
        method, url, content, headers = self._request
        target = _target_of(url)
        line = self._line = await self._client.line_to(target.host, target.port, self._timeout)
        try:
            line.ask(_head_of(method, target, headers, len(content)) + content)
            self.status_code, self.headers = await line.head()
        except BaseException:
            await self._client.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        line = cast("_Line", self._line)  # it was entered
        if line.is_whole:
            self._client.rest(line)
        else:  # who knows what is still to come
            await self._client.aclose()

    async def aiter_bytes(self) -> AsyncIterator[bytes]:
        """Give the body as it comes.

        Raises:
            httpx2.HTTPError: The connection broke, or there was silence for too long.
        """
        line = cast("_Line", self._line)
        while piece := await line.piece():
            yield piece


class _Line(asyncio.Protocol):
    """One connection: what came over it is read as it comes, and waited for by one reader at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, timeout: httpx2.Timeout) -> None:
        self._loop = loop
        self._timeout = timeout
        self._transport: asyncio.Transport | None = None
        self.closed = asyncio.Event()
        self.is_over = False
        """It can serve nobody any more."""
        self.is_kept = False
        """It can serve one more request behind this one."""
        self.is_whole = True
        """All of the last answer has come and was read."""
        self._error: httpx2.HTTPError | None = None
        self._reading: _Reading | None = None
        self._waiting: asyncio.Future[None] | None = None
        self._since = 0.0
        """When the reader began to wait."""
        self._watch: asyncio.TimerHandle | None = None
        self._is_full = False
        """More is to be sent than the system takes now."""
        self._is_paused = False

    # --- asyncio's side ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection."""
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Take note of its end, and of what it means for the answer."""
        self.is_over = True
        self._stop_watching()
        if self._reading is not None and not self._reading.ends_here() and self._error is None:
            self._error = httpx2.ReadError(str(exc)) if exc else _broken("the server closed the connection")
        self._wake()
        self.closed.set()

    def eof_received(self) -> None:
        """Let the transport close: a server that says no more hears no more."""
        self.is_over = True

    def data_received(self, data: bytes) -> None:
        """Read what came."""
        reading = self._reading
        if reading is None or reading.is_done:  # nobody asked
            self.close()
            return
        try:
            reading.feed(data)
        except httpx2.HTTPError as error:
            self._fail(error)
            return
        if reading.unread > UNREAD_BYTES_MAX and self._transport is not None and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def pause_writing(self) -> None:
        """Take note that the system takes no more for now."""
        self._is_full = True

    def resume_writing(self) -> None:
        """Take note that it does again: from now on the answer is waited for."""
        self._is_full = False
        self._since = self._loop.time()

    # --- the reader's side ------------------------------------------------------------------------------------

    def limit(self, timeout: httpx2.Timeout) -> None:
        """Set the limits of the next request."""
        self._timeout = timeout
        self._stop_watching()  # the running timer may look only after the shorter ones have passed

    def ask(self, request: bytes) -> None:
        """Send a request; its answer is read by `head` and `piece`."""
        assert self._transport is not None
        self.is_kept = self.is_whole = False
        self._error = None
        self._reading = _Reading()
        self._since = self._loop.time()
        self._transport.write(request)

    async def head(self) -> tuple[int, Mapping[str, str]]:
        """Return the status and the headers of the answer."""
        reading = self._reading
        assert reading is not None
        while not reading.status:
            await self._news()
        return reading.status, reading.headers

    async def piece(self) -> bytes:
        """Return what came of the body since the last call, or nothing at its end."""
        reading = self._reading
        assert reading is not None
        while not reading.pieces:
            if reading.is_done:
                self.is_whole, self.is_kept = True, reading.is_kept and not self.is_over
                return b""
            await self._news()
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return reading.taken()

    def close(self) -> None:
        """Close it, whatever is on its way."""
        self.is_over = True
        self._stop_watching()
        if self._transport is not None:
            self._transport.abort()

    async def _news(self) -> None:
        """Wait until more has come; raise what keeps it from coming."""
        if self._error is not None:
            raise self._error
        self._since = self._loop.time()
        if self._watch is None:
            self._look()
        self._waiting = self._loop.create_future()
        try:
            await self._waiting
        finally:
            self._waiting = None

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _fail(self, error: httpx2.HTTPError) -> None:
        if self._error is None:
            self._error = error
        self.close()
        self._wake()

    def _look(self) -> None:
        """Look now and then whether there is silence for too long: cheaper than a timer for each wait."""
        limit_s = self._timeout.write if self._is_full else self._timeout.read
        self._watch = None
        if limit_s is None:
            return
        left_s = limit_s - (self._loop.time() - self._since) if self._waiting is not None else limit_s
        if left_s <= 0:
            kind = httpx2.WriteTimeout if self._is_full else httpx2.ReadTimeout
            self._fail(kind("the server did not answer in time"))
        else:
            self._watch = self._loop.call_later(left_s, self._look)

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None


class _Reading:
    """One answer as it is read, without I/O: `feed` it what comes, then look what of it is there."""

    def __init__(self) -> None:
        self.status = 0
        """0 until the head is whole."""
        self.headers: dict[str, str] = {}
        self.pieces: list[bytes] = []
        """What came of the body and was not taken."""
        self.unread = 0
        """Bytes of `pieces`."""
        self.is_done = False
        self.is_kept = False
        self._is_chunked = False
        self._left = _UNKNOWN
        """Bytes still to come: of the body, or of a chunk and the line's end behind it."""
        self._is_trailing = False
        """The last chunk has come; what follows says nothing that matters here."""
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Take what came.

        Raises:
            httpx2.RemoteProtocolError: It is no HTTP/1.1.
        """
        if self._rest:
            data = self._rest + data
        at = 0 if self.status else self._read_head(data)
        if self.status and not self.is_done:
            at = self._read_chunks(data, at) if self._is_chunked else self._read_counted(data, at)
        self._rest = data[at:]
        if len(self._rest) > HEAD_BYTES_MAX:
            raise _broken("a line of the answer is too long")
        if self.is_done and self._rest:
            self.is_kept = False

    def taken(self) -> bytes:
        """Take what came of the body."""
        pieces, self.pieces, self.unread = self.pieces, [], 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def ends_here(self) -> bool:
        """Whether the answer is whole where its connection ends."""
        if self.status and not self._is_chunked and self._left > _UNKNOWN // 2:
            self.is_done = True
        return self.is_done

    def _read_head(self, data: bytes) -> int:
        """Read the status and the headers, past those answers that only announce it; return where they end."""
        at = 0
        while (end := data.find(_END, at)) >= 0:
            if end - at > HEAD_BYTES_MAX:
                break
            first, *lines = data[at:end].split(b"\r\n")
            at = end + len(_END)
            found = _STATUS.match(first)
            if found is None:
                raise _broken("what the server sent is no HTTP/1.1")
            if int(found[2]) >= _FIRST_FINAL:
                self._begin(int(found[2]), lines, is_kept=found[1] != b"0")
                return at
        return at

    def _begin(self, status: int, lines: list[bytes], *, is_kept: bool) -> None:
        headers = self.headers
        for line in lines:
            name, _, value = line.decode("latin-1").partition(":")
            name, value = name.strip().lower(), value.strip()
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        self.is_kept = is_kept and "close" not in headers.get("connection", "").lower()
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise _broken("the answer is compressed, which nobody asked for")
        self._is_chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        length = headers.get("content-length")
        if status in _NO_BODY:
            self._is_chunked, length = False, "0"
        if self._is_chunked:
            self._left = 0
        elif length is not None:
            if not (length.isascii() and length.isdigit()):
                raise _broken("the answer has a length that is none")
            self._left = int(length)
            self.is_done = not self._left
        self.status = status

    def _take(self, piece: bytes) -> None:
        if piece:
            self.pieces.append(piece)
            self.unread += len(piece)
            self._left -= len(piece)

    def _read_counted(self, data: bytes, at: int) -> int:
        piece = data[at : at + self._left]
        self._take(piece)
        self.is_done = not self._left
        return at + len(piece)

    def _read_chunks(self, data: bytes, at: int) -> int:
        """Read chunks; return where what was read ends."""
        while not self._is_trailing:
            if self._left > _LINE_END_BYTES:
                piece = data[at : at + self._left - _LINE_END_BYTES]
                self._take(piece)
                at += len(piece)
                if self._left > _LINE_END_BYTES:
                    return at
            if self._left:
                if not data.startswith(_LINE_END, at):
                    if len(data) - at < _LINE_END_BYTES:
                        return at
                    raise _broken("a chunk of the answer has another size")
                at += _LINE_END_BYTES
                self._left = 0
            found = _SIZE.match(data, at)
            if found is None:
                if _LINE_END in data[at:]:
                    raise _broken("a chunk of the answer has no size")
                return at
            at = found.end()
            size = int(found[1], 16)
            self._left = size + _LINE_END_BYTES if size else 0
            self._is_trailing = not size
        while (end := data.find(_LINE_END, at)) >= 0:
            self.is_done = end == at
            at = end + _LINE_END_BYTES
            if self.is_done:
                break
        return at


class _Target(Struct, frozen=True):
    """Where a request goes, and what of it says so."""

    host: str
    port: int
    path: str
    headers: dict[str, str]


@functools.lru_cache(TARGETS_MAX)
def _target_of(url: str) -> _Target:
    parsed = httpx2.URL(url)
    headers = {
        "host": parsed.netloc.decode("ascii"),
        "accept": "*/*",
        "accept-encoding": "identity",  # who compresses holds words back
        "connection": "keep-alive",
        "user-agent": f"midstream/{__version__}",
    }
    if parsed.username or parsed.password:
        shown = base64.b64encode(f"{parsed.username}:{parsed.password}".encode()).decode("ascii")
        headers["authorization"] = f"Basic {shown}"
    return _Target(parsed.host, parsed.port or 80, parsed.raw_path.decode("ascii"), headers)


def _head_of(method: str, target: _Target, headers: Mapping[str, str], length: int) -> bytes:
    said = {**target.headers, **{name.lower(): value for name, value in headers.items()}}
    if length or method != "GET":
        said["content-length"] = str(length)
    head = [f"{method} {target.path} HTTP/1.1", *(f"{name}: {value}" for name, value in said.items())]
    if any("\n" in line or "\r" in line for line in head):
        raise httpx2.LocalProtocolError("a header of the request holds a line's end")
    return "\r\n".join([*head, "", ""]).encode("ascii")


def _broken(message: str) -> httpx2.RemoteProtocolError:
    return httpx2.RemoteProtocolError(message)
