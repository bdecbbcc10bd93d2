"""The clients of a scale run: `python -m tests.scale.clients_process FOLDER URL --clients N`.

Each client sends in one session after the other, over WebSocket or server-sent events, and runs its own tool.
The next client follows that session from its first event, on its own connection, so mostly at another server;
it answers the approvals and stops the turns that are to be stopped. All events of both are written to files.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import msgspec

from midstream.client import Client, Event, connect
from midstream.client.transport_selection import TransportName
from midstream.errors import QuestionClosedError
from midstream.session.calls import Choice
from midstream.session.records import CallStarted, QuestionAsked, TurnEnded
from tests.chaos.turns import TURNS, client_tools, is_stopped, message_of
from tests.fault.fault_client_process import HastyWorld, ReceivedEvent
from tests.fault.turn import EffectLedger
from tests.scale.served import is_denied

ENOUGH = "enough"
"""A file that instructs clients to begin no further session."""
WAYS: tuple[TransportName, ...] = ("websocket", "sse")


class ReaderNotes:
    """The events of one reader of a session, in a file, in their order."""

    def __init__(self, path: Path) -> None:
        self.ends = 0
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def add(self, event: Event) -> None:
        line = ReceivedEvent(event.id, msgspec.Raw(msgspec.json.encode(event.record)))
        os.write(self._file, msgspec.json.encode(line) + b"\n")
        if isinstance(event.record, TurnEnded):
            self.ends = event.record.turn  # No count: after a `gone`, earlier ends come again.

    def close(self) -> None:
        os.close(self._file)


class ScaleClient:
    """One client, and its current session.

    Args:
        reader: The client that follows its sessions.
    """

    def __init__(self, number: int, folder: Path, client: Client, reader: Client) -> None:
        self._number = number
        self._folder = folder
        self._client = client
        self._reader = reader
        self._turn_s = os.open(folder / "turns", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    async def live(self) -> None:
        for number in itertools.count():
            if (self._folder / ENOUGH).exists():
                return
            await self._live_through(f"s-{self._number}-{number}")

    async def _live_through(self, session: str) -> None:
        seen = ReaderNotes(self._folder / f"{session}.seen")
        async with asyncio.TaskGroup() as group:
            is_known = asyncio.Event()
            reading = group.create_task(self._read(session, is_known))
            for turn in range(TURNS):
                began_at = time.monotonic()
                events = cast("AsyncIterator[Event]", self._client.send(session, message_of(turn)))
                async for event in events:
                    seen.add(event)
                    is_known.set()
                os.write(self._turn_s, f"{time.monotonic() - began_at:.4f}\n".encode())
            await reading
        seen.close()

    async def _read(self, session: str, is_known: asyncio.Event) -> None:
        """Follow the session to the end of its last turn, and answer and stop as a person does."""
        await is_known.wait()
        has_stopped = False
        read = ReaderNotes(self._folder / f"{session}.read")
        async with (
            asyncio.TaskGroup() as group,
            contextlib.aclosing(self._reader.follow(session, after="0-0")) as events,
        ):
            async for event in events:
                read.add(event)
                if event.question is not None:
                    group.create_task(self._answer(session, read.ends, event.question))
                if _is_first_call(event) and is_stopped(session, read.ends) and not has_stopped:
                    has_stopped = True
                    group.create_task(self._reader.cancel(session))
                if read.ends == TURNS:
                    break
        read.close()

    async def _answer(self, session: str, turn: int, asked: QuestionAsked) -> None:
        choice = Choice.DENY if is_denied(session, turn) else Choice.ALLOW
        with contextlib.suppress(QuestionClosedError):  # Its turn was stopped meanwhile.
            await self._reader.answer(session, asked, choice)


def _is_first_call(event: Event) -> bool:
    return isinstance(event.record, CallStarted) and event.record.response == 1


async def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.scale.clients_process")
    parser.add_argument("folder", type=Path)
    parser.add_argument("url")
    parser.add_argument("--clients", type=int, required=True)
    given = parser.parse_args()
    folder: Path = given.folder
    ledger = EffectLedger(folder / "ledger")
    reconnects = os.open(folder / "reconnects", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(session: str, is_reconnecting: bool) -> None:  # noqa: FBT001 - the client's interface
        if not is_reconnecting:
            os.write(reconnects, b".")

    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(
                connect(
                    given.url,
                    tools=client_tools(ledger),
                    world=HastyWorld(None, 1),
                    transport=WAYS[number % len(WAYS)],
                    on_reconnecting=note,
                )
            )
            for number in range(given.clients)
        ]
        async with asyncio.TaskGroup() as group:
            for number, client in enumerate(clients):
                reader = clients[(number + 1) % len(clients)]
                group.create_task(ScaleClient(number, folder, client, reader).live())


if __name__ == "__main__":
    asyncio.run(main())
