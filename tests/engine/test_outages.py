"""A disk that is full in the middle of a turn: clients receive the error within seconds, and nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path

import pytest

from midstream.client import Client, Event, connect
from midstream.client.transport_selection import TransportName
from midstream.engine.agent import Agent
from midstream.environment import Cancellable, World
from midstream.errors import MidstreamError
from midstream.server.app import asgi
from midstream.session.records import CallEnded, CallStarted, Delta, MessageAccepted, TurnEnded
from midstream.store.sqlite import SQLiteStore
from midstream.testing.scripted_model import ScriptedModel, calls, text
from midstream.tools.function_tools import tool
from tests.server.serving import served
from tests.spec import spec
from tests.store.disk import Disk

WAIT_S = 60.0
SPEED = 20.0
TRANSPORTS: tuple[TransportName, ...] = ("websocket", "sse", "poll")


class FastForwardWorld(World):
    """The real world, in which time passes `SPEED` times as fast."""

    def monotonic(self) -> float:
        return SPEED * super().monotonic()

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds / SPEED)

    def later(self, seconds: float, do: Callable[[], None]) -> Cancellable:
        return super().later(seconds / SPEED, do)


@pytest.fixture
def disk() -> Iterator[Disk]:
    disk = Disk("full in a turn")
    yield disk
    disk.unregister()


class OutageReader:
    """One client, its received events, and the errors that the server reported."""

    def __init__(self, url: str, transport: TransportName) -> None:
        self.errors: list[MidstreamError] = []
        self.has_error = asyncio.Event()
        self.client: Client = connect(url, transport=transport, on_reconnecting=self._note)
        self.events: list[Event] = []
        self.ended = 0

    def _note(self, session: str, _is_reconnecting: bool) -> None:  # noqa: FBT001 - the client's callback
        if error := self.client.trouble(session):
            self.errors.append(error)
            self.has_error.set()

    async def read(self, events: AsyncGenerator[Event, None], *, turns: int) -> None:
        async with contextlib.aclosing(events) as reading:
            async for event in reading:
                self.events.append(event)
                self.ended += isinstance(event.record, TurnEnded)
                if self.ended == turns:
                    return

    def of(self, kind: type) -> list[Event]:
        return [event for event in self.events if isinstance(event.record, kind)]


@pytest.mark.slow
@spec("STREAM-115")
async def test_a_disk_that_stays_full_is_reported_to_every_client_and_costs_nothing(
    tmp_path: Path, disk: Disk
) -> None:
    is_running, may_continue, runs = asyncio.Event(), asyncio.Event(), []

    @tool
    async def build(target: str) -> str:
        runs.append(target)
        is_running.set()
        await may_continue.wait()
        return "built " + target

    world = FastForwardWorld()
    script = iter([calls(("build", '{"target":"all"}')), text("all done"), text("second answer")])
    model = ScriptedModel(lambda _request: next(script))
    store = SQLiteStore(tmp_path / "x.db", vfs=disk.name, world=world)
    app = asgi(Agent(model, tools=[build]), store=store, world=world)
    async with asyncio.timeout(WAIT_S), served(app) as server, asyncio.TaskGroup() as group:
        readers = [OutageReader(server.url, transport) for transport in TRANSPORTS]
        speaker, late = OutageReader(server.url, "websocket"), OutageReader(server.url, "sse")
        for each in (*readers, speaker, late):
            await each.client.__aenter__()
        group.create_task(speaker.read(speaker.client.send("s", "build it"), turns=1))
        await is_running.wait()
        reading = [group.create_task(each.read(each.client.follow("s", "0"), turns=2)) for each in readers]
        while not all(each.of(CallStarted) for each in readers):  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0)
        disk.is_full = True
        may_continue.set()
        waiting = group.create_task(late.read(late.client.send("s", "and then?"), turns=1))
        for each in (*readers, speaker, late):
            await each.has_error.wait()

        disk.is_full = False
        await asyncio.gather(*reading, waiting)
        for each in (*readers, speaker, late):
            await each.client.__aexit__(None, None, None)

    all_readers = (*readers, speaker, late)
    assert {(error.code, error.retry) for each in all_readers for error in each.errors} == {
        ("store_full", "later")
    }
    assert all("free some" in error.message for each in all_readers for error in each.errors)
    assert runs == ["all"]
    for each in readers:
        places = [int(event.id.partition("-")[2]) for event in each.events]
        assert places == list(range(1, len(places) + 1))
        assert len(each.of(CallEnded)) == 1
        assert len(each.of(MessageAccepted)) == 2
        words = "".join(event.record.text for event in each.of(Delta) if isinstance(event.record, Delta))
        assert words == "all donesecond answer"
