"""Selection of a client's transport: transports are tried in order, and the one that worked is remembered.

A WebSocket is tried first, because it costs least. If a proxy refuses or blocks it, server-sent events are tried, then
long polling, which works in every network that permits web pages. The choice is remembered for a day after a clear
reason (a refusal, silence on an open connection). It is remembered for minutes after lost connections, which may also
mean a bad network. While the server does not answer at all, nothing is changed, because it may be restarting.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import msgspec
from msgspec import Struct
from typing_extensions import override

from midstream.client.connection_headers import ConnectionHeaders
from midstream.client.transports import Transport, base_url, session_path, websocket_url
from midstream.environment import World
from midstream.errors import (
    AccessError,
    ConnectionLostError,
    MidstreamError,
    UnauthorizedError,
    UsageError,
)
from midstream.file_safety import quarantine, read_own, replace_own

if TYPE_CHECKING:
    import httpx2

AUTO: Final = "auto"
FIRST_FRAME_S = 5.0
"""Time limit of the first frame of a connection, in seconds; a server sends `welcome` at once."""
LOST_MAX = 2
"""Consecutive connections lost before their first frame, after which the next transport is tried."""
REMEMBERED_S = 24 * 3600.0
"""Seconds for which a transport is remembered if a proxy clearly blocks better ones."""
REMEMBERED_DOUBTFUL_S = 600.0
"""The same if connections of better transports were only lost, as in a bad network."""
SERVERS_MAX = 200
"""Servers that are remembered; those that expire first are removed."""

CALLED = "the file of transports that worked"

_log = logging.getLogger(__name__)


class TransportKind(StrEnum):
    """Transports, best first."""

    WEBSOCKET = "websocket"
    SSE = "sse"
    POLL = "poll"


TransportName = Literal["auto", "websocket", "sse", "poll"]
"""Values of the argument `transport`: a `TransportKind`, or `AUTO`."""


class Remembered(Struct, frozen=True):
    """Transport that worked at a server, and the end of its validity, in seconds since 1970."""

    transport: TransportKind
    until: float

    def is_valid(self, now: float) -> bool:
        """Return whether it is still valid; implausible times, from a wrong clock, do not count."""
        return now < self.until <= now + REMEMBERED_S


class RememberedTransports:
    """File of the transports that worked, by server.

    If it cannot be read or written, only the first connection is slower.

    Args:
        path: The file, which the processes of a user share and replace atomically; None keeps it in memory.
    """

    def __init__(self, path: Path | None, *, world: World = World()) -> None:
        self._path = path
        self._world = world
        self._in_memory: dict[str, Remembered] = {}

    def get(self, server: str) -> Remembered | None:
        """Return the valid entry of a server, or None."""
        found = self._read().get(server)
        return found if found is not None and found.is_valid(self._world.now()) else None

    def put(self, server: str, worked: Remembered) -> None:
        """Store the entry of a server."""
        self._write({**self._read(), server: worked})

    def delete(self, server: str) -> None:
        """Delete the entry of a server."""
        known = self._read()
        if known.pop(server, None) is not None:
            self._write(known)

    def _read(self) -> dict[str, Remembered]:
        if self._path is None:
            return {**self._in_memory}
        try:
            return msgspec.json.decode(read_own(self._path, CALLED), type=dict[str, Remembered])
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return {}
        except UsageError as error:
            _log.warning("%s. It was moved to %s", error.message, quarantine(self._path))
            return {}

    def _write(self, known: dict[str, Remembered]) -> None:
        now = self._world.now()
        living = sorted(
            (pair for pair in known.items() if pair[1].is_valid(now)), key=lambda pair: pair[1].until
        )
        kept = dict(living[-SERVERS_MAX:])
        if self._path is None:
            self._in_memory = kept
            return
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_own(self._path, msgspec.json.encode(kept))
        except OSError as error:
            _log.debug("the working transport could not be stored: %s", error.strerror)


class TransportSelection:
    """Selects the transport of one client to its server.

    Args:
        transport: `auto`, or a fixed transport.
        headers: Returns the headers of each connection.
        remembered: Transports that worked earlier.

    Raises:
        UsageError: The URL of the server or the transport is invalid.
    """

    def __init__(
        self,
        server: str,
        *,
        transport: TransportKind | TransportName = AUTO,
        headers: ConnectionHeaders,
        remembered: RememberedTransports,
        world: World = World(),
    ) -> None:
        self._base = base_url(server)
        if transport != AUTO and transport not in set(TransportKind):
            raise UsageError(
                f"the transport must be {AUTO} or one of {', '.join(TransportKind)}, not {transport!r}"
            )
        self.first_frame_s = FIRST_FRAME_S
        self._fixed = None if transport == AUTO else TransportKind(transport)
        self._headers = headers
        self._remembered = remembered
        self._world = world
        self._first = Remembered(TransportKind.WEBSOCKET, 0.0)
        """The transport to try first; after its expiry, the file is read."""
        self._doubted: TransportKind | None = None
        """The transport to try first after lost connections, until it has worked."""
        self._lost = 0
        self._http: httpx2.AsyncClient | None = None
        self.is_known = False
        """Whether a midstream server answered this process or an earlier one."""

    async def connect(self, session: str) -> Transport:
        """Open a connection to a session.

        Raises:
            MidstreamError: The connection failed; `retry` of the error determines whether to try again.
        """
        if self._fixed is not None:
            trial = Trial(self, session, (self._fixed,), first_frame_s=None)
        else:
            trial = Trial(self, session, await self._order(), first_frame_s=self.first_frame_s)
        await trial.begin()
        return trial

    async def _order(self) -> tuple[TransportKind, ...]:
        if not self._first.is_valid(self._world.now()):
            found = await asyncio.to_thread(self._remembered.get, self._base)
            self._first = found or Remembered(
                TransportKind.WEBSOCKET, self._world.now() + REMEMBERED_DOUBTFUL_S
            )
        return _from(self._doubted or self._first.transport)

    async def open(self, way: TransportKind, session: str) -> Transport:
        """Open a connection over one transport.

        Raises:
            MidstreamError: The connection failed. Over plain HTTP, the first `receive` reports that.
        """
        address = f"{self._base}{session_path(session)}"
        if way is TransportKind.WEBSOCKET:
            url = websocket_url(f"{address}/stream")
            # Imported here, so that importing the client does not load `websockets` and `ssl`.
            from midstream.client.websocket_transport import connect_websocket  # noqa: PLC0415

            try:
                return await connect_websocket(url, headers=await self._headers(), world=self._world)
            except UnauthorizedError as error:
                raise self._headers.explain(error) from error
        from midstream.client import http_transport  # noqa: PLC0415 - see `_plain`

        paths = http_transport.HttpPaths(address, self._world.new_id("connection"), await self._headers())
        down = (
            http_transport.EventStream(self._world)
            if way is TransportKind.SSE
            else http_transport.LongPoll(self._world)
        )
        return http_transport.HttpTransport(
            self._plain(), paths, down, explain=self._headers.explain, world=self._world
        )

    def _plain(self) -> httpx2.AsyncClient:
        if self._http is None:
            # Imported on demand: most clients do not need it.
            from midstream.client import http_transport  # noqa: PLC0415

            self._http = http_transport.http_client(self._base)
        return self._http

    async def close(self) -> None:
        """Close shared resources of connections. Idempotent."""
        shared, self._http = self._http, None
        if shared is not None:
            await shared.aclose()

    # --- results of trials -----------------------------------------------------------------------------------------

    async def is_reachable(self) -> bool:
        """Return whether a server answers an ordinary request with any status."""
        from midstream.client import http_transport  # noqa: PLC0415 - see `_plain`

        try:
            async with asyncio.timeout(self.first_frame_s):
                return await http_transport.is_reachable(self._plain(), self._base, await self._headers())
        except (TimeoutError, ConnectionLostError):  # the latter if another program uses the server's port
            return False

    async def note_success(self, way: TransportKind) -> None:
        """Try this transport first from now on, and store it."""
        self.is_known = True
        self._lost = 0
        doubted, self._doubted = self._doubted, None
        if way in (self._fixed, self._first.transport):
            return
        for_s = REMEMBERED_DOUBTFUL_S if way is doubted else REMEMBERED_S
        self._first = Remembered(way, self._world.now() + for_s)
        _log.info("%s uses the transport %s from now on", self._base, way)
        if way is TransportKind.WEBSOCKET:
            await asyncio.to_thread(self._remembered.delete, self._base)
        else:
            await asyncio.to_thread(self._remembered.put, self._base, self._first)

    async def note_loss(self, way: TransportKind) -> None:
        """Count a connection that was lost before its first frame; after `LOST_MAX`, try the next transport first.

        While the server does not answer at all, lost connections do not count (STREAM-108).
        """
        if self._fixed is not None or not await self.is_reachable():
            return
        self._lost += 1
        if self._lost >= LOST_MAX:
            self._lost = 0
            self._doubted = _from(way)[1]

    def explain(self, refusal: MidstreamError) -> MidstreamError:
        """Convert a refusal over all transports: at a known server's address, it is from a proxy (STREAM-107)."""
        if self.is_known and _may_be_bypassed(refusal) and not isinstance(refusal, AccessError):
            return ConnectionLostError(
                f"the answer is not from the server but from a proxy: {refusal.message}"
            )
        return refusal


class Trial(Transport):
    """A connection that tries transports: frames are resent over the next one, until a frame is received.

    Resending is safe, because the server accepts each command once (STREAM-12).

    Args:
        first_frame_s: Time limit of the first frame over each transport; None for no limit.
    """

    def __init__(
        self,
        ways: TransportSelection,
        session: str,
        order: Sequence[TransportKind],
        *,
        first_frame_s: float | None = FIRST_FRAME_S,
    ) -> None:
        self._ways = ways
        self._session = session
        self._order = deque(order)
        self._first_frame_s = first_frame_s
        self._transport: Transport | None = None
        self._sent_frames: list[bytes] = []
        self._is_settled = False
        self._sending = asyncio.Lock()
        self._refusal: MidstreamError | None = None

    @property
    @override
    def received_bytes(self) -> int:
        return self._transport.received_bytes if self._transport is not None else 0

    async def begin(self) -> None:
        """Open a connection over the first transport that works.

        Raises:
            MidstreamError: All transports failed, or the server refused.
        """
        self._transport = await self._open()

    async def _open(self) -> Transport:
        while True:
            try:
                return await self._ways.open(self._order[0], self._session)
            except MidstreamError as error:
                await self._next_after(error)

    @override
    async def receive(self) -> bytes:
        while not self._is_settled:
            assert self._transport is not None, "`begin` was called"
            try:
                async with asyncio.timeout(self._first_frame_s):
                    frame = await self._transport.receive()
            except TimeoutError:
                message = f"no data came over {self._order[0]} in time"
                await self._change(ConnectionLostError(message), is_silent=True)
            except MidstreamError as error:
                await self._change(error)
            else:
                self._is_settled = True
                self._sent_frames.clear()
                await self._ways.note_success(self._order[0])
                return frame
        assert self._transport is not None, "see above"
        try:
            return await self._transport.receive()
        except MidstreamError as error:
            if (meant := self._ways.explain(error)) is error:
                raise
            raise meant from error

    @override
    async def send(self, frames: Sequence[bytes]) -> None:
        async with self._sending:
            if not self._is_settled:
                self._sent_frames += frames
            if self._transport is not None:
                await self._transport.send(frames)

    @override
    async def close(self) -> None:
        if self._transport is not None:
            await self._transport.close()

    async def _change(self, error: MidstreamError, *, is_silent: bool = False) -> None:
        await self._next_after(error, is_silent=is_silent)
        async with self._sending:
            if self._transport is not None:
                await self._transport.close()
                self._transport = None
            made = self._transport = await self._open()
            await made.send(self._sent_frames)

    async def _next_after(self, error: MidstreamError, *, is_silent: bool = False) -> None:
        """Try the next transport if a proxy may have refused; else raise."""
        if not is_silent and isinstance(error, ConnectionLostError):
            # STREAM-109: a handshake without an answer also counts as silence.
            is_swallowed = isinstance(error.__cause__, TimeoutError) and len(self._order) > 1
            is_silent = is_swallowed and await self._ways.is_reachable()
            if not is_silent:
                await self._ways.note_loss(self._order[0])
                raise error
        if not (is_silent or _may_be_bypassed(error)):
            raise error
        self._refusal = self._refusal or error
        self._order.popleft()
        if not self._order:
            raise self._ways.explain(self._refusal)


def _may_be_bypassed(refusal: MidstreamError) -> bool:
    """Return whether another transport may get past a refusal: an intermediary refused, and requires no login."""
    return refusal.is_foreign and not isinstance(refusal, UnauthorizedError | ConnectionLostError)


def _from(way: TransportKind) -> tuple[TransportKind, ...]:
    """Return all transports in cyclic order, beginning with this one."""
    every = (*TransportKind,)
    at = every.index(way)
    return every[at:] + every[:at]
