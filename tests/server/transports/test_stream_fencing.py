"""Several servers of one store, in one process: a newer connection of a stream ends the older one on another server."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.errors import DrainingError, MidstreamError, StoreBusyError
from midstream.retries import NOTICE_ATTEMPTS_MAX
from midstream.server.transports.connection import Connections
from midstream.server.transports.stream_fencing import Notices
from midstream.session.records import StreamTaken, decode
from midstream.session.session import Received
from midstream.store.memory import Memory, MemoryStore
from midstream.testing.fake_worlds import FakeWorld
from midstream.testing.scripted_model import ScriptedModel, Stall
from midstream.testing.store_fakes import FailingStore
from midstream.timing import StallBudgets
from tests.server.escrowing import escrowed_app
from tests.server.serving import WAIT_S, Socket, abort, command, opening, served
from tests.server.transports.test_connection import ConnectionBench, MemoryWire, bench, ended
from tests.spec import spec

LONG_S = 60.0
"""Seconds that cover every retry."""
PATIENT = StallBudgets(first_token_s=math.inf, first_token_max_s=10 * LONG_S)
"""A silence limit so long that no silence is reported: only clients send."""


@asynccontextmanager
async def two_servers() -> AsyncIterator[tuple[ConnectionBench, ConnectionBench]]:
    """Run two processes of one store; the first one owns the sessions it begins."""
    memory, world = Memory(), FakeWorld()
    async with bench([Stall()], world=world, memory=memory) as one:
        store = MemoryStore(memory)
        host = Host(Agent(ScriptedModel([])), store, world=world)
        await host.start()
        other = ConnectionBench(host, store, world, Connections(limit=3))
        await world.settle()
        yield one, other
        for task in other.running:
            task.cancel()
        await asyncio.gather(*other.running, return_exceptions=True)
        await asyncio.wait_for(host.stop(grace_s=0.1), WAIT_S)


async def connected(on: ConnectionBench, number: int, *fields: dict[str, object]) -> MemoryWire:
    wire = MemoryWire()
    wire.client_sends(opening(connection=number), *fields)
    on.connect(wire)
    await on.world.settle()
    return wire


async def takings(on: ConnectionBench) -> list[int]:
    """Return the numbers of the connections that took over the stream, as the journal has them."""
    found = [decode(each.body) for each in await on.store.read("s1", after=0, limit=100)]
    return [each.connection for each in found if isinstance(each, StreamTaken)]


def code(wire: MemoryWire) -> str:
    return "".join(each["code"] for each in wire.sent_frames("error"))


@spec("STREAM-8", "STREAM-102")
async def test_a_newer_connection_ends_the_older_one_at_another_server_before_any_command() -> None:
    async with two_servers() as (one, other):
        first = await connected(one, 1, command())
        assert first.sent_frames("ack")
        second = await connected(other, 2)
        assert (code(first), await ended(one.running[0])) == ("stream_fenced", "stream_fenced")
        third = await connected(one, 3)
        assert (code(second), await ended(other.running[0])) == ("stream_fenced", "stream_fenced")
        assert code(third) == ""
        assert await takings(one) == [2, 3]
        third.client_sends(abort(1))
        await one.world.settle()
        assert third.sent_frames("ack") == [{"type": "ack", "seqno": 1}]


@spec("STREAM-101")
async def test_the_older_connection_receives_no_event_after_the_takeover_record() -> None:
    async with two_servers() as (one, other):
        first = await connected(one, 1, command())
        await connected(other, 2)
        found = [each["record"]["type"] for frame in first.sent_frames("events") for each in frame["events"]]
        assert found[-1] == "attempt_started"


@spec("STREAM-101")
async def test_a_delayed_connection_finds_the_newer_one_in_the_journal() -> None:
    async with two_servers() as (one, other):
        await connected(other, 2, command())
        late = await connected(one, 1)
        assert code(late) == "stream_fenced"
        assert late.sent_frames("welcome") == []


@spec("STREAM-101")
async def test_the_first_command_of_a_newer_connection_ends_one_that_came_before_any_command() -> None:
    async with two_servers() as (one, other):
        older = await connected(other, 1)
        assert (await connected(one, 2, command())).sent_frames("ack")
        assert (code(older), await ended(other.running[0])) == ("stream_fenced", "stream_fenced")
        assert older.sent_frames("events") == []
        assert await takings(one) == [], "the record that opens the stream says it"


@spec("STREAM-86", "STREAM-102")
async def test_an_encrypted_session_is_no_exception(tmp_path: Path) -> None:
    memory = Memory()
    apps = [escrowed_app(tmp_path, [[Stall()]], memory=memory) for _ in range(2)]
    async with (
        served(apps[0]) as one,
        served(apps[1]) as other,
        Socket(one.socket()) as first,
        Socket(other.socket()) as second,
    ):
        await first.send(opening(connection=1))
        await first.send(command())
        await first.receive_until("attempt_started")
        await second.send(opening(connection=2, next_seqno=1))
        assert (await first.receive_until("error"))[-1]["code"] == "stream_fenced"
        await second.send(abort(1))
        await second.receive_until("turn_ended")


@spec("STREAM-102")
async def test_a_single_server_writes_nothing_for_a_connection_that_sends_nothing() -> None:
    async with bench([Stall()]) as on:
        await connected(on, 1, command())
        await connected(on, 2)
        assert await on.world.live_through(takings(on)) == []
        wire = await connected(on, 3, abort(1))
        assert wire.sent_frames("ack") == [{"type": "ack", "seqno": 1}]
        assert await takings(on) == [3], "a command says it by itself"


@spec("STREAM-102")
async def test_a_connection_of_several_requests_is_announced_once() -> None:
    async with two_servers() as (one, other):
        await connected(one, 1, command())
        known = (await one.host.session("s1")).state.streams["k1"]
        notice = Received("k1", known.secret_digest, 0, known.digest_at(0), None, connection=2)
        for _ in range(3):
            other.among.notices.give(other.host, "s1", notice)
        await one.world.settle()
        assert await takings(one) == [2]
        other.among.notices.give(other.host, "s1", notice)
        await one.world.settle()
        assert await takings(one) == [2]


@spec("STREAM-102")
@pytest.mark.parametrize(
    ("outage", "appends"),
    [(StoreBusyError("locked"), NOTICE_ATTEMPTS_MAX), (DrainingError("bye"), 1)],
    ids=lambda each: getattr(each, "code", ""),
)
async def test_a_failing_notice_is_retried_a_few_times_and_then_left_to_the_next_command(
    outage: MidstreamError, appends: int
) -> None:
    memory, world = Memory(), FakeWorld()
    behind = MemoryStore(memory)
    store = FailingStore(behind)
    host = Host(Agent(ScriptedModel([[Stall()]]), stalls=PATIENT), store, world=world)
    await host.start()
    on = ConnectionBench(host, behind, world, Connections(limit=3))
    await connected(on, 1, command())
    known = (await host.session("s1")).state.streams["k1"]
    notice = Received("k1", known.secret_digest, 0, known.digest_at(0), None, connection=2)
    store.outage, before = outage, store.appends
    notices = Notices()
    notices.give(host, "s1", notice)
    await world.advance(LONG_S)
    assert store.appends - before == appends
    store.outage = None
    notices.give(host, "s1", notice)
    await world.settle()
    assert (await host.session("s1")).state.streams["k1"].connection == 2
    notices.stop()
    for task in on.running:
        task.cancel()
    await asyncio.gather(*on.running, return_exceptions=True)
    await asyncio.wait_for(host.stop(grace_s=0.1), WAIT_S)
