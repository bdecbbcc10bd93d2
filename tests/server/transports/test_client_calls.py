"""The timeout of a client's call runs while that client is connected."""

from __future__ import annotations

import asyncio
from typing import Any

from midstream.server.transports.client_calls import CLIENTS_MAX, UNNOTICED_S, ConnectedClients
from midstream.session.calls import NO_ANSWER_CONTENT
from midstream.testing.scripted_model import calls, text
from tests.server.serving import Json, command, opening, records_of
from tests.server.transports.test_connection import ConnectionBench, MemoryWire, bench, ended
from tests.spec import spec

TIMEOUT_S = 20.0
PLACE = ("s1", "k1")
TOOL: Json = {
    "spec": {"name": "push", "description": "", "parameters": {"type": "object"}},
    "timeout_s": TIMEOUT_S,
    "has_effects": True,
    "on_doubt": "unknown",
    "needs_approval": False,
}
SCRIPT = [calls(("c1", "push", "{}")), text("done")]


def records(wire: MemoryWire) -> dict[str, list[Json]]:
    found: dict[str, list[Json]] = {}
    for event in records_of(wire.sent):
        found.setdefault(event["record"]["type"], []).append(event["record"])
    return found


async def _start_call(on: ConnectionBench) -> tuple[MemoryWire, asyncio.Task[Any]]:
    """Return the connection of a client whose call has started."""
    wire = MemoryWire()
    wire.client_sends(opening(), command(tools=[TOOL]))
    connected = on.connect(wire)
    await on.world.settle()
    assert "call_started" in records(wire)
    return wire, connected


@spec("TURN-14")
async def test_an_outcome_is_accepted_from_a_client_that_was_away_for_longer_than_the_timeout() -> None:
    async with bench(*SCRIPT) as on:
        wire, connected = await _start_call(on)
        wire.hang_up()
        await ended(connected)
        await on.world.advance(100 * TIMEOUT_S)
        again = MemoryWire()
        result = {"call_id": "c1", "content": "pushed", "outcome": "ok"}
        content = {"type": "result", "turn": 1, "response": 1, "result": result}
        again.client_sends(opening(next_seqno=1), {"type": "command", "seqno": 1, "payload": content})
        on.connect(again)
        await on.world.settle()
        assert again.sent_frames("error") == []
        assert records(again)["call_ended"][0]["result"]["content"] == "pushed"
        assert "turn_ended" in records(again)


@spec("TURN-14")
async def test_a_call_times_out_at_a_connected_client_without_an_outcome() -> None:
    async with bench(*SCRIPT) as on:
        wire, _ = await _start_call(on)
        await on.world.advance(TIMEOUT_S + UNNOTICED_S - 1.0)
        assert "call_ended" not in records(wire)
        await on.world.advance(30.0)
        assert records(wire)["call_ended"][0]["result"]["content"] == NO_ANSWER_CONTENT


def test_connections_that_follow_one_another_within_the_gap_count_as_one() -> None:
    stays = ConnectedClients()
    assert stays.connected_s(PLACE, now=0.0) == 0.0
    stays.arrive(PLACE, gap_s=10.0, now=0.0)
    stays.leave(PLACE, gap_s=10.0, now=5.0)
    assert stays.connected_s(PLACE, now=6.0) == 0.0
    stays.arrive(PLACE, gap_s=10.0, now=15.0)
    assert stays.connected_s(PLACE, now=20.0) == 20.0
    stays.leave(PLACE, gap_s=10.0, now=20.0)
    stays.arrive(PLACE, gap_s=10.0, now=31.0)
    assert stays.connected_s(PLACE, now=32.0) == 1.0
    stays.leave(PLACE, gap_s=0.0, now=33.0)
    stays.leave(PLACE, gap_s=0.0, now=33.0)
    assert stays.connected_s(PLACE, now=34.0) == 0.0


def test_the_oldest_entries_are_dropped() -> None:
    stays = ConnectedClients()
    for number in range(CLIENTS_MAX + 1):
        stays.arrive(("s", str(number)), gap_s=0.0, now=0.0)
    assert stays.connected_s(("s", "0"), now=1.0) == 0.0
    assert stays.connected_s(("s", "1"), now=1.0) == 1.0
