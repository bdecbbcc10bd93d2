"""Runs the steps of a client's script against a client in any language, in the role of a server over a real connection.

`ClientTrial` (`client_side`) tests midstream's own client half. This module tests a client by its frames to a
`ScriptedServer`, over each transport, and by its state through `ProbedClient`, which you implement for your client. The
steps are the same; the client has its own clock, which `ProbedClient.advance_clock` advances.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal, Protocol

import msgspec
from msgspec import Struct

from midstream.client.transport_selection import TransportKind
from midstream.environment import World
from midstream.errors import MidstreamError
from midstream.testing.conformance.client_side import STATES
from midstream.testing.conformance.matching import Names, difference, difference_of_event_ids, fill
from midstream.testing.conformance.scripted_server import ScriptedConnection, ScriptedServer
from midstream.testing.conformance.scripts import SESSION_PREFIX, Json, Script
from midstream.testing.conformance.server_side import ScriptOutcome

WAIT_S = 20.0
"""Seconds for each required action of a client."""
POLL_S = 0.02
"""Seconds between two checks of a client."""
SHOWN_CHARS_MAX = 300
"""Characters of a client's frame in a report."""
GRACE_S = 0.5
"""Seconds for the actions of a client that cannot report its received and sent frames."""


class ClientState(Struct, frozen=True):
    """State of a client after all due work is stored, sent and delivered.

    Args:
        phase: `waiting` (for the next try), `connecting` (until the welcome), `live`, `ended`.
        code: With `ended`, the code of its error; None if it ended without an error.
        delivered: The ids of all events that this process delivered to its application, in order; `gone` stands for a
            `gone` frame.
        is_acknowledged, is_reconnecting, is_degraded, has_checkpoint: See the steps of a script.
        frames_received: Number of frames that this process received; None if unknown.
        frames_sent: Number of frames that it sent on its newest connection; None if unknown.
    """

    phase: Literal["waiting", "connecting", "live", "ended"]
    code: str | None
    delivered: tuple[str, ...]
    is_acknowledged: bool
    is_reconnecting: bool
    is_degraded: bool
    has_checkpoint: bool
    frames_received: int | None = None
    frames_sent: int | None = None


class ProbedClient(Protocol):
    """A client under test: one stream at a time, at the server with the given address."""

    async def begin(self, session: str, transport: TransportKind) -> None:
        """Begin as a new client, in this session, over only this transport."""

    async def submit(self, payload: Json) -> None:
        """Let the application submit this payload: a `send` opens the stream, a `cancel` follows on it."""

    async def detach(self) -> None:
        """Let the application leave, and keep the stored data."""

    async def mark_handled(self, event_id: str) -> None:
        """Mark an event as handled by the application."""

    async def restart(self) -> None:
        """Kill the client, and start the next one with the checkpoint."""

    async def advance_clock(self) -> None:
        """Advance the client's clock to its next deadline: a try to connect, or the end of a silent connection."""

    async def read_state(self) -> ClientState:
        """Return the client's state."""

    async def end(self) -> None:
        """End the client."""


class WireTrial:
    """Runs scripts against one client.

    Args:
        wait_s: Seconds for each required action of the client.
    """

    def __init__(
        self,
        server: ScriptedServer,
        subject: ProbedClient,
        *,
        wait_s: float = WAIT_S,
        world: World = World(),
    ) -> None:
        self._server = server
        self._wait_s = wait_s
        self._subject = subject
        self._world = world
        self._session = ""
        self._connections: list[ScriptedConnection] = []
        """Connections of this script, the newest last."""
        self._frames_checked = 0
        """Number of frames for which there was a step."""
        self._events_checked = 0
        self._names: Names = {}

    async def run(self, script: Script, transport: TransportKind) -> ScriptOutcome:
        """Run one script over one transport, and return the result; impossible steps are skipped."""
        if "pipelining" in script.needs and transport is not TransportKind.WEBSOCKET:
            return ScriptOutcome(script.name, script.clauses, transport=transport)  # STREAM-38
        self._session = self._world.new_id(SESSION_PREFIX)
        self._connections, self._frames_checked, self._events_checked, self._names = [], 0, 0, {}
        number = 0
        try:
            await self._subject.begin(self._session, transport)
            for number, step in enumerate((*script.steps, {"end": True}), start=1):
                if (what := await self._difference(step)) is not None:
                    return self._failed(script, transport, number, what)
        except TimeoutError:
            return self._failed(
                script, transport, number, f"the client did not react within {self._wait_s:g} s"
            )
        except MidstreamError as error:
            return self._failed(script, transport, number, error.message)
        finally:
            await self._subject.end()
        return ScriptOutcome(script.name, script.clauses, transport=transport)

    def _failed(self, script: Script, transport: TransportKind, step: int, what: str) -> ScriptOutcome:
        """Return the result for a difference, with the client's last frames."""
        frames = [frame for connection in self._connections for frame in connection.received][-3:]
        last_frames = tuple(msgspec.json.encode(frame).decode()[:SHOWN_CHARS_MAX] for frame in frames)
        return ScriptOutcome(script.name, script.clauses, what, step, last_frames, transport)

    async def _difference(self, step: Json) -> str | None:
        async with asyncio.timeout(self._wait_s):
            match step:
                case {"sent": list(patterns)}:
                    return await self._difference_of_sent(patterns)
                case {"delivered": list(wanted)}:
                    return await self._difference_of_events(wanted)
                case {"end": _}:
                    return await self._difference_of_sent([]) or await self._difference_of_events([])
                case {"connected": _}:
                    return await self._accept_connection()
                case {"waiting": _}:
                    await self._until(lambda state: state.phase == "waiting")
                case {"dropped": _}:
                    await self._until(self._is_without)
                case {"ended": code}:
                    state = await self._until(lambda state: state.phase == "ended")
                    return None if state.code == code else f"it ended with {state.code!r}, not {code!r}"
                case _ if len(step) == 1 and step.keys() <= STATES:
                    return await self._difference_of_state(*next(iter(step.items())))
                case _:
                    return await self._act(step)
        return None

    async def _act(self, step: Json) -> str | None:
        match step:
            case {"submit": dict(payload)}:
                await self._subject.submit(fill(payload, self._names))
            case {"cancel": _}:
                await self._subject.submit({"type": "cancel"})
            case {"detach": _}:
                await self._subject.detach()
            case {"mark_handled": str(event_id)}:
                await self._subject.mark_handled(event_id)
                # A cursor may be stored later; the next step needs it.
                await self._subject.read_state()
            case {"restart": _}:
                while not (arrived := self._server.new_connections(self._session)).empty():
                    arrived.get_nowait()
                await self._subject.restart()
                self._events_checked = 0
            case {"receive": dict(frame)}:
                await self._receive(fill(frame, self._names))
            case {"receive_text": str(text)} if self._connections:
                await self._connections[-1].send_text(text)
            case {"lost": _} if self._connections:
                self._connections[-1].cut()
                await self._until(self._is_without)
            case {"silence": _}:
                await self._subject.advance_clock()
            case _:
                return f"the script has an unknown step: {sorted(step)}"
        return None

    async def _accept_connection(self) -> str | None:
        """Accept the client's connection when it is due, and read its `open`."""
        arrived = self._server.new_connections(self._session)
        while arrived.empty():
            state = await self._subject.read_state()
            if state.phase == "ended":
                return "no connection is expected"
            if state.phase == "waiting":
                await self._subject.advance_clock()
            await self._world.sleep(POLL_S)
        connection = arrived.get_nowait()
        self._connections.append(connection)
        while not connection.received:
            await self._server.wait_for_frame()
        opening = connection.received[0]
        self._names.setdefault("stream", opening.get("stream"))
        self._names.setdefault("secret", opening.get("secret"))
        return None

    async def _receive(self, frame: Json) -> None:
        assert self._connections, "a script connects first"
        before = (await self._subject.read_state()).frames_received
        await self._connections[-1].send(frame)
        if before is None:
            await self._world.sleep(GRACE_S)
        else:
            await self._until(lambda state: state.frames_received is None or state.frames_received > before)

    def _is_without(self, state: ClientState) -> bool:
        """Whether the client has left its connection: it waits, has ended, or has a newer one."""
        has_newer = not self._server.new_connections(self._session).empty()
        return has_newer or state.phase in ("waiting", "ended")

    def _has_all_sent(self, state: ClientState) -> bool:
        """Whether all frames of the client on the newest connection have arrived."""
        is_another = not self._connections or not self._server.new_connections(self._session).empty()
        return (
            is_another
            or state.frames_sent is None
            or len(self._connections[-1].received) >= state.frames_sent
        )

    async def _until(self, is_so: Callable[[ClientState], bool]) -> ClientState:
        while not is_so(state := await self._subject.read_state()):
            await self._world.sleep(POLL_S)
        return state

    # --- comparisons ----------------------------------------------------------------------------------------------

    async def _difference_of_sent(self, patterns: list[Json]) -> str | None:
        if (await self._subject.read_state()).frames_sent is None:
            await self._world.sleep(GRACE_S)
        await self._until(self._has_all_sent)
        frames = [frame for connection in self._connections for frame in connection.received][
            self._frames_checked :
        ]
        self._frames_checked += len(frames)
        if len(frames) != len(patterns):
            kinds = [frame["type"] for frame in frames]
            return f"{len(frames)} frames were sent, not {len(patterns)}: {kinds}"
        for number, (pattern, frame) in enumerate(zip(patterns, frames, strict=True)):
            if (what := difference(pattern, frame, self._names)) is not None:
                return f"frame {number}: {what}"
        return None

    async def _difference_of_events(self, wanted: list[str]) -> str | None:
        state = await self._subject.read_state()
        event_ids, self._events_checked = list(state.delivered[self._events_checked :]), len(state.delivered)
        return difference_of_event_ids(wanted, event_ids)

    async def _difference_of_state(self, name: str, wanted: bool) -> str | None:  # noqa: FBT001 - a script's value
        state = await self._subject.read_state()
        found = {
            "is_acknowledged": state.is_acknowledged,
            "is_reconnecting": state.is_reconnecting,
            "is_degraded": state.is_degraded,
            "has_checkpoint": state.has_checkpoint,
        }[name]
        return None if found is wanted else f"{name} is {found}"
