"""Our own half of the protocol behind our own transports, as the subject of a `WireTrial`."""

from __future__ import annotations

import asyncio

import msgspec

from midstream.client.connection_headers import ConnectionHeaders
from midstream.client.transport_selection import RememberedTransports, TransportKind, TransportSelection
from midstream.client.transports import Transport
from midstream.environment import World
from midstream.errors import MidstreamError
from midstream.protocol.checkpoint import Checkpoint
from midstream.protocol.client_stream import ClientStream
from midstream.protocol.event_inbox import Forget
from midstream.protocol.frames import EventId, decode_payload
from midstream.testing.conformance.client_side import checkpoint_after
from midstream.testing.conformance.client_wire import ClientState
from midstream.testing.conformance.scripts import Json

QUIET_S = 0.002
"""Seconds of silence after which the state is checked."""


class CoreSubject:
    """One stream, a checkpoint in memory, and a clock that the test advances."""

    def __init__(self, url: str, world: World) -> None:
        self._url = url
        self._world = world
        self._transport: Transport | None = None
        self._receiving: asyncio.Task[bytes] | None = None

    async def begin(self, session: str, transport: TransportKind) -> None:
        self._session, self._transport_kind = session, transport
        self._selection = TransportSelection(
            self._url, headers=ConnectionHeaders(self._url, {}), remembered=RememberedTransports(None)
        )
        key, secret = self._world.new_id("stream"), self._world.new_secret()
        self._checkpoint: Checkpoint | None = Checkpoint(key, secret)
        self._lives, self._now = 0, 0.0
        self._begin()

    def _begin(self) -> None:
        assert self._checkpoint is not None
        self._stream = ClientStream.resume(self._checkpoint, life=self._lives, now=self._now)
        self._lives += 1
        self._delivered: list[str] = []
        self._frames_received = self._frames_sent = 0
        self._stream.handle_deadline(now=self._now)

    async def submit(self, payload: Json) -> None:
        command = decode_payload(msgspec.json.encode(payload))
        if payload["type"] == "cancel":
            self._stream.abort()
        else:
            self._stream.submit(command)

    async def detach(self) -> None:
        self._stream.detach()

    async def mark_handled(self, event_id: str) -> None:
        self._stream.mark_handled(EventId.parse(event_id))
        await self._settle()

    async def restart(self) -> None:
        await self._drop_connection()
        self._begin()

    async def advance_clock(self) -> None:
        deadline = self._stream.next_deadline()
        if deadline is not None:
            self._now = max(self._now, deadline.at)
            self._stream.handle_deadline(now=self._now)

    async def read_state(self) -> ClientState:
        while await self._does_something():
            pass
        stream = self._stream
        is_wanted = stream.is_connection_wanted
        return ClientState(
            "ended" if stream.is_ended else "connecting" if is_wanted else "waiting",
            stream.error.code if stream.error else None,
            tuple(self._delivered),
            stream.is_acknowledged,
            stream.is_reconnecting,
            stream.is_degraded,
            self._checkpoint is not None,
            self._frames_received,
            self._frames_sent,
        )

    async def end(self) -> None:
        await self._drop_connection()
        await self._selection.close()

    # --- work of an attachment
    # --------------------------------------------------------------------------------

    async def _does_something(self) -> bool:
        await self._settle()
        stream = self._stream
        if self._transport is None and stream.is_connection_wanted:
            await self._connect()
            return True
        if self._transport is not None and not stream.is_connection_wanted:
            await self._drop_connection()
            stream.end_connection(chance=0.0, now=self._now)
            stream.handle_deadline(now=self._now)
            return True
        return await self._receives()

    async def _settle(self) -> None:
        for write in self._stream.writes():
            self._checkpoint = checkpoint_after(self._checkpoint, write)
        frames = self._stream.frames_to_send()
        if self._transport is not None:
            self._frames_sent += len(frames)
            await self._transport.send(frames)
        for event in self._stream.events():
            self._delivered.append("gone" if isinstance(event, Forget) else str(event.event_id))

    async def _connect(self) -> None:
        try:
            self._transport = await self._selection.open(self._transport_kind, self._session)
        except MidstreamError as error:
            self._stream.end_connection(error, chance=0.0, now=self._now)
        else:
            self._frames_sent = 0
            self._stream.begin_connection(now=self._now)

    async def _receives(self) -> bool:
        if self._transport is None:
            return False
        if self._receiving is None:
            self._receiving = asyncio.ensure_future(self._transport.receive())
        await asyncio.wait((self._receiving,), timeout=QUIET_S)
        if not self._receiving.done():
            return False
        received, self._receiving = self._receiving, None
        try:
            body = received.result()
        except MidstreamError as error:
            await self._drop_connection()
            self._stream.end_connection(error, chance=0.0, now=self._now)
            self._stream.handle_deadline(now=self._now)
        else:
            self._frames_received += 1
            self._stream.receive(body, now=self._now)
        return True

    async def _drop_connection(self) -> None:
        receiving, self._receiving = self._receiving, None
        if receiving is not None:
            receiving.cancel()
            await asyncio.wait((receiving,))
        transport, self._transport = self._transport, None
        if transport is not None:
            await transport.close()
