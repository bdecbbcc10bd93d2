"""A client of a chaos run: `python -m tests.chaos.chaos_client_process FOLDER PORT --way TRANSPORT`.

It sends in several sessions at once, runs a tool, follows each session from its start beside its own turns, and
stores each event before it requests the next one. Within one life a missing or repeated event ends it at once.
The last events of an earlier life may be repeated, since it died before it could acknowledge them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import msgspec

from midstream.client import Client, Event, PlaybackLost, connect
from midstream.client.client import InterruptedTurn
from midstream.client.transport_selection import TransportName
from midstream.protocol.frames import EventId, Gone, SnapshotFrame
from midstream.session.records import CallStarted, TurnEnded, decode, encode
from tests.chaos.turns import (
    ENOUGH,
    SESSIONS_AT_ONCE,
    TURNS,
    ProcessArguments,
    client_tools,
    is_stopped,
    message_of,
)
from tests.fault.fault_client_process import HastyWorld, ReceivedEvent, read_notes
from tests.fault.turn import EffectLedger


class Log:
    """The events that one reader of a session received, in a file, each event once."""

    def __init__(self, path: Path) -> None:
        self.ends = 0
        self.last_id = "0-0"
        self.has_call = False
        """Whether a call of the current turn was received."""
        self._last = self._in_life = 0
        for line in read_notes(path):
            self._count(line.id, decode(bytes(line.record)))
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def begin(self) -> None:
        """Start another iterator."""
        self._in_life = 0

    def add(self, event: Event) -> bool:
        """Store an event; return False for an event that an earlier life had."""
        assert not isinstance(event.record, Gone | SnapshotFrame | PlaybackLost), "nothing was lost"
        position = EventId.parse(event.id).position
        assert self._in_life in (0, position - 1), f"{event.id} came after position {self._in_life}"
        self._in_life = position
        if position <= self._last:
            return False
        line = ReceivedEvent(event.id, msgspec.Raw(encode(event.record)))
        os.write(self._file, msgspec.json.encode(line) + b"\n")
        self._count(event.id, event.record)
        return True

    def close(self) -> None:
        os.close(self._file)

    def _count(self, event_id: str, record: object) -> None:
        self.last_id, self._last = event_id, EventId.parse(event_id).position
        self.ends += isinstance(record, TurnEnded)
        self.has_call = not isinstance(record, TurnEnded) and (
            self.has_call or isinstance(record, CallStarted)
        )


class SessionSender:
    """Runs one session after the other.


    Args:
        name: The prefix of its sessions.     folder: Where its logs are.     interrupted: The unfinished
            turns of an earlier life, by session.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        client: Client,
        interrupted: dict[str, list[InterruptedTurn]],
        enough: Path,
    ) -> None:
        self._name = name
        self._folder = folder
        self._client = client
        self._interrupted = interrupted
        self._enough = enough

    async def run(self) -> None:
        for number in itertools.count():
            session = f"{self._name}-{number}"
            done = self._folder / f"{session}.done"
            if done.exists():
                continue
            if self._enough.exists() and not (self._folder / f"{session}.begun").exists():
                return
            (self._folder / f"{session}.begun").touch()
            await self._run_session(session)
            done.touch()

    async def _run_session(self, session: str) -> None:
        seen = Log(self._folder / f"{session}.seen")
        async with asyncio.TaskGroup() as group:
            is_known = asyncio.Event()
            if seen.last_id != "0-0":
                is_known.set()
            group.create_task(self._read(session, is_known))
            left = self._interrupted.pop(session, [])
            while left or seen.ends < TURNS:
                turns = left.pop(0) if left else self._client.send(session, message_of(seen.ends))
                await self._follow(session, aiter(turns), seen, is_known)
        seen.close()

    async def _follow(
        self, session: str, events: AsyncIterator[Event], seen: Log, is_known: asyncio.Event
    ) -> None:
        seen.begin()
        has_stopped = False
        async with asyncio.TaskGroup() as group:
            async for event in events:
                seen.add(event)
                is_known.set()
                if seen.has_call and not has_stopped and is_stopped(session, seen.ends):
                    has_stopped = True
                    group.create_task(self._client.cancel(session))

    async def _read(self, session: str, is_known: asyncio.Event) -> None:
        """Follow the session as a reader that sends nothing, from its first event to the end of its last turn."""
        await is_known.wait()
        read = Log(self._folder / f"{session}.read")
        if read.ends < TURNS:
            async with contextlib.aclosing(self._client.follow(session, after=read.last_id)) as events:
                async for event in events:
                    read.add(event)
                    if read.ends == TURNS:
                        break
        read.close()


async def main() -> None:
    arguments = ProcessArguments()
    folder = arguments.folder / arguments.way
    folder.mkdir(exist_ok=True)
    reconnects = os.open(folder / "reconnects", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(session: str, is_reconnecting: bool) -> None:  # noqa: FBT001 - the client's interface
        if not is_reconnecting:
            os.write(reconnects, b".")

    async with connect(
        f"http://127.0.0.1:{arguments.port}",
        state=folder / "client.db",
        secrets=folder / "secrets.db",
        tools=client_tools(EffectLedger(arguments.folder / "ledger")),
        world=HastyWorld(*arguments.death),
        transport=cast("TransportName", arguments.way),
        on_reconnecting=note,
    ) as client:
        interrupted: dict[str, list[InterruptedTurn]] = {}
        for turn in await client.resume_interrupted():
            interrupted.setdefault(turn.session, []).append(turn)
        async with asyncio.TaskGroup() as group:
            for number in range(SESSIONS_AT_ONCE):
                name = f"{arguments.way}-{number}"
                speaker = SessionSender(name, folder, client, interrupted, arguments.folder / ENOUGH)
                group.create_task(speaker.run())


if __name__ == "__main__":
    asyncio.run(main())
