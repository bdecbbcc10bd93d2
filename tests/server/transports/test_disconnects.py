"""Turns whose client requested their cancellation on disconnect, and disconnected."""

from __future__ import annotations

import asyncio

from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.errors import DrainingError
from midstream.server.transports.connection import Connections
from midstream.server.transports.disconnects import NAMESPACE
from midstream.server.transports.long_poll import GAP_S
from midstream.session.records import TurnEnded
from midstream.store.memory import Memory, MemoryStore
from midstream.testing.fake_worlds import FakeWorld
from midstream.testing.scripted_model import ScriptedModel, Stall
from tests.server.serving import WAIT_S, command, opening
from tests.server.transports.test_connection import ConnectionBench, MemoryWire, bench, ended
from tests.spec import spec

GRACE_S = 30.0


async def begin_turn(
    on: ConnectionBench, *, seqno: int = 0, connection: int = 1, **wish: float | None
) -> tuple[MemoryWire, asyncio.Task[object]]:
    wire = MemoryWire()
    wire.client_sends(opening(connection=connection, **(wish or {"cancel_after_s": GRACE_S})))
    if not seqno:
        wire.client_sends(command())
    task = on.connect(wire)
    await on.world.settle()
    return wire, task


async def lose(wire: MemoryWire, task: asyncio.Task[object]) -> None:
    wire.hang_up()
    await asyncio.wait_for(task, WAIT_S)


async def is_live(host: Host) -> bool:
    return (await host.session("s1")).state.is_live


@spec("STREAM-55")
async def test_the_turn_of_an_absent_client_is_stopped_and_all_readers_receive_it() -> None:
    async with bench([Stall()]) as on:
        reader = MemoryWire()
        reader.client_sends(opening(stream="", secret="", event_id="0-0"))
        wire, task = await begin_turn(on)
        on.connect(reader)
        await lose(wire, task)
        await on.world.advance(GRACE_S - 1.0)
        assert await is_live(on.host)
        await on.world.advance(2.0)
        assert not await is_live(on.host)
        last = (await on.host.session("s1")).state.last_turn
        assert isinstance(last, TurnEnded)
        assert last.status == "cancelled"
        assert any(
            event["record"]["type"] == "turn_ended"
            for frame in reader.sent_frames("events")
            for event in frame["events"]
        )
        assert await on.store.kv_list(NAMESPACE) == []


@spec("STREAM-55")
async def test_a_client_that_reconnects_keeps_its_turn() -> None:
    async with bench([Stall()]) as on:
        await lose(*await begin_turn(on))
        await on.world.advance(GRACE_S - 1.0)
        await begin_turn(on, seqno=1, connection=2)
        await on.world.advance(GRACE_S * 2)
        assert await is_live(on.host)


@spec("STREAM-55")
async def test_the_policy_still_applies_to_the_next_process_of_a_client() -> None:
    async with bench([Stall()]) as on:
        await lose(*await begin_turn(on))
        await on.world.advance(GRACE_S - 1.0)
        again = await begin_turn(on, seqno=1, connection=2, cancel_after_s=None)
        await on.world.advance(GRACE_S * 2)
        assert await is_live(on.host), "it is here"
        await lose(*again)
        await on.world.advance(GRACE_S - 1.0)
        assert await is_live(on.host)
        await on.world.advance(2.0)
        assert not await is_live(on.host)


@spec("STREAM-55")
async def test_a_client_between_two_polls_does_not_count_as_disconnected() -> None:
    async with bench([Stall()]) as on:
        for connection in (1, 2):
            wire, task = await begin_turn(on, seqno=connection - 1, connection=connection, cancel_after_s=0.0)
            wire.gap_s = GAP_S
            await lose(wire, task)
            await on.world.advance(GAP_S - 1.0)
            assert await is_live(on.host)
        await on.world.advance(2.0)
        assert not await is_live(on.host)


@spec("STREAM-55")
async def test_the_next_connection_lifts_a_policy_that_only_its_predecessor_had() -> None:
    async with bench([Stall()]) as on:
        wire, task = await begin_turn(on, cancel_after_s=None)
        await lose(*await begin_turn(on, seqno=1, connection=2, cancel_after_s=GRACE_S))
        await begin_turn(on, seqno=1, connection=3, cancel_after_s=None)
        await on.world.advance(GRACE_S * 2)
        assert await is_live(on.host)
        assert (wire.sent_frames("error")[0]["code"], task.done()) == ("stream_fenced", True)


@spec("STREAM-55")
async def test_a_client_that_reconnects_to_another_process_keeps_its_turn() -> None:
    memory, world = Memory(), FakeWorld()
    async with bench([Stall()], world=world, memory=memory) as on:
        await lose(*await begin_turn(on))
        store = MemoryStore(memory)
        host = Host(Agent(ScriptedModel([])), store, world=world)
        await host.start()
        elsewhere = ConnectionBench(host, store, world, Connections(limit=3))
        await begin_turn(elsewhere, seqno=1, connection=2, cancel_after_s=None)
        await world.advance(GRACE_S * 2)
        assert await is_live(on.host)
        for task in elsewhere.running:
            task.cancel()
        await asyncio.gather(*elsewhere.running, return_exceptions=True)
        await asyncio.wait_for(host.stop(grace_s=0.1), WAIT_S)


@spec("STREAM-25", "STREAM-55")
async def test_a_client_that_closes_its_connection_leaves_its_turn_running_and_no_entry() -> None:
    async with bench([Stall()]) as on:
        wire, task = await begin_turn(on)
        wire.client_sends({"type": "close"})
        assert await ended(on.running[0]) == ""
        await on.world.settle()
        assert (task.done(), await on.store.kv_list(NAMESPACE)) == (True, [])
        await on.world.advance(GRACE_S * 2)
        assert await is_live(on.host)


@spec("STREAM-55")
async def test_a_draining_server_stops_no_turn() -> None:
    async with bench([Stall()]) as on:
        lost, task = await begin_turn(on)
        await lose(lost, task)
        await begin_turn(on, seqno=1, connection=2)
        on.among.drain(DrainingError("bye"))
        await on.world.advance(GRACE_S * 2)
        assert await is_live(on.host)
