"""A server restored from an older copy cannot detect that: its clients do, over each transport."""

from __future__ import annotations

import asyncio
import copy
import logging
from pathlib import Path

import pytest

from midstream.client import connect
from midstream.client.transport_selection import TransportKind
from midstream.errors import EventsLostError
from midstream.session.records import CallEnded, MessageAccepted, decode
from midstream.store.memory import Memory, MemoryStore
from midstream.testing import calls, text
from midstream.testing.scripted_model import Stall
from midstream.tools.function_tools import tool
from tests.server.serving import WAIT_S, make_app, served
from tests.spec import spec

SCRIPT = [calls(("c1", "push", "{}")), text("pushed")]


@tool
async def push() -> str:
    """Push the button."""
    return "pushed"


def _restore(memory: Memory) -> None:
    """Restore the store to the moment after the message was accepted."""
    records = memory.sessions["s1"].records
    kinds = [type(decode(stored.body)) for stored in records]
    del records[kinds.index(MessageAccepted) + 1 :]


@spec("STREAM-100")
@pytest.mark.parametrize("way", TransportKind)
async def test_a_client_of_a_restored_server_is_notified_and_keeps_its_events(
    way: TransportKind, tmp_path: Path, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="midstream.server")
    memory, state = Memory(), tmp_path / "state.db"
    async with asyncio.timeout(WAIT_S):
        async with (
            served(make_app(SCRIPT, store=MemoryStore(memory), tools=[push]), port=port) as server,
            connect(server.url, state=state, transport=way) as client,
        ):
            async for event in client.send("s1", "hi"):
                if isinstance(event.record, CallEnded):
                    break
        _restore(memory)
        app = make_app([text("something else")], store=MemoryStore(memory), tools=[push])
        async with served(app, port=port) as server:
            for _ in range(2):
                async with connect(server.url, state=state, transport=way) as client:
                    (turn,) = await client.resume_interrupted()
                    with pytest.raises(EventsLostError, match="its journal was cut, or is an older copy"):
                        _ = [event async for event in turn]
            async with connect(server.url, state=state, transport=way) as client:
                again = [event async for event in client.send("s1", "go on")]
    assert again[-1].is_end


@spec("STREAM-105")
@pytest.mark.parametrize("way", TransportKind)
async def test_a_restored_server_that_reused_event_ids_is_detected_too(
    way: TransportKind, tmp_path: Path, port: int
) -> None:
    memory, state = Memory(), tmp_path / "state.db"
    async with asyncio.timeout(WAIT_S):
        async with (
            served(make_app([[Stall()]], store=MemoryStore(memory), tools=[push]), port=port) as server,
            connect(server.url, state=state, transport=way) as client,
        ):
            async for event in client.send("s1", "hi"):
                if isinstance(event.record, MessageAccepted):
                    break
        _restore(memory)
        older = copy.deepcopy(memory.sessions)
        async with (
            served(make_app(SCRIPT, store=MemoryStore(memory), tools=[push]), port=port) as server,
            connect(server.url, state=state, transport=way) as client,
        ):
            (turn,) = await client.resume_interrupted()
            async for event in turn:
                if isinstance(event.record, CallEnded):
                    break
        memory.sessions = older
        async with served(make_app(SCRIPT, store=MemoryStore(memory), tools=[push]), port=port) as server:
            async with connect(server.url) as other:
                async for each in other.follow("s1", "0-0"):
                    if each.is_end:
                        break
            ids = [f"{stored.epoch}-{stored.position}" for stored in older["s1"].records]
            assert event.id in ids, "it gives out the same one"
            async with connect(server.url, state=state, transport=way) as client:
                (turn,) = await client.resume_interrupted()
                with pytest.raises(EventsLostError, match="and began epoch 2 again since"):
                    _ = [event async for event in turn]
