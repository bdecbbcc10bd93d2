"""The machines of both halves, found by trying every input in every state: no edge is written down by hand."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import cache
from typing import NamedTuple, TypeVar

import msgspec

from midstream import errors
from midstream.errors import DrainingError, MidstreamError, ModelError, SeqnoGapError
from midstream.history.messages import Text, UserMessage
from midstream.protocol import frames
from midstream.protocol.client_stream import ClientStream
from midstream.protocol.frames import (
    Ack,
    CancelPayload,
    Close,
    CommandFrame,
    Error,
    EventFrame,
    EventId,
    Events,
    Gone,
    HeartbeatFrame,
    Open,
    Payload,
    Ping,
    SendPayload,
    ServerFrame,
    SnapshotFrame,
    Welcome,
)
from midstream.protocol.server_stream import ServerStream
from midstream.retries import HEARTBEATS_MISSED_MAX
from midstream.server.api.problems import status_of
from midstream.session import records
from midstream.session.records import MessageAccepted, StreamOpened, TurnEnded, TurnStatus
from midstream.session.session import COMMANDS_MAX, Session, fold
from tests.protocol.values import UNSEEN, copied, distinguishing_parts

SECRET = "s" * 43
STATES_MAX = 20_000
"""Number of states of a half at which a search counts as endless."""

Half = TypeVar("Half", ClientStream, ServerStream)


class HalfEdge(NamedTuple):
    """One transition of a half from a state to another."""

    before: str
    inlet: str
    after: str


def _receives(frame: ServerFrame | bytes) -> Callable[[ClientStream], None]:
    body = frame if isinstance(frame, bytes) else frames.encode(frame)
    return lambda half: half.receive(body, now=0.0)


def _event(position: int, record: records.Record) -> EventFrame:
    return EventFrame(f"1-{position}", msgspec.Raw(records.encode(record)))


def _waits(half: ClientStream) -> None:
    if (deadline := half.next_deadline()) is not None:
        half.handle_deadline(now=deadline.at)


_TURN_EVENTS = Events(
    (
        _event(2, StreamOpened("a", "d")),
        _event(3, MessageAccepted(1, UserMessage.of("hi"), 0.0, stream="a")),
        _event(4, TurnEnded(1, TurnStatus.COMPLETED, 0.0)),
    )
)

_HEARTBEAT = HeartbeatFrame("1-1")


def _receives_three_heartbeats(half: ClientStream) -> None:
    for _ in range(HEARTBEATS_MISSED_MAX):
        _receives(_HEARTBEAT)(half)


CLIENT: Mapping[str, Callable[[ClientStream], None]] = {
    "time": _waits,
    "connected": lambda half: half.begin_connection(now=0.0),
    "disconnected": lambda half: half.end_connection(chance=0.0, now=0.0),
    "refused for good": lambda half: half.end_connection(errors.AccessError("no"), chance=0.0, now=0.0),
    "welcome": _receives(Welcome("a", "1-1", "1-1", acked=1)),
    "welcome after the turn": _receives(Welcome("a", "1-1", "1-1", acked=1, turn=1, turn_status="ended")),
    "welcome of another past": _receives(Welcome("a", "1-1", "1-1", acked=COMMANDS_MAX)),
    "degraded welcome": _receives(Welcome("a", "1-1", "1-1", is_degraded=True, reason="no disk")),
    "ack": _receives(Ack(0)),
    "heartbeat": _receives(_HEARTBEAT),
    "three heartbeats": _receives_three_heartbeats,
    "gone": _receives(Gone("1-1", "pruned")),
    "snapshot": _receives(SnapshotFrame("1-1", msgspec.Raw(b"{}"))),
    "snapshot of the end": _receives(SnapshotFrame("1-1", msgspec.Raw(b"{}"), is_over=True)),
    "unreadable record": _receives(
        Events((EventFrame("1-2", msgspec.Raw(b'{"type":"delta","turn":"of a later version"}')),))
    ),
    "end of the turn": _receives(_TURN_EVENTS),
    "final error": _receives(Error("seqno_reused", "no")),
    "refused secret": _receives(Error("wrong_secret", "no")),
    "same secret": lambda half: half.show(SECRET),
    "passing error": _receives(Error("draining", "no", "later")),
    "broken frame": _receives(b"?"),
    "unknown frame": _receives(b'{"type":"of a later version"}'),
    "detach": lambda half: half.detach(),
    "cancel": lambda half: half.abort(),
    "finish": lambda half: half.finish(),
}


def _serves_time(half: ServerStream) -> None:
    if (deadline := half.next_deadline()) is not None:
        half.handle_deadline(newest=EventId(1, 1), waiting_on="nothing", now=deadline.at)


def _receive_command(seqno: int, payload: Payload) -> Callable[[ServerStream], None]:
    body = frames.encode(CommandFrame(seqno, msgspec.Raw(frames.encode(payload))))
    return lambda half: half.receive(body, now=0.0)


_FOREIGN = fold([(1, StreamOpened("a", "the digest of another secret"))])

SERVER: Mapping[str, Callable[[ServerStream], None]] = {
    "open": lambda half: half.receive(frames.encode(Open("a", SECRET)), now=0.0),
    "open of a reader": lambda half: half.receive(frames.encode(Open()), now=0.0),
    "broken frame": lambda half: half.receive(b"?", now=0.0),
    "command": _receive_command(0, SendPayload((Text("hi"),))),
    "one command too many": _receive_command(1, CancelPayload()),
    "message that is not command 0": _receive_command(1, SendPayload((Text("hi"),))),
    "ping": lambda half: half.receive(frames.encode(Ping()), now=0.0),
    "close": lambda half: half.receive(frames.encode(Close()), now=0.0),
    "admit": lambda half: half.admit(Session(), epoch_at=None, now=0.0),
    "admit to another's stream": lambda half: half.admit(_FOREIGN, epoch_at=None, now=0.0),
    "accepted": lambda half: half.acknowledge(0, now=0.0),
    "refused": lambda half: half.refuse(0, SeqnoGapError("no", expected=0), now=0.0),
    "time": _serves_time,
    "fail": lambda half: half.fail(DrainingError("bye"), now=0.0),
}


@cache
def client_edges() -> frozenset[HalfEdge]:
    """Return the edges of the client's half: of a stream with a message, of one that only cancels, and of a reader."""
    message, stop = ClientStream("a", SECRET, now=0.0), ClientStream("a", SECRET, now=0.0)
    message.submit(SendPayload((Text("hi"),)))
    stop.submit(CancelPayload())
    stop.finish()
    for half in (message, stop):
        _settle(half)
    of_reader = {name: inlet for name, inlet in CLIENT.items() if name != "cancel"}
    edges = frozenset(edge for half in (message, stop) for edge in _edges(half, CLIENT))
    return edges.union(_edges(ClientStream(now=0.0), of_reader))


@cache
def server_edges() -> frozenset[HalfEdge]:
    """Return the edges of the server's half, which permits one command in flight."""
    return frozenset(_edges(ServerStream(in_flight_max=1, now=0.0), SERVER))


def _edges(first: Half, inlets: Mapping[str, Callable[[Half], None]]) -> Iterator[HalfEdge]:
    seen = {_mark(first)}
    front = deque([first])
    while front:
        assert len(seen) < STATES_MAX, "a search that was cut off has not found every edge"
        half = front.popleft()
        for name, inlet in inlets.items():
            after = copied(half)
            inlet(after)
            _settle(after)
            yield HalfEdge(state_of(half), name, state_of(after))
            if (mark := _mark(after)) not in seen:
                seen.add(mark)
                front.append(after)


_UNTOLD = UNSEEN | {
    "number",  # Connections: their number is unbounded.
    "_unanswered",  # Heartbeats since the last ack: the input "three heartbeats" is tried in every state.
    "_held",
    "_trouble",
    "_error",
    "_failure",
    "_stall_at",
    "_is_stalled",
    "_is_reconnecting",
    "_waiting_on",
    "end",
    "trouble",
    "is_reconnecting",
    "_spoke_at",
}
"""Facts that a half reports without effect on its transitions."""


def _mark(half: ClientStream | ServerStream) -> Hashable:
    return distinguishing_parts(half, _UNTOLD)


def _settle(half: ClientStream | ServerStream) -> None:
    if isinstance(half, ClientStream):
        half.writes()
        half.events()
    else:
        half.requests()
    half.frames_to_send()


def state_of(half: ClientStream | ServerStream) -> str:
    """Return the name of the state of a half."""
    return str(half._link.state.value if isinstance(half, ClientStream) else half._state.value)


def diagram(edges: frozenset[HalfEdge], first: str) -> str:
    """Return a machine as a Mermaid diagram: the inputs that lead from state to state."""
    ways: dict[tuple[str, str], set[str]] = {}
    for edge in edges:
        if edge.before != edge.after:
            ways.setdefault((edge.before, edge.after), set()).add(edge.inlet)
    lines = [f"    {a} --> {b}: {', '.join(sorted(names))}" for (a, b), names in sorted(ways.items())]
    return f"```mermaid\nstateDiagram-v2\n    [*] --> {first}\n" + "\n".join(lines) + "\n```\n"


# --- errors ---------------------------------------------------------------------------------------------------------


def reaction_to(kind: type[MidstreamError]) -> str:
    """Return the reaction of a client to an error of this kind that ends its connection, or refuses its command."""
    stream = ClientStream("a", SECRET, now=0.0)
    stream.submit(CancelPayload(1))
    _waits(stream)
    stream.begin_connection(now=0.0)
    stream.writes()
    _receives(Welcome("a", "1-1", "1-1"))(stream)
    stream.frames_to_send()
    _receives(Error(kind.code, "no", kind.retry, 0, 0 if kind is SeqnoGapError else None))(stream)
    if stream.needs_secret:
        return "shows another secret that it finds; else ends, deletes the checkpoint"
    if not stream.is_ended:
        is_playback = kind is SeqnoGapError
        return (
            "plays back from `expected`; else ends, deletes the checkpoint" if is_playback else "reconnects"
        )
    return "ends, keeps the checkpoint" if stream.is_kept else "ends, deletes the checkpoint"


def kinds_on_the_wire() -> list[type[MidstreamError]]:
    """Return the kinds of errors that may be in an `error` frame, by their codes: all but those of models."""
    kinds = {
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, MidstreamError)
        and kind is not MidstreamError
        and not issubclass(kind, ModelError)
    }
    return sorted(kinds - _AT_HOME, key=lambda kind: kind.code)


_AT_HOME = {
    errors.ToolDefinitionError,
    errors.AgentNotFoundError,
    errors.InvalidHistoryError,
    errors.HistoryRefusedError,
    errors.UnreadableHistoryError,
    errors.PortTakenError,
    errors.ToolsUnavailableError,
    errors.EntryMovedError,
    errors.CallReusedError,
    errors.EventGoneError,
    errors.TransactionError,
}
"""Raised in the calling program, and never sent over a wire."""


def error_table() -> str:
    """Return the errors of the wire as a table: code, HTTP status, retry, and what the client does."""
    rows = "".join(
        f"| `{kind.code}` | {status_of(kind)} | {kind.retry} | {reaction_to(kind)} |\n"
        for kind in kinds_on_the_wire()
    )
    return f"| code | status | retry | the client |\n| --- | --- | --- | --- |\n{rows}"
