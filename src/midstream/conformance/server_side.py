"""Say a script to a server and look at what it answers.

Steps, each on the connection that `on` names ("a" where it does not):

- `connect`: make a connection and say nothing.
- `open`: make one and send an `open` with these fields; `stream` and `secret` are the script's own where they are not
  said, and left out where they are null.
- `send`: send a frame. `text`: send text that may be none.
- `expect`: the next frame that is neither `events` nor `heartbeat` fits this pattern.
- `events`: read events until one with a record of this type; `capture` gives a name to its id.
- `quiet`: a `ping` is answered by a heartbeat, and nothing but events comes before it.
- `closed`: the server ends the connection, and says nothing more before that but events.
- `drop`: cut the connection without a word.

On every connection it is checked besides: the first frame is `welcome` or `error`; events follow one another without
gap from where the welcome says. Names: `$session`, `$stream`, `$other` (another stream key), `$secret`, `$wrong`,
`$long` (text above every limit).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec
from msgspec import Struct

from midstream.conformance.matching import Names, difference, filled, is_event_id
from midstream.conformance.scripts import KEPT_ELSEWHERE, Json, Script
from midstream.core.frames import FRAME_BYTES_MAX, EventId
from midstream.errors import ConnectionLostError, MidstreamError
from midstream.world import World

WAIT_S = 30.0
"""Seconds a server has for each answer; an agent may think before its turn ends."""


class Wire(Protocol):
    """One connection to the server that is tried; the transports of `midstream.client` are such."""

    async def receive(self) -> bytes:
        """Return the next frame; `ConnectionLostError` where there will be none."""

    async def send(self, frames: Sequence[bytes]) -> None:
        """Send frames in order."""

    async def close(self) -> None:
        """End the connection."""


Connect = Callable[[str], Awaitable[Wire]]
"""Makes a connection to a session."""


class Outcome(Struct, frozen=True):
    """How a script went. `problem` is the first difference, "" where there was none; `step` counts from 1."""

    script: str
    clauses: tuple[str, ...]
    problem: str = ""
    step: int = 0
    heard: tuple[str, ...] = ()
    """The last frames that came before the difference."""

    @property
    def is_kept(self) -> bool:
        """Whether everything came as it should."""
        return not self.problem


class _DifferenceError(Exception):
    """The server said something else than the script."""


class _Heard:
    """One connection and what came through it."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.frames: list[Json] = []
        self.events: list[Json] = []
        self.position: EventId | None = None

    async def next(self, wait_s: float) -> Json:
        """Return the next frame, its events checked and kept."""
        try:
            async with asyncio.timeout(wait_s):
                body = await self.wire.receive()
        except TimeoutError:
            raise _DifferenceError(f"nothing came within {wait_s:g} s") from None
        frame = _read(body)
        if not self.frames and frame["type"] not in {"welcome", "error"}:
            raise _DifferenceError(f"the first frame is {frame['type']!r}")
        self.frames.append(frame)
        if frame["type"] in {"welcome", "gone"}:
            if not is_event_id(frame.get("resume_from")):
                raise _DifferenceError(f"resume_from is {frame.get('resume_from')!r} and no event id")
            self.position = EventId.parse(frame["resume_from"])
        for event in frame.get("events", ()) if frame["type"] == "events" else ():
            self._take(event)
        return frame

    def _take(self, event: Json) -> None:
        if not is_event_id(event.get("id")) or "type" not in event.get("record", {}):
            raise _DifferenceError(f"an event has the id {event.get('id')!r} and no record with a type")
        event_id, before = EventId.parse(event["id"]), self.position
        assert before is not None
        if event_id.position != before.position + 1 or event_id.epoch < before.epoch:
            raise _DifferenceError(f"event {event_id} does not follow {before}")
        self.position = event_id
        self.events.append(event)


def _read(body: bytes) -> Json:
    try:
        frame = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _DifferenceError(f"a frame is no JSON: {error}") from error
    if not isinstance(frame, dict) or not isinstance(frame.get("type"), str):
        raise _DifferenceError("a frame is no object with a type")
    return frame


class ServerTrial:
    """Runs scripts against one server.

    Args:
        connect: Makes connections.
        world: Gives the scripts their names.
        wait_s: Seconds for each answer.
    """

    def __init__(self, connect: Connect, *, world: World, wait_s: float = WAIT_S) -> None:
        self._connect = connect
        self._world = world
        self._wait_s = wait_s
        self.sessions: list[str] = []
        """Those that scripts were run on."""

    async def run(self, script: Script) -> Outcome:
        """Run one script on a session of its own, and say how it went."""
        names: Names = {
            "session": self._world.new_id(KEPT_ELSEWHERE),
            "stream": self._world.new_id("stream"),
            "other": self._world.new_id("stream"),
            "secret": self._world.new_secret(),
            "wrong": self._world.new_secret(),
            "long": "x" * (FRAME_BYTES_MAX + 1),
        }
        self.sessions.append(names["session"])
        connections: dict[str, _Heard] = {}
        try:
            for number, step in enumerate(script.steps, start=1):
                problem = await self._problem(step, connections, names)
                if problem is not None:
                    last = connections.get(step.get("on", "a"))
                    heard = tuple(_shown(frame) for frame in (last.frames[-3:] if last else ()))
                    return Outcome(script.name, script.clauses, problem, number, heard)
        finally:
            for each in connections.values():
                await each.wire.close()
        return Outcome(script.name, script.clauses)

    async def _problem(self, step: Json, connections: dict[str, _Heard], names: Names) -> str | None:
        try:
            await self._do(step, connections, names)
        except _DifferenceError as found:
            return str(found)
        except MidstreamError as error:
            return f"{error.code}: {error.message}"
        return None

    async def _do(self, step: Json, connections: dict[str, _Heard], names: Names) -> None:
        on = step.get("on", "a")
        if "connect" in step or "open" in step:
            connections[on] = _Heard(await self._connect(names["session"]))
        heard = connections[on]
        match step:
            case {"connect": _}:
                pass
            case {"open": dict(fields)}:
                said = {"stream": "$stream", "secret": "$secret", **fields}
                known = {key: value for key, value in filled(said, names).items() if value is not None}
                await heard.wire.send([msgspec.json.encode({"type": "open", **known})])
            case {"send": dict(frame)}:
                await heard.wire.send([msgspec.json.encode(filled(frame, names))])
            case {"text": str(text)}:
                await heard.wire.send([str(filled(text, names)).encode()])
            case {"expect": dict(pattern)}:
                await self._expect(heard, pattern, names)
            case {"events": str(kind)}:
                names[step.get("capture", "event")] = await self._events(heard, kind)
            case {"quiet": _}:
                await self._quiet(heard)
            case {"closed": _}:
                await self._closed(heard)
            case {"drop": _}:
                await heard.wire.close()
            case _:
                raise _DifferenceError(f"the script has a step that nobody knows: {sorted(step)}")

    async def _expect(self, heard: _Heard, pattern: Json, names: Names) -> None:
        while (frame := await self._next(heard))["type"] in {"events", "heartbeat"}:
            pass
        if (what := difference(pattern, frame, names)) is not None:
            raise _DifferenceError(f"{frame['type']}: {what}")

    async def _events(self, heard: _Heard, kind: str) -> str:
        seen = 0
        while True:
            for event in heard.events[seen:]:
                seen += 1
                if event["record"]["type"] == kind:
                    return str(event["id"])
            frame = await self._next(heard)
            if frame["type"] not in {"events", "heartbeat"}:
                raise _DifferenceError(f"{_shown(frame)} came in the place of an event {kind!r}")

    async def _quiet(self, heard: _Heard) -> None:
        await heard.wire.send([b'{"type":"ping"}'])
        while (frame := await self._next(heard))["type"] != "heartbeat":
            if frame["type"] != "events":
                raise _DifferenceError(f"{_shown(frame)} came where nothing was to come")

    async def _closed(self, heard: _Heard) -> None:
        while True:
            try:
                frame = await heard.next(self._wait_s)
            except ConnectionLostError:
                return
            if frame["type"] not in {"events", "heartbeat"}:
                raise _DifferenceError(f"{_shown(frame)} came where the connection was to end")

    async def _next(self, heard: _Heard) -> Json:
        try:
            return await heard.next(self._wait_s)
        except ConnectionLostError as error:
            raise _DifferenceError("the server ended the connection") from error


def _shown(frame: Json) -> str:
    """Return a frame as a person reads it: what long texts it carries is not said."""
    return msgspec.json.encode({key: value for key, value in frame.items() if key != "events"}).decode()[:300]
