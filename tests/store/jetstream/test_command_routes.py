"""Forwarded commands with lost messages."""

from __future__ import annotations

import asyncio

import pytest

from midstream.environment import World
from midstream.store.contract import ForwardedCommand
from midstream.store.jetstream import JetStreamStore
from tests.store.jetstream.jetstream_places import JetStreamPlace
from tests.store.jetstream.nats_relay import NatsRelay

pytestmark = pytest.mark.slow

WORLD = World()
WITHIN_S = 60.0


async def test_a_command_and_its_answer_arrive_despite_lost_connections(
    place: JetStreamPlace, store: JetStreamStore
) -> None:
    await store.claim("s", at=1.0)
    async with NatsRelay(place).serving() as relay:
        sender = JetStreamStore(relay.url)
        await sender.open()
        for number in range(3):
            forwarding = WORLD.spawn(sender.forward("s", b"%d" % number), name="forward")
            await WORLD.sleep(0)
            relay.cut()
            command = await _command(store)
            assert command.body == b"%d" % number
            relay.cut()  # The answer finds its sender disconnected.
            await store.answer(command.number, b"answer %d" % number)
            async with asyncio.timeout(WITHIN_S):
                assert await forwarding == b"answer %d" % number
        await sender.close()


async def _command(store: JetStreamStore) -> ForwardedCommand:
    async with asyncio.timeout(WITHIN_S):
        while True:
            if commands := (await store.watch({})).forwarded_commands:
                return commands[0]
