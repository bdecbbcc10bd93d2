"""A long poll ends with its value, its timeout, its client or its server."""

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


class PollCase:
    """A poll in a world whose clock is frozen."""

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

    async def until_waiting(self) -> None:
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


async def test_a_poll_returns_the_value_it_waits_for() -> None:
    case = PollCase()
    await case.until_waiting()
    case.more.set_result("more")
    assert await case.end() == "more"


async def test_a_poll_raises_the_exception_of_its_wait() -> None:
    case = PollCase()
    await case.until_waiting()
    case.more.set_exception(NotFoundError("deleted"))
    with pytest.raises(NotFoundError):
        await case.end()


async def test_a_poll_returns_nothing_after_its_timeout() -> None:
    case = PollCase()
    await case.until_waiting()
    await case.world.advance(LONG_POLL_S)
    assert await case.end() is None


async def test_a_poll_ends_when_its_client_disconnects() -> None:
    case = PollCase()
    await case.until_waiting()
    case.gone.set()
    with pytest.raises(ClientLeftError):
        await case.end()


async def test_a_poll_ends_when_its_server_drains() -> None:
    case = PollCase()
    await case.until_waiting()
    case.poll.end(DrainingError("bye"))
    with pytest.raises(DrainingError):
        await case.end()
