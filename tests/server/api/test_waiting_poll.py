"""A long poll ends with what it waits for, with its time, its client, or its server."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.errors import DrainingError, NotFoundError
from midstream.server.api.waiting_poll import LONG_POLL_S, ClientLeftError, WaitingPoll
from midstream.server.auth.caller import UnauthenticatedCaller
from midstream.server.transports.connection import Connections
from midstream.store.memory import MemoryStore
from midstream.testing.fake_worlds import FakeWorld
from midstream.testing.scripted_model import ScriptedModel

WAIT_S = 60.0


class Case:
    """A poll in a world whose clock stands still."""

    def __init__(self) -> None:
        self.world = FakeWorld(1)
        host = Host(Agent(ScriptedModel(())), MemoryStore(), world=self.world)
        self.connections = Connections()
        self.poll: WaitingPoll[str] = WaitingPoll(host, self.connections, "s", UnauthenticatedCaller())
        self.more: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.gone = asyncio.Event()
        self.waiting = asyncio.create_task(self.poll.wait(self._wait(), self._receive))

    async def _wait(self) -> str:
        return await self.more

    async def _receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def begun(self) -> None:
        """Wait until the poll is counted, and all its tasks wait."""
        async with asyncio.timeout(WAIT_S):
            while not len(self.connections) or self.world.next_wake_at is None:  # noqa: ASYNC110 - its own count
                await asyncio.sleep(0)

    async def end(self) -> str | None:
        async with asyncio.timeout(WAIT_S):
            try:
                return await self.waiting
            finally:
                assert len(self.connections) == 0


async def test_it_returns_what_it_waits_for() -> None:
    case = Case()
    await case.begun()
    case.more.set_result("more")
    assert await case.end() == "more"


async def test_it_raises_what_its_wait_raises() -> None:
    case = Case()
    await case.begun()
    case.more.set_exception(NotFoundError("deleted"))
    with pytest.raises(NotFoundError):
        await case.end()


async def test_it_returns_nothing_once_its_time_is_over() -> None:
    case = Case()
    await case.begun()
    await case.world.advance(LONG_POLL_S)
    assert await case.end() is None


async def test_it_ends_with_its_client() -> None:
    case = Case()
    await case.begun()
    case.gone.set()
    with pytest.raises(ClientLeftError):
        await case.end()


async def test_it_ends_with_its_server() -> None:
    case = Case()
    await case.begun()
    case.poll.end(DrainingError("bye"))
    with pytest.raises(DrainingError):
        await case.end()
