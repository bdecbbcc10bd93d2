"""Which transport a client takes to its server: tried in turn, and remembered for a while.

A WebSocket costs least, so it is tried first. Where something in between refuses it, or lets nothing through,
server-sent events are tried, and then long polls, which get through wherever a page does. What worked is
remembered: for a day where the reason was plain (a refusal, silence on a connection that was made), for minutes where
it was not (lost connections look like a bad network too). While a server answers nothing at all, nothing is learnt: a
restart is no reason to do without WebSockets.
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
    NotFoundError,
    ProtocolError,
    UnauthorizedError,
    UsageError,
)
from midstream.file_safety import quarantine, read_own, replace_own

if TYPE_CHECKING:
    import httpx2

AUTO: Final = "auto"
FIRST_FRAME_S = 5.0
"""Seconds for the first frame of a connection; a server sends `welcome` at once."""
LOST_MAX = 2
"""Connections in a row that may be lost before their first frame until the next transport is tried."""
REMEMBERED_S = 24 * 3600.0
"""Seconds for which a transport is remembered where something in between plainly does not let a better one through."""
REMEMBERED_DOUBTFUL_S = 600.0
"""Seconds where the better ones were only lost, as in any bad network."""
SERVERS_MAX = 200
"""Servers that are remembered; those that are forgotten soonest anyway go first."""

CALLED = "the file of transports that worked"

_log = logging.getLogger(__name__)


class TransportKind(StrEnum):
    """A transport, the best first."""

    WEBSOCKET = "websocket"
    SSE = "sse"
    POLL = "poll"


TransportName = Literal["auto", "websocket", "sse", "poll"]
"""What a program writes for `transport`: a `TransportKind`, or `AUTO`."""


class Remembered(Struct, frozen=True):
    """Transport that worked at a server, and until when that is believed, in seconds since 1970."""

    transport: TransportKind
    until: float

    def is_believed(self, now: float) -> bool:
        """Whether to begin with it; not where a clock was wrong, then or now."""
        return now < self.until <= now + REMEMBERED_S


class RememberedTransports:
    """Transports that worked, by server, in a file beside the checkpoints.

    It is a convenience: a file that cannot be read or written costs a slower first connection and nothing else.

    Args:
        path: Shared by the processes of a user, replaced in one piece; None keeps it in memory.
    """

    def __init__(self, path: Path | None, *, world: World = World()) -> None:
        self._path = path
        self._world = world
        self._in_memory: dict[str, Remembered] = {}

    def get(self, server: str) -> Remembered | None:
        """Return what worked at a server and is still believed."""
        found = self._read().get(server)
        return found if found is not None and found.is_believed(self._world.now()) else None

    def put(self, server: str, worked: Remembered) -> None:
        """Store what worked."""
        self._write({**self._read(), server: worked})

    def delete(self, server: str) -> None:
        """Begin with the best one again."""
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
            (pair for pair in known.items() if pair[1].is_believed(now)), key=lambda pair: pair[1].until
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
    """How one client reaches its server.

    Args:
        transport: `auto`, or the one to take.
        headers: What to send with a connection, asked for each.
        remembered: What worked before.

    Raises:
        UsageError: It is no address of a server, or no transport.
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
            raise UsageError(f"a transport is {AUTO} or one of {', '.join(TransportKind)}, not {transport!r}")
        self.first_frame_s = FIRST_FRAME_S
        self._fixed = None if transport == AUTO else TransportKind(transport)
        self._headers = headers
        self._remembered = remembered
        self._world = world
        self._first = Remembered(TransportKind.WEBSOCKET, 0.0)
        """The one to begin with; what is kept is read when it is not believed any more."""
        self._doubted: TransportKind | None = None
        """The one to begin with because those before it were lost, until it has worked."""
        self._lost = 0
        self._http: httpx2.AsyncClient | None = None
        self.is_known = False
        """Whether a server of ours answered there, to this process or one before it."""

    async def connect(self, session: str) -> Transport:
        """Make a connection to a session.

        Raises:
            MidstreamError: It could not be made; its `retry` is whether to try again.
        """
        if self._fixed is not None:
            trial = Trial(self, session, (self._fixed,), first_frame_s=None)
        else:
            trial = Trial(self, session, await self._order(), first_frame_s=self.first_frame_s)
        await trial.begin()
        return trial

    async def _order(self) -> tuple[TransportKind, ...]:
        """Return the transports in the order in which they are to be tried."""
        if not self._first.is_believed(self._world.now()):
            found = await asyncio.to_thread(self._remembered.get, self._base)
            self._first = found or Remembered(
                TransportKind.WEBSOCKET, self._world.now() + REMEMBERED_DOUBTFUL_S
            )
        return _from(self._doubted or self._first.transport)

    async def open(self, way: TransportKind, session: str) -> Transport:
        """Make a connection by one transport.

        Raises:
            MidstreamError: It could not be made. Over plain HTTP that is known with the first `receive`.
        """
        address = f"{self._base}{session_path(session)}"
        if way is TransportKind.WEBSOCKET:
            url = websocket_url(f"{address}/stream")
            # Here and not above: a script that only imports the client does not load `websockets` and `ssl`.
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
            # Loaded by who needs it: most clients never do.
            from midstream.client import http_transport  # noqa: PLC0415

            self._http = http_transport.http_client(self._base)
        return self._http

    async def close(self) -> None:
        """Let go of what connections share. Calling it twice is harmless."""
        shared, self._http = self._http, None
        if shared is not None:
            await shared.aclose()

    # --- what trials find -----------------------------------------------------------------------------------------

    async def is_there(self) -> bool:
        """Whether a server answers a plain request now, whatever it answers."""
        from midstream.client import http_transport  # noqa: PLC0415 - see `_plain`

        try:
            async with asyncio.timeout(self.first_frame_s):
                return await http_transport.is_there(self._plain(), self._base, await self._headers())
        except (TimeoutError, ConnectionLostError):  # the latter where another program has the server's port
            return False

    async def note_success(self, way: TransportKind) -> None:
        """Begin with this one from now on; keep it for as long as the reason is good."""
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
        """A connection was lost before its first frame: after some in a row the next transport gets its turn.

        A server that answers nothing at all is no evidence about a transport (STREAM-108).
        """
        if self._fixed is not None or not await self.is_there():
            return
        self._lost += 1
        if self._lost >= LOST_MAX:
            self._lost = 0
            self._doubted = _from(way)[1]

    def explain(self, refusal: MidstreamError) -> MidstreamError:
        """Return what a refusal by every transport means: who answers where the server was will go (STREAM-107)."""
        if self.is_known and _may_be_foreign(refusal) and not isinstance(refusal, AccessError):
            return ConnectionLostError(
                f"the answer is not from the server but from a proxy: {refusal.message}"
            )
        return refusal


class Trial(Transport):
    """A connection that finds its transport: frames are sent again over the next one, until a frame comes.

    The server takes each command once, so that saying it twice is harmless (STREAM-12).

    Args:
        first_frame_s: Seconds for the first frame over each of them; None for as long as it takes.
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
        self._said: list[bytes] = []
        self._is_settled = False
        self._sending = asyncio.Lock()
        self._refusal: MidstreamError | None = None

    @property
    @override
    def received_bytes(self) -> int:
        return self._transport.received_bytes if self._transport is not None else 0

    async def begin(self) -> None:
        """Make the first connection that can be made.

        Raises:
            MidstreamError: None can, or the server refused.
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
            assert self._transport is not None, "it was begun"
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
                self._said.clear()
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
                self._said += frames
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
            await made.send(self._said)

    async def _next_after(self, error: MidstreamError, *, is_silent: bool = False) -> None:
        """Go on to the next transport where something in between may be what refused; else raise."""
        if not is_silent and isinstance(error, ConnectionLostError):
            # STREAM-109: a handshake that something swallows is silence too.
            is_swallowed = isinstance(error.__cause__, TimeoutError) and len(self._order) > 1
            is_silent = is_swallowed and await self._ways.is_there()
            if not is_silent:
                await self._ways.note_loss(self._order[0])
                raise error
        if not (is_silent or _may_be_foreign(error)):
            raise error
        self._refusal = self._refusal or error
        self._order.popleft()
        if not self._order:
            raise self._ways.explain(self._refusal)


def _may_be_foreign(refusal: MidstreamError) -> bool:
    """Whether a refusal may be of a proxy: our server's has more fields."""
    return type(refusal) in (AccessError, NotFoundError, ProtocolError)


def _from(way: TransportKind) -> tuple[TransportKind, ...]:
    """Return all transports, beginning with this one, each followed by the next."""
    every = (*TransportKind,)
    at = every.index(way)
    return every[at:] + every[:at]
