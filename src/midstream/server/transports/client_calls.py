"""Time limits of tool calls at a connected client.

A client that is away may already have the outcome, and sends it when it returns (TURN-14). The session's own deadline
is therefore the resume window. The client enforces the tool's timeout. If a connected client sends no result, the
process that has its connection ends the call.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from msgspec import Struct

from midstream.engine.runner import Runner
from midstream.environment import World
from midstream.errors import MidstreamError
from midstream.history.messages import Outcome, ToolResult
from midstream.session.calls import NO_ANSWER_CONTENT, Site
from midstream.session.session import Session
from midstream.session.turn.commands import CallFinished
from midstream.session.turn.states import RunningCalls

UNNOTICED_S = 60.0
"""Seconds for which a dead connection may stay undetected: two WebSocket pings, or a heartbeat with its TCP timeout,
and a margin."""
CLIENTS_MAX = 10_000
"""Clients with a stored time of arrival; about 2 MiB."""

_log = logging.getLogger(__name__)

StreamPlace = tuple[str, str]
"""A session and a stream in it."""


class _Client(Struct):
    since: float
    connections: int = 0
    left_at: float = 0.0


class ConnectedClients:
    """For each stream: the time since which its client is connected to this process without a gap."""

    def __init__(self) -> None:
        self._clients: OrderedDict[StreamPlace, _Client] = OrderedDict()

    def arrive(self, place: StreamPlace, *, gap_s: float, now: float) -> None:
        """Count a connection; it continues the previous one if the gap was at most `gap_s`."""
        client = self._clients.get(place)
        if client is None or (not client.connections and now - client.left_at > gap_s):
            client = self._clients[place] = _Client(now)
        client.connections += 1
        self._clients.move_to_end(place)
        if len(self._clients) > CLIENTS_MAX:
            self._clients.popitem(last=False)

    def leave(self, place: StreamPlace, *, gap_s: float, now: float) -> None:
        """Stop counting a connection. Without a counted connection, nothing changes."""
        client = self._clients.get(place)
        if client is None or not client.connections:
            return
        client.connections -= 1
        client.left_at = now
        if not client.connections and not gap_s:
            del self._clients[place]

    def connected_s(self, place: StreamPlace, *, now: float) -> float:
        """Return the seconds for which the client has been connected; 0 if it is not connected."""
        client = self._clients.get(place)
        return now - client.since if client is not None and client.connections else 0.0


def overdue(session: Session, stream: str, *, connected_s: float, now: float) -> Iterator[CallFinished]:
    """Yield a timeout for each call whose time limit at this stream's client has passed.

    Args:
        session: State of the session.
        connected_s: Seconds for which the client has been connected.
        now: Seconds since 1970.
    """
    turn, known = session.turn, session.streams.get(stream)
    if not isinstance(turn, RunningCalls) or known is None or known.turn != turn.turn:
        return
    for call in turn.calls:
        limit_s = call.plan.timeout_s + UNNOTICED_S
        is_timed = call.plan.site is Site.CLIENT and call.is_running and call.plan.timeout_s > 0
        if is_timed and min(connected_s, now - call.started_at) >= limit_s:
            result = ToolResult(call.call.id, NO_ANSWER_CONTENT, Outcome.UNKNOWN)
            yield CallFinished(turn.turn, turn.response_no, result)


class ConnectedCalls:
    """Ends the overdue calls at the client of one connection.

    Args:
        gap_s: Seconds without a connection for which the client still counts as connected.
    """

    def __init__(self, clients: ConnectedClients, place: StreamPlace, gap_s: float, world: World) -> None:
        self._clients = clients
        self._place = place
        self._gap_s = gap_s
        self._world = world
        self._ending: asyncio.Task[None] | None = None
        clients.arrive(place, gap_s=gap_s, now=world.monotonic())

    def leave(self) -> None:
        """Stop counting the connection."""
        self._clients.leave(self._place, gap_s=self._gap_s, now=self._world.monotonic())

    def end_overdue(self, runner: Runner, stream: str) -> None:
        """End the calls whose time limit has passed while the client was connected. Without such calls, do nothing."""
        if self._ending is not None:
            return
        connected_s = self._clients.connected_s(self._place, now=self._world.monotonic())
        late = [*overdue(runner.state, stream, connected_s=connected_s, now=self._world.now())]
        if late:
            name = f"late calls of {runner.session_id}"
            self._ending = self._world.spawn(self._end(runner, late), name=name)

    async def _end(self, runner: Runner, late: Sequence[CallFinished]) -> None:
        try:
            for each in late:
                await runner.submit(each)
        except MidstreamError as error:  # the next check tries again
            extra = {"session": runner.session_id, "code": error.code}
            _log.warning("a late call was not ended", extra=extra)
        finally:
            self._ending = None
