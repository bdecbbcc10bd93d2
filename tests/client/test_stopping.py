"""The scope of `Client.cancel`: which turn it stops in each state."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator

import pytest

from midstream.client import Event, connect
from midstream.errors import SessionNotFoundError, UsageError
from midstream.models.responses import TextDelta
from midstream.protocol.frames import CANCEL_AFTER_S_MAX
from midstream.session.records import MessageQueued, MessageWithdrawn, TurnEnded, TurnStatus
from midstream.testing.scripted_model import Gate
from tests.server.serving import Served, make_app, served
from tests.spec import spec

WAIT_S = 60.0


@pytest.fixture
async def server() -> AsyncIterator[Served]:
    """A server whose model sends two words, and then nothing until it is cancelled."""
    async with served(make_app([[TextDelta("half a"), Gate(asyncio.Event())]])) as served_app:
        yield served_app


async def _until(events: AsyncIterator[Event], kind: type) -> Event:
    async with asyncio.timeout(WAIT_S):
        async for event in events:
            if isinstance(event.record, kind):
                return event
    raise AssertionError(f"no {kind.__name__} came")


async def _running(server: Served) -> None:
    async with asyncio.timeout(WAIT_S):
        while server.app.host.awake.turns_running < 1:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0)


def _is_stopped(event: Event) -> bool:
    return isinstance(event.record, TurnEnded) and event.record.status is TurnStatus.CANCELLED


@spec("STREAM-15")
@pytest.mark.parametrize("steps", range(1, 8))
async def test_a_cancel_right_after_a_message_cancels_it(server: Served, steps: int) -> None:
    async with connect(server.url) as client:
        ending = asyncio.create_task(_until(client.send("s1", "hi"), TurnEnded))
        for _ in range(steps):
            await asyncio.sleep(0)
        await asyncio.wait_for(client.cancel("s1"), WAIT_S)
        assert _is_stopped(await ending)


@spec("STREAM-15")
async def test_a_cancel_of_a_finished_turn_does_not_cancel_a_later_one(server: Served) -> None:
    async with connect(server.url) as client, connect(server.url) as other:
        first = client.send("s1", "hi")
        ending = asyncio.create_task(_until(first, TurnEnded))
        await _running(server)
        await asyncio.wait_for(other.cancel("s1", 1), WAIT_S)
        assert _is_stopped(await ending)
        second = asyncio.create_task(_until(client.send("s1", "again"), TurnEnded))
        await _running(server)
        await asyncio.wait_for(client.cancel("s1", 1), WAIT_S)
        await asyncio.wait_for(other.cancel("s1", 1), WAIT_S)
        assert server.app.host.awake.turns_running == 1
        await asyncio.wait_for(client.cancel("s1", 2), WAIT_S)
        assert _is_stopped(await second)


@spec("STREAM-15", "TURN-29")
async def test_a_cancel_reaches_another_clients_turn_before_the_queued_messages(server: Served) -> None:
    async with connect(server.url) as client, connect(server.url) as other:
        ending = asyncio.create_task(_until(other.send("s1", "hi"), TurnEnded))
        await _running(server)
        mine = client.send("s1", "and then")
        await _until(mine, MessageQueued)
        rest = asyncio.create_task(_until(mine, MessageWithdrawn))
        await asyncio.wait_for(client.cancel("s1"), WAIT_S)
        assert _is_stopped(await ending)
        await rest


async def test_a_session_without_messages_has_nothing_to_cancel(server: Served) -> None:
    async with connect(server.url) as client:
        with pytest.raises(SessionNotFoundError):
            await client.cancel("s1")


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, CANCEL_AFTER_S_MAX + 1])
async def test_a_number_of_seconds_that_no_server_accepts_is_refused(seconds: float) -> None:
    async with connect("http://127.0.0.1:9") as client:
        with pytest.raises(UsageError, match="`cancel_after_s` is"):
            await client.ask("s1", "hi", cancel_after_s=seconds)
