"""A client that may kill itself at a fault point: `python -m tests.fault.fault_client_process FOLDER PORT`.

It stores each event before it requests the next one, and omits events that an earlier life stored: the
documented way for an application to store events.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
from msgspec import Struct

from midstream.client import Client, Event, PlaybackLost, connect
from midstream.environment import World
from midstream.protocol.frames import Gone, SnapshotFrame
from midstream.session.records import CallStarted, TurnEnded, decode, encode
from midstream.testing.fake_worlds import KillingWorld
from tests.fault.options import Options
from tests.fault.turn import QUESTION, SESSION, EffectLedger, client_tools

SLOW_RESPONSE = 3
HAND_S = 0.002
"""Seconds that an event is in the application before it is stored: a death in between must deliver it again."""


class HastyWorld(KillingWorld):
    """Reconnects soon: the random wait is always the shortest."""

    def chance(self) -> float:
        return 0.97


class ReceivedEvent(Struct, frozen=True):
    """One line of the log."""

    id: str
    record: msgspec.Raw


class ReceivedEvents:
    """The events that a client received, in a file, each once."""

    def __init__(self, path: Path) -> None:
        self.lines = read_notes(path)
        self._ids = {line.id for line in self.lines}
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def add(self, event: Event) -> None:
        assert not isinstance(event.record, Gone | SnapshotFrame | PlaybackLost), (
            "nothing was lost, nothing is old"
        )
        if event.id not in self._ids:
            line = ReceivedEvent(event.id, msgspec.Raw(encode(event.record)))
            os.write(self._file, msgspec.json.encode(line) + b"\n")
            self.lines.append(line)
            self._ids.add(event.id)

    @property
    def has_end(self) -> bool:
        return bool(self.lines) and isinstance(decode(bytes(self.lines[-1].record)), TurnEnded)


def read_notes(path: Path) -> list[ReceivedEvent]:
    if not path.exists():
        return []
    return [msgspec.json.decode(line, type=ReceivedEvent) for line in path.read_bytes().splitlines()]


async def main() -> None:
    options = Options("client")
    world = HastyWorld(*options.death, report_to=options.notes)
    ledger = EffectLedger(options.folder / "ledger")
    seen = ReceivedEvents(options.folder / "client.seen")
    url = f"http://127.0.0.1:{options.port}"
    state, secrets = options.folder / "client.db", options.folder / "secrets.db"
    tools = client_tools(ledger)
    async with connect(url, state=state, secrets=secrets, tools=tools, world=world) as client:
        interrupted = await client.resume_interrupted()
        for turn in interrupted:
            await _follow(client, turn.__aiter__(), seen, options)
        if not seen.has_end:
            await _follow(client, client.send(SESSION, QUESTION), seen, options)

        reader = ReceivedEvents(options.folder / "reader.seen")
        async with contextlib.aclosing(client.follow(SESSION, after="0-0")) as events:
            async for event in events:
                reader.add(event)
                if event.is_end:
                    break


async def _follow(
    client: Client, events: AsyncIterator[Event], seen: ReceivedEvents, options: Options
) -> None:
    async with asyncio.TaskGroup() as group:
        if options.is_cancelling and any(_is_slow(decode(bytes(line.record))) for line in seen.lines):
            group.create_task(client.cancel(SESSION))  # this client was killed before it received it
        async for event in events:
            await World().sleep(HAND_S)
            seen.add(event)
            if options.is_cancelling and _is_slow(event.record):
                group.create_task(client.cancel(SESSION))


def _is_slow(record: object) -> bool:
    return isinstance(record, CallStarted) and record.response == SLOW_RESPONSE


if __name__ == "__main__":
    asyncio.run(main())
