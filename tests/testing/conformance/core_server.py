"""The server's half of the protocol and the fold of a session, as a server in memory without tasks.

Its agent answers as soon as no connection has input any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from midstream.errors import ConnectionLostError, StreamFencedError
from midstream.protocol.frames import EventId
from midstream.protocol.server_stream import Admit, ServerStream, Submit, waiting_on
from midstream.session.turn.commands import Refused
from midstream.session.turn.states import AwaitingModel
from tests.protocol.stream_link import MemoryHost
from tests.session.turn_stories import answers, streams

HEARTBEAT_S = 0.01
"""Heartbeat of its welcomes: a trial waits three times as long for a missing one."""


class CoreServer:
    """One server; each of its sessions is a journal in memory."""

    def __init__(self) -> None:
        self.hosts: dict[str, MemoryHost] = {}
        self.wires: dict[str, list[CoreWire]] = {}

    async def connect(self, session: str) -> CoreWire:
        """Open a connection."""
        wire = CoreWire(self, session)
        self.wires.setdefault(session, []).append(wire)
        return wire

    def host(self, session: str) -> MemoryHost:
        """Return the journal of a session."""
        return self.hosts.setdefault(session, MemoryHost())

    def fence(self, newer: CoreWire) -> None:
        """Let an admitted connection take its stream, unless it is the older one."""
        error = StreamFencedError("a newer connection took the stream over")
        for wire in self.wires[newer.session]:
            is_other = wire is not newer and wire.stream.is_admitted and not wire.stream.is_closed
            if not is_other or wire.stream.stream != newer.stream.stream:
                continue
            older = newer if newer.stream.is_before(wire.stream) else wire
            older.stream.fail(error, now=0.0)

    def think(self, session: str) -> bool:
        """Let the agent answer; return whether there was a pending answer."""
        turn = self.host(session).session.turn
        if not isinstance(turn, AwaitingModel) or not turn.attempt:
            return False
        host = self.host(session)
        host.do(streams("ready", turn=turn.turn, response=turn.response_no, attempt=turn.attempt), at=0.0)
        host.do(answers("ready", turn=turn.turn, response=turn.response_no, attempt=turn.attempt), at=0.0)
        return True

    def feed(self, session: str) -> None:
        """Send every reader the new records of the journal."""
        host = self.host(session)
        for wire in self.wires[session]:
            if wire.stream.is_admitted:
                wire.stream.deliver(host.line[wire.stream.cursor :], now=0.0)


class CoreWire:
    """One connection to the server."""

    def __init__(self, server: CoreServer, session: str) -> None:
        self.server = server
        self.session = session
        self.stream = ServerStream(heartbeat_s=HEARTBEAT_S, now=0.0)
        self.frames: list[bytes] = []
        self._was_silent = False

    async def send(self, frames: Sequence[bytes]) -> None:
        for frame in frames:
            self.stream.receive(frame, now=0.0)
            self._serve()

    def _serve(self) -> None:
        host = self.server.host(self.session)
        for request in self.stream.requests():
            match request:
                case Admit(event_id=event_id):
                    self.stream.admit(host.session, epoch_at=host.epoch_at(event_id), now=0.0)
                    if self.stream.is_admitted and self.stream.stream:
                        self.server.fence(self)
                case Submit(seqno, command):
                    try:
                        host.do(command, at=0.0)
                    except Refused as refused:
                        self.stream.refuse(seqno, refused.error, now=0.0)
                    else:
                        self.stream.acknowledge(seqno, now=0.0)
        deadline = self.stream.next_deadline()
        if deadline is not None and deadline.at <= 0.0:
            newest: EventId = host.newest
            self.stream.handle_deadline(newest=newest, waiting_on=waiting_on(host.session), now=0.0)
        self.server.feed(self.session)

    async def receive(self) -> bytes:
        while not self._take():
            if self.stream.is_closed:
                raise ConnectionLostError("the server ended the connection")
            if not self.server.think(self.session) and not self._let_silence_pass():
                await asyncio.Event().wait()  # No input will ever come: each wait has a limit.
            self.server.feed(self.session)
        return self.frames.pop(0)

    def _let_silence_pass(self) -> bool:
        """Advance the clock to the next heartbeat, once; return whether it did."""
        deadline = self.stream.next_deadline()
        if deadline is None or self._was_silent or not self.stream.is_admitted:
            return False
        self._was_silent = True
        host = self.server.host(self.session)
        waits = waiting_on(host.session)
        self.stream.handle_deadline(newest=host.newest, waiting_on=waits, now=deadline.at)
        return True

    def _take(self) -> bool:
        self.frames += self.stream.frames_to_send()
        return bool(self.frames)

    async def close(self) -> None:
        wires = self.server.wires[self.session]
        if self in wires:
            wires.remove(self)
