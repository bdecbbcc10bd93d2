"""A connection over plain HTTP: each sent frame is a POST; frames are received by server-sent events or long polling.

A connection consists of several requests with its name. Received frames pass a queue of a few frames, which gives
backpressure. Frames are sent only after the server's welcome (STREAM-38), so nothing is sent if a proxy withholds the
answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Protocol

import httpx2
import msgspec
from msgspec import Struct
from typing_extensions import override

from midstream.client.transports import (
    CLOSE_S,
    SERVER_FRAME_BYTES_MAX,
    Transport,
    problem_in,
    refusal_of,
)
from midstream.environment import World
from midstream.errors import ConnectionLostError, MidstreamError, ProtocolError, UnauthorizedError
from midstream.local_keys import is_loopback
from midstream.protocol.frames import (
    ClientFrame,
    Close,
    CommandFrame,
    Error,
    EventId,
    Open,
    decode_client,
    encode,
)
from midstream.protocol.server_stream import events_frames
from midstream.protocol.sse import ServerSentEvent, SseDecoder
from midstream.retries import CONNECT_S, retry_after_s

ANSWER_S = 30.0
"""Time limit of the answer to a POST, in seconds: an append on a busy disk, over a bad network."""
FRAMES_WAITING_MAX = 8
"""Received frames in the queue; beyond them, reading stops (2 MiB of events)."""
POLL_BYTES_MAX = 64 * 1024 * 1024
"""Greatest size of a poll's answer: 512 records, each with a large result."""
PROBLEM_BYTES_MAX = 64 * 1024
"""Greatest number of bytes that are read of a refusal."""
_AWAY = frozenset((502, 503, 504))
"""Statuses of proxies for a server that is missing or not ready."""

_REDIRECT = 300
"""First status of a failure; a redirect is a refusal (SEC-73)."""
_NO_CONTENT = 204


class HttpPaths(Struct, frozen=True):
    """URL and headers of one connection's requests.

    Args:
        session: URL of the session.
        connection: Random name of the connection.
    """

    session: str
    connection: str
    headers: Mapping[str, str]

    def headers_down(self) -> dict[str, str]:
        """Return the headers of a request whose body is the `open` frame."""
        return {
            **self.headers,
            "accept-encoding": "identity",  # a compressing proxy would delay events
            "cache-control": "no-cache",
            "content-type": "application/json",
            "x-midstream-connection": self.connection,
        }

    def headers_up(self, opening: Open) -> dict[str, str]:
        """Return the headers of a request that sends a command on a stream."""
        shown = {
            "x-idempotency-key": opening.stream,
            "x-idempotent-encryption-key": opening.secret,
            "x-idempotent-encryption-key-old": opening.old_secret,
        }
        if opening.stream and opening.cancel_after_s is not None:
            shown["x-idempotency-cancel-after"] = str(math.ceil(opening.cancel_after_s))
        if opening.connection:
            shown["x-idempotency-connection"] = str(opening.connection)
        return {**self.headers_down(), **{name: value for name, value in shown.items() if value}}


class Downlink(Protocol):
    """Receiving side of a connection; `read` yields each frame once."""

    received_bytes: int

    def read(self, client: httpx2.AsyncClient, paths: HttpPaths, opening: Open) -> AsyncIterator[bytes]:
        """Yield the frames of a connection.

        Raises:
            MidstreamError: The server refused, or is not a midstream server.
            httpx2.HTTPError: The network failed.
        """


class HttpTransport(Transport):
    """One connection as HTTP requests. Its tasks begin with the `open` frame, and end with `close`."""

    def __init__(
        self,
        client: httpx2.AsyncClient,
        paths: HttpPaths,
        down: Downlink,
        *,
        explain: Callable[[MidstreamError], MidstreamError] | None = None,
        world: World = World(),
    ) -> None:
        self._client = client
        self._explain = explain
        self._paths = paths
        self._down = down
        self._world = world
        self._opening = Open()
        self._received: asyncio.Queue[bytes | Exception] = asyncio.Queue(FRAMES_WAITING_MAX)
        self._failure: Exception | None = None
        self._outgoing: deque[tuple[ClientFrame, bytes]] = deque()
        self._has_outgoing = asyncio.Event()
        self._is_welcome = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    @override
    def received_bytes(self) -> int:
        return self._down.received_bytes

    @override
    async def receive(self) -> bytes:
        if self._failure is not None:
            raise self._failure
        received = await self._received.get()
        if isinstance(received, Exception):
            if isinstance(received, MidstreamError) and self._explain is not None:
                received = self._explain(received)
            self._failure = received
            raise received
        return received

    async def send(self, frames: Sequence[bytes]) -> None:
        """See `Transport.send`. It returns before the frames are sent; `receive` reports failures."""
        for body in frames:
            frame = decode_client(body)
            if isinstance(frame, Open):
                self._opening = frame
                self._spawn_both()
            else:
                self._outgoing.append((frame, body))
        self._has_outgoing.set()

    async def close(self) -> None:
        """See `Transport.close`. It sends a waiting `close` frame, because some proxies do not report disconnects."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._tasks.clear()
        last = self._outgoing[-1] if self._outgoing else None
        self._outgoing.clear()
        if last is not None and isinstance(last[0], Close) and self._is_welcome.is_set():
            with contextlib.suppress(httpx2.HTTPError, TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._post(*last)

    # --- the two tasks ------------------------------------------------------------------------------------------

    def _spawn_both(self) -> None:
        for work, name in ((self._follow(), "down"), (self._post_frames(), "up")):
            self._tasks.append(self._world.spawn(work, name=f"midstream http {name}"))

    async def _follow(self) -> None:
        error: Exception = ConnectionLostError("the event stream ended before the turn")
        try:
            async for frame in self._down.read(self._client, self._paths, self._opening):
                self._is_welcome.set()
                await self._received.put(frame)
        except (httpx2.HTTPError, httpx2.StreamError) as failure:
            error = ConnectionLostError(f"the connection to the server was lost ({type(failure).__name__})")
        except Exception as refusal:  # noqa: BLE001 - the reader raises it, a fault of ours too
            error = refusal
        await self._received.put(error)

    async def _post_frames(self) -> None:
        await self._is_welcome.wait()
        while True:
            while self._outgoing:
                frame, body = self._outgoing[0]
                try:
                    answer = await self._post(frame, body)
                except httpx2.HTTPError as failure:
                    message = f"a command received no answer ({type(failure).__name__})"
                    await self._received.put(ConnectionLostError(message))
                    return
                except Exception as refusal:  # noqa: BLE001 - as in `_follow`
                    await self._received.put(refusal)
                    return
                self._outgoing.popleft()
                if answer:
                    await self._received.put(answer)
            self._has_outgoing.clear()
            await self._has_outgoing.wait()

    async def _post(self, frame: ClientFrame, body: bytes) -> bytes:
        """Send one frame; return the answering frame, or b""."""
        url, headers = f"{self._paths.session}/commands", self._paths.headers_up(self._opening)
        response = await self._client.post(url, content=body, headers=headers)
        if response.status_code < _REDIRECT:
            return b"" if response.status_code == _NO_CONTENT else response.content
        if not isinstance(frame, CommandFrame):
            return b""
        problem = problem_in(response.content)
        if problem is None or problem.code == UnauthorizedError.code:
            raise _refusal(response, response.content, self._world)
        return encode(
            Error(
                problem.code,
                problem.detail,
                problem.retry,
                frame.seqno,
                problem.expected,
                problem.retry_after_s,
            )
        )


class EventStream(Downlink):
    """Receives frames as server-sent events of one answer."""

    def __init__(self, world: World = World()) -> None:
        self.received_bytes = 0
        self._world = world

    @override
    async def read(self, client: httpx2.AsyncClient, paths: HttpPaths, opening: Open) -> AsyncIterator[bytes]:
        headers = {**paths.headers_down(), "accept": "text/event-stream"}
        decoder = SseDecoder(event_bytes_max=SERVER_FRAME_BYTES_MAX)
        url, body = f"{paths.session}/events", encode(opening)
        async with client.stream("POST", url, content=body, headers=headers) as response:
            if response.status_code >= _REDIRECT:
                raise _refusal(response, await _whole(response), self._world)
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                raise ConnectionLostError("the answer is not an event stream of a midstream server")
            async for piece in response.aiter_raw():
                self.received_bytes += len(piece)
                try:
                    for frame in _frames_of(decoder.feed(piece)):
                        yield frame
                except ProtocolError as error:
                    raise ConnectionLostError(
                        f"the event stream cannot be decoded: {error.message}"
                    ) from error


def _frames_of(events: Sequence[ServerSentEvent]) -> list[bytes]:
    """Convert server-sent events to frames; consecutive records become one `events` frame, as over a WebSocket."""
    frames: list[bytes] = []
    records: list[tuple[EventId, bytes]] = []
    for event in events:
        if event.event == "record":
            records.append((EventId.parse(event.id), event.data))
            continue
        frames += events_frames(records)
        records.clear()
        frames.append(event.data)
    return [*frames, *events_frames(records)]


class _Polled(Struct, frozen=True):
    frames: tuple[msgspec.Raw, ...]
    more: bool


class _Place(Struct, frozen=True):
    id: str


class _Placed(Struct, frozen=True):
    """Position in a frame from which the next poll continues."""

    resume_from: str | None = None
    events: tuple[_Place, ...] = ()


_polled = msgspec.json.Decoder(_Polled)
_placed = msgspec.json.Decoder(_Placed)


class LongPoll(Downlink):
    """Receives frames by long polling."""

    def __init__(self, world: World = World()) -> None:
        self.received_bytes = 0
        self._world = world

    @override
    async def read(self, client: httpx2.AsyncClient, paths: HttpPaths, opening: Open) -> AsyncIterator[bytes]:
        number, has_more = 0, True
        while has_more:
            body = await self._poll(client, paths, opening, number)
            after = opening.event_id
            try:
                polled = _polled.decode(body)
                places = [_placed.decode(frame) for frame in polled.frames]
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise ConnectionLostError("the answer is not a poll of a midstream server") from error
            for frame, placed in zip(polled.frames, places, strict=True):
                after = placed.events[-1].id if placed.events else placed.resume_from or after
                yield bytes(frame)
            has_more = polled.more and bool(polled.frames)
            number += 1
            # The welcome has checked it. At the next poll, the server may not have received the first command yet.
            opening = msgspec.structs.replace(opening, event_id=after, next_seqno=0)

    async def _poll(self, client: httpx2.AsyncClient, paths: HttpPaths, opening: Open, number: int) -> bytes:
        url, body = f"{paths.session}/poll?n={number}", encode(opening)
        async with client.stream("POST", url, content=body, headers=paths.headers_down()) as response:
            if response.status_code >= _REDIRECT:
                raise _refusal(response, await _whole(response), self._world)
            pieces: list[bytes] = []
            size = 0
            async for piece in response.aiter_raw():
                size += len(piece)
                self.received_bytes += len(piece)
                if size > POLL_BYTES_MAX:
                    raise ConnectionLostError(f"an answer is larger than {POLL_BYTES_MAX} bytes")
                pieces.append(piece)
            return b"".join(pieces)


async def _whole(response: httpx2.Response) -> bytes:
    """Read a refusal, up to `PROBLEM_BYTES_MAX`."""
    pieces = b""
    async for piece in response.aiter_raw():
        pieces += piece
        if len(pieces) > PROBLEM_BYTES_MAX:
            break
    return pieces


def _refusal(response: httpx2.Response, body: bytes, world: World) -> MidstreamError:
    wait_s = retry_after_s(response.headers.get("retry-after", ""), now=world.now())
    return refusal_of(response.status_code, body, wait_s)


def http_client(url: str) -> httpx2.AsyncClient:
    """Create the HTTP client that the connections of one client share. The protocol has its own time limits."""
    address = httpx2.URL(url)
    is_here = is_loopback(address.host)
    return httpx2.AsyncClient(
        follow_redirects=False,  # secrets must reach only this server (SEC-73)
        # Loading the system's certificates takes longer than a turn.
        verify=not (is_here and address.scheme == "http"),
        timeout=httpx2.Timeout(ANSWER_S, connect=CONNECT_S, read=None, pool=None),
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=20),
        trust_env=not is_here,
    )


async def is_reachable(client: httpx2.AsyncClient, server: str, headers: Mapping[str, str]) -> bool:
    """Return whether a server answers an ordinary request with any status (STREAM-108)."""
    try:
        async with client.stream("GET", f"{server}/v1/probe/poll", headers=headers) as answer:
            return answer.status_code not in _AWAY
    except httpx2.HTTPError:
        return False
