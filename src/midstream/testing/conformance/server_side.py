"""Send a script to a server and check its answers.

Steps, each on the connection in `on` ("a" by default):

- `connect`: open a connection and send nothing.
- `open`: open a connection and send an `open` with these fields; `stream` and `secret` are the script's own if they are
  missing, and omitted if they are null.
- `send`: send a frame. `send_text`: send text that may be no frame.
- `expect`: the next frame that is neither `events` nor `heartbeat` matches this pattern. An ack of a later command
  matches, too, and a repeated ack may come anywhere (STREAM-13).
- `read_until`: read events until one with a record of this type; `capture` names its id.
- `quiet`: a heartbeat answers a `ping`, and only events come before it.
- `closed`: the server ends the connection, and sends only events before that.
- `refused`: an `error` of this code ends the connection, at once or after its welcome.
- `heartbeat`: without any request, only a heartbeat comes, within three times the silence in the welcome (or the time
  for any answer, if that is longer).
- `drop`: cut the connection without a frame.

On every connection, these are also checked: the first frame is `welcome` or `error`; a welcome that is degraded has a
reason; events follow one another without gap from the welcome's position; and after the last step it is `quiet`, if it
is still open, so that no unexpected frame comes. A reader sends the script's secret if the session is encrypted, by the
welcome (STREAM-84). After a refusal because of a limit (STREAM-74), a script waits and begins again. Names: `$session`,
`$stream`, `$other` (another stream key), `$secret`, `$wrong`, `$long` (text above every limit).

A transport consists of one connection or of requests. With requests, a refusal counts as its `error` (STREAM-37), and
the end of the stream's turn also ends the connection (STREAM-27).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

import msgspec
from msgspec import Struct

from midstream.client.transport_selection import TransportKind
from midstream.environment import World
from midstream.errors import ConnectionLostError, LimitReachedError, MidstreamError
from midstream.protocol.frames import FRAME_BYTES_MAX, HEARTBEAT_S, Error, EventId, encode
from midstream.retries import HEARTBEATS_MISSED_MAX, pause_s
from midstream.testing.conformance.matching import Names, difference, fill, is_event_id
from midstream.testing.conformance.scripts import SESSION_PREFIX, Json, Script

WAIT_S = 30.0
"""Seconds for each answer of a server; an agent may take time for its turn."""
BUSY_S = 120.0
"""Total seconds that a script waits after refusals because of a limit: two minutes, the usual window."""
BUSY_S_MIN = 1.0
"""Seconds to wait if the server sends none."""
_PING = b'{"type":"ping"}'
_HEARTBEAT: Json = {
    "event_id": {"$event_id": True},
    "waiting_on": {"$one_of": ["model", "tool", "client", "person", "nothing"]},
}
_ENDED = frozenset(("completed", "cancelled", "failed", "interrupted", "ended"))
"""Part of a welcome for a turn that has ended."""


class ProbedConnection(Protocol):
    """One connection to the tested server, such as a transport of `midstream.client`."""

    async def receive(self) -> bytes:
        """Return the next frame; raise `ConnectionLostError` after the last one."""

    async def send(self, frames: Sequence[bytes]) -> None:
        """Send frames in order."""

    async def close(self) -> None:
        """End the connection."""


T = TypeVar("T")
Connect = Callable[[str], Awaitable[ProbedConnection]]
"""Opens a connection to a session."""


class ScriptOutcome(Struct, frozen=True):
    """Result of a script. `problem` is the first difference, or ""; `step` counts from 1.

    A step after the last one is the final check for unexpected frames.
    """

    script: str
    clauses: tuple[str, ...]
    problem: str = ""
    step: int = 0
    last_frames: tuple[str, ...] = ()
    """The last frames before the difference."""
    transport: str = ""

    @property
    def has_passed(self) -> bool:
        """Whether no difference was found."""
        return not self.problem


_PLACED = {"welcome": "resume_from", "gone": "resume_from", "snapshot": "event_id"}
"""Frames with an event id, and the member that has it."""


class _DifferenceError(Exception):
    """The server's frames differ from the script."""


class _CheckedConnection:
    """One connection and its received frames.

    Args:
        stream: Its stream key; "" for a reader.
    """

    def __init__(self, wire: ProbedConnection, stream: str) -> None:
        self.wire = wire
        self.frames: list[Json] = []
        self.events: list[Json] = []
        self.position: EventId | None = None
        self.is_over = False
        """Whether the server or the script has ended it."""
        self.is_turn_over = False
        """Whether the turn of its stream has ended."""
        self.is_encrypted = False
        """Whether the session is encrypted, as the server reported."""
        self.heartbeat_s = HEARTBEAT_S
        self.newest_seqno = -1
        """The highest number of a command that the server has, or that was sent here."""
        self._newest_acked = -1
        self._acked_ahead = -1
        """Number in an ack that was higher than expected: it also answers the next expected acks."""
        self._stream = stream
        self._turn = 0

    async def next(self, wait_s: float) -> Json:
        """Return the next frame, after checking and storing its events.

        Raises:
            ConnectionLostError: The connection has ended.
            LimitReachedError: The server refused because of a limit.
        """
        frame = _read(await self._body(wait_s))
        _require_patience(frame)
        if not self.frames and frame["type"] not in {"welcome", "error"}:
            raise _DifferenceError(f"the first frame is {frame['type']!r}")
        self.frames.append(frame)
        if frame["type"] == "welcome":
            if frame.get("is_degraded") and not frame.get("reason"):
                raise _DifferenceError("the welcome is degraded without a reason")
            self.is_encrypted = frame.get("is_encrypted") is True
            self.heartbeat_s = _seconds(frame.get("heartbeat_s"))
            if isinstance(acked := frame.get("acked"), int):
                self._newest_acked = acked - 1
                self.newest_seqno = max(self.newest_seqno, acked - 1)
            self._turn = frame.get("turn", 0)
            self.is_turn_over = bool(self._stream) and frame.get("turn_status") in _ENDED
        if frame["type"] in _PLACED:
            place = frame.get(_PLACED[frame["type"]])
            if not isinstance(place, str) or not is_event_id(place):
                raise _DifferenceError(f"{_PLACED[frame['type']]} is {place!r} and no event id")
            self.position = EventId.parse(place)
        for event in frame.get("events", ()) if frame["type"] == "events" else ():
            self._take(event)
        return frame

    async def _body(self, wait_s: float) -> bytes:
        if self.is_over:
            raise ConnectionLostError("the connection has ended")
        try:
            async with asyncio.timeout(wait_s):
                return await self.wire.receive()
        except TimeoutError:
            raise _DifferenceError(f"nothing came within {wait_s:g} s") from None
        except ConnectionLostError:
            self.is_over = True
            raise
        except MidstreamError as refusal:  # as an HTTP refusal
            self.is_over = True
            if self.frames and self.frames[-1]["type"] == "error":  # the close code repeats it
                raise ConnectionLostError("the connection has ended") from refusal
            retry_after_s = refusal.retry_after_s
            return encode(Error(refusal.code, refusal.message, refusal.retry, retry_after_s=retry_after_s))

    async def next_new_frame(self, wait_s: float) -> Json:
        """Return the next frame with new information: an ack may be repeated at any time (STREAM-13).

        Raises:
            ConnectionLostError, LimitReachedError: As `next` does.
        """
        while (frame := await self.next(wait_s))["type"] == "ack" and self._is_known(frame):
            pass
        return frame

    async def wait_for_ack(self, seqno: int, wait_s: float) -> Json | None:
        """Wait for an ack of this command; return another frame that came instead, or None.

        An ack of a later command includes this command.

        Raises:
            ConnectionLostError, LimitReachedError: As `next` does.
        """
        if seqno <= self._acked_ahead:
            if seqno == self._acked_ahead:
                self._acked_ahead = -1
            return None
        while (frame := await self.next(wait_s))["type"] in {"events", "heartbeat"} or (
            frame["type"] == "ack" and frame.get("seqno") != seqno and self._is_known(frame)
        ):
            pass
        found = frame.get("seqno")
        if (
            frame["type"] != "ack"
            or not isinstance(found, int)
            or not seqno <= found <= max(seqno, self.newest_seqno)
        ):
            return frame
        if found > seqno and frame.get("is_single"):
            return frame
        self._newest_acked = max(self._newest_acked, found)
        self._acked_ahead = found if found > seqno else -1
        return None

    def _is_known(self, ack: Json) -> bool:
        found = ack.get("seqno")
        return isinstance(found, int) and 0 <= found <= self._newest_acked

    def has_accepted(self, pattern: Json) -> bool:
        """Whether an event has the information of an ack (STREAM-13)."""
        accepted = {"type": "command_accepted", "stream": self._stream, "seqno": pattern.get("seqno")}
        return any(accepted.items() <= event["record"].items() for event in self.events)

    def _take(self, event: Json) -> None:
        if not is_event_id(event.get("id")) or "type" not in event.get("record", {}):
            raise _DifferenceError(f"an event has the id {event.get('id')!r} and no record with a type")
        event_id, before = EventId.parse(event["id"]), self.position
        assert before is not None
        if event_id.position != before.position + 1 or event_id.epoch < before.epoch:
            raise _DifferenceError(f"event {event_id} does not follow {before}")
        self.position = event_id
        self.events.append(event)
        match event["record"]:
            case {"type": "message_accepted" | "turn_resumed", "stream": stream, "turn": int(turn)}:
                self._turn = turn if stream == self._stream else self._turn
            case {"type": "turn_ended", "turn": turn} if turn == self._turn:
                self.is_turn_over = bool(self._stream)


def _read(body: bytes) -> Json:
    try:
        frame = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _DifferenceError(f"a frame is not JSON: {error}") from error
    if not isinstance(frame, dict) or not isinstance(frame.get("type"), str):
        raise _DifferenceError("a frame is not an object with a type")
    return frame


class ServerTrial:
    """Runs scripts against one server.

    Args:
        transport: The transport of these connections.
        world: Source of the scripts' names.
        wait_s: Seconds for each answer.
    """

    def __init__(
        self,
        connect: Connect,
        *,
        transport: TransportKind = TransportKind.WEBSOCKET,
        world: World,
        wait_s: float = WAIT_S,
    ) -> None:
        self._connect = connect
        self._transport = transport
        self._world = world
        self._wait_s = wait_s
        self.sessions: dict[str, str] = {}
        """The sessions of the scripts, with their secrets."""

    async def run(self, script: Script) -> ScriptOutcome:
        """Run one script on its own session, and return the result."""
        left_s = BUSY_S
        while True:
            try:
                return await self._run(script)
            except LimitReachedError as error:
                wait_s = max(pause_s(error.retry_after_s), BUSY_S_MIN)
                left_s -= wait_s
                if left_s < 0:
                    problem = f"{error.code}: {error.message}, for {BUSY_S:g} s"
                    return ScriptOutcome(script.name, script.clauses, problem, transport=self._transport)
            await self._world.sleep(wait_s)

    async def _run(self, script: Script) -> ScriptOutcome:
        names: Names = {
            "session": self._world.new_id(SESSION_PREFIX),
            "stream": self._world.new_id("stream"),
            "other": self._world.new_id("stream"),
            "secret": self._world.new_secret(),
            "wrong": self._world.new_secret(),
            "long": "x" * (FRAME_BYTES_MAX + 1),
        }
        self.sessions[names["session"]] = names["secret"]
        connections: dict[str, _CheckedConnection] = {}
        steps = [*script.steps, {"over": True}]
        try:
            for number, step in enumerate(steps, start=1):
                problem = await self._problem(step, connections, names)
                if problem is not None:
                    last = connections.get(step.get("on", "a"))
                    last_frames = tuple(_shorten(frame) for frame in (last.frames[-3:] if last else ()))
                    return ScriptOutcome(
                        script.name, script.clauses, problem, number, last_frames, self._transport
                    )
        finally:
            for each in connections.values():
                await each.wire.close()
        return ScriptOutcome(script.name, script.clauses, transport=self._transport)

    async def _problem(
        self, step: Json, connections: dict[str, _CheckedConnection], names: Names
    ) -> str | None:
        try:
            await self._do(step, connections, names)
        except _DifferenceError as found:
            return str(found)
        except LimitReachedError:
            raise
        except MidstreamError as error:
            return f"{error.code}: {error.message}"
        return None

    async def _do(self, step: Json, connections: dict[str, _CheckedConnection], names: Names) -> None:
        if "over" in step:
            for name, each in connections.items():
                await self._over(each, name)
            return
        on = step.get("on", "a")
        opening = _opening(step, names)
        if opening is not None:
            if any(each.is_encrypted for each in connections.values()):
                opening.setdefault("secret", names["secret"])
            if on in connections:
                await connections[on].wire.close()
            wire = await self._connect(names["session"])
            connections[on] = _CheckedConnection(wire, opening.get("stream", ""))
        connection = connections[on]
        match step:
            case {"connect": _}:
                pass
            case {"open": _}:
                await connection.wire.send([msgspec.json.encode(opening)])
            case {"send": dict(frame)}:
                if isinstance(seqno := frame.get("seqno"), int):
                    connection.newest_seqno = max(connection.newest_seqno, seqno)
                await connection.wire.send([msgspec.json.encode(fill(frame, names))])
            case {"send_text": str(text)}:
                await connection.wire.send([str(fill(text, names)).encode()])
            case {"expect": dict(pattern)}:
                await self._expect(connection, pattern, names)
            case {"read_until": str(kind)}:
                names[step.get("capture", "event")] = await self._events(connection, kind)
            case {"quiet": _}:
                await _within(self._wait_s, self._quiet(connection))
            case {"closed": _}:
                await _within(self._wait_s, self._expect_close(connection))
            case {"refused": str(code)}:
                await _within(self._wait_s, self._expect_refusal(connection, code, names))
            case {"heartbeat": _}:
                await self._heartbeat(connection)
            case {"drop": _}:
                connection.is_over = True
                await connection.wire.close()
            case _:
                raise _DifferenceError(f"the script has an unknown step: {sorted(step)}")

    async def _over(self, connection: _CheckedConnection, name: str) -> None:
        """Check that no unexpected frame came."""
        if connection.is_over:
            return
        try:
            await _within(self._wait_s, self._quiet(connection))
        except _DifferenceError as found:
            raise _DifferenceError(f"after the last step, on {name!r}: {found}") from None

    async def _expect(self, connection: _CheckedConnection, pattern: Json, names: Names) -> None:
        try:
            frame = await _within(self._wait_s, self._answer(connection, pattern))
        except ConnectionLostError as error:
            # The end of the turn may come before the answer to a command in it.
            is_accepted = pattern.get("type") == "ack" and connection.has_accepted(fill(pattern, names))
            if not (is_accepted and self._ends_with_turn(connection)):
                raise _DifferenceError("the server ended the connection") from error
            return
        if frame is not None and (what := difference(pattern, frame, names)) is not None:
            raise _DifferenceError(f"{frame['type']}: {what}")

    async def _answer(self, connection: _CheckedConnection, pattern: Json) -> Json | None:
        if pattern.get("type") == "ack":
            return await connection.wait_for_ack(pattern["seqno"], self._wait_s)
        while (frame := await connection.next_new_frame(self._wait_s))["type"] in {"events", "heartbeat"}:
            pass
        return frame

    async def _events(self, connection: _CheckedConnection, kind: str) -> str:
        seen = 0
        while True:
            for event in connection.events[seen:]:
                seen += 1
                if event["record"]["type"] == kind:
                    return str(event["id"])
            frame = await _within(self._wait_s, self._next_but_heartbeats(connection))
            if frame["type"] != "events":
                raise _DifferenceError(f"{_shorten(frame)} came instead of an event {kind!r}")

    async def _quiet(self, connection: _CheckedConnection) -> None:
        if self._ends_with_turn(connection):
            await self._expect_close(connection)
            return
        await connection.wire.send([_PING])
        while (frame := await self._next(connection))["type"] != "heartbeat":
            if frame["type"] != "events":
                raise _DifferenceError(f"{_shorten(frame)} was not expected")
            if self._ends_with_turn(connection):
                await self._expect_close(connection)
                return
        _require_heartbeat(frame)

    async def _heartbeat(self, connection: _CheckedConnection) -> None:
        frame = await self._next(
            connection, max(HEARTBEATS_MISSED_MAX * connection.heartbeat_s, self._wait_s)
        )
        if frame["type"] != "heartbeat":
            raise _DifferenceError(f"{_shorten(frame)} came instead of a heartbeat")
        _require_heartbeat(frame)

    def _ends_with_turn(self, connection: _CheckedConnection) -> bool:
        return self._transport is not TransportKind.WEBSOCKET and connection.is_turn_over

    async def _expect_close(self, connection: _CheckedConnection) -> None:
        while True:
            try:
                frame = await connection.next_new_frame(self._wait_s)
            except ConnectionLostError:
                return
            if frame["type"] not in {"events", "heartbeat"}:
                raise _DifferenceError(f"{_shorten(frame)} came instead of the end of the connection")

    async def _expect_refusal(self, connection: _CheckedConnection, code: str, names: Names) -> None:
        while (frame := await self._next(connection))["type"] in {"welcome", "events", "heartbeat"}:
            pass
        error = {"type": "error", "code": code, "seqno": {"$none": True}}
        if (what := difference(error, frame, names)) is not None:
            raise _DifferenceError(f"{frame['type']}: {what}")
        await self._expect_close(connection)

    async def _next_but_heartbeats(self, connection: _CheckedConnection) -> Json:
        while (frame := await self._next(connection))["type"] == "heartbeat":
            pass
        return frame

    async def _next(self, connection: _CheckedConnection, wait_s: float | None = None) -> Json:
        try:
            return await connection.next_new_frame(self._wait_s if wait_s is None else wait_s)
        except ConnectionLostError as error:
            raise _DifferenceError("the server ended the connection") from error


async def _within(wait_s: float, answer: Awaitable[T]) -> T:
    """Wait for an answer within a total time, however many other frames come meanwhile."""
    try:
        async with asyncio.timeout(wait_s):
            return await answer
    except TimeoutError:
        raise _DifferenceError(f"nothing came within {wait_s:g} s") from None


def _require_patience(frame: Json) -> None:
    """Raise if a server refused because of a limit."""
    if frame["type"] == "error" and frame.get("code") == LimitReachedError.code:
        retry_after_s = frame.get("retry_after_s")
        wait_s = None if retry_after_s is None else _seconds(retry_after_s)
        raise LimitReachedError(str(frame.get("message", "")), retry_after_s=wait_s)


def _require_heartbeat(frame: Json) -> None:
    if (what := difference(_HEARTBEAT, frame, {})) is not None:
        raise _DifferenceError(f"heartbeat: {what}")


def _seconds(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise _DifferenceError(f"{value!r} is not a number of seconds")
    return float(value)


def _opening(step: Json, names: Names) -> Json | None:
    """Return the `open` with which a step opens a connection, or None."""
    match step:
        case {"connect": _}:
            return {}
        case {"open": dict(fields)}:
            frame = {"type": "open", "stream": "$stream", "secret": "$secret", **fields}
            return {key: value for key, value in fill(frame, names).items() if value is not None}
        case _:
            return None


def _shorten(frame: Json) -> str:
    """Return a frame for messages, without long texts."""
    return msgspec.json.encode({key: value for key, value in frame.items() if key != "events"}).decode()[:300]
